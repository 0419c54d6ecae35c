"""How an update is shortened by its staleness without making momentum worse: `damping=momentum`.

n = staleness + 1 gradients are under way at a time, each computed before the others were applied. Two
things follow. First, n updates take the place of one update in bsp, so each must be 1/n as long. Second,
asynchrony itself acts as momentum (Mitliagkas et al., "Asynchrony begets Momentum", 2016): a gradient takes
effect n updates late, which multiplies the horizon 1 / (1 - momentum) of the script's momentum by n. With 8
workers a momentum of 0.9 is one of nearly 0.99, and the run oscillates until it is lost.

So the length lr / (1 - momentum) that a gradient has in all is divided by n, from the momentum first and
from the learning rate when no momentum is left:

    n (1 - momentum) <  1:   momentum' = 1 - n (1 - momentum),  lr' = lr
    n (1 - momentum) >= 1:   momentum' = 0,                     lr' = lr / (n (1 - momentum))

Without momentum that is lr / n, which is `damping=dynsgd`; without staleness nothing changes.
"""

__all__ = ["damped_rates"]

NO_MOMENTUM = 1e-12
"""Used instead of 0, at which torch's optimizers neither read nor write their momentum buffers: the next
fresh gradient would meet an old buffer. To float32 it is the same as 0."""


def damped_rates(lr: float, momentum: float, scale: float) -> tuple[float, float]:
    """Learning rate and momentum of an update that is to be `scale` times as long.

    Args:
        momentum: above 0, of an optimizer in which a gradient counts 1 / (1 - momentum) times in all.
        scale: 1 / (staleness + 1). From 1 on it is the learning rate alone that changes.
    """
    if scale >= 1 or not 0 < momentum < 1:
        return lr * scale, momentum
    shrunk = (1 - momentum) / scale
    if shrunk < 1 - NO_MOMENTUM:
        return lr, 1 - shrunk
    return lr / shrunk, NO_MOMENTUM
