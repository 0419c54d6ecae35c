"""The reference that every script carries with it: what a prepared loop computes, by plain PyTorch alone."""

__all__ = ["REFERENCE"]

REFERENCE = '''\
import copy
import hashlib
import inspect
import pathlib
import random
import sys
import types

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils import data as tud

HOW, _, NUDGE = (sys.argv[1] if len(sys.argv) > 1 else "run").partition(":")
OUT = sys.argv[2] if len(sys.argv) > 2 else None
SEED = 0


# --- the reference ----------------------------------------------------------------------------------


class Reference:
    """What a prepared loader yields, by plain PyTorch: epoch after epoch, in the order of (SEED, epoch)."""

    def __init__(self, loader, workers, optimizers):
        self.loader, self.workers, self.epoch, self.steps = loader, workers, 0, 0
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self.count)

    def count(self, *_):
        self.steps += 1

    def __iter__(self):
        """A loop that is left before it has made a step is a peek, and uses up no epoch."""
        steps, whole = self.steps, False
        try:
            yield from self.batches_of(self.epoch)
            whole = True
        finally:
            if whole or self.steps > steps:
                self.epoch += 1

    def batches_of(self, epoch):
        loader = self.loader
        if isinstance(loader.dataset, tud.IterableDataset):
            return iter(loader)
        same = ("num_workers", "collate_fn", "generator")
        more = {name: getattr(loader, name) for name in same}
        return iter(tud.DataLoader(loader.dataset, batch_sampler=self.batches(epoch), **more))

    def batches(self, epoch):
        loader = self.loader
        seed = seed_of(SEED, epoch)
        if loader.batch_size is None:
            with seeded(seed):
                drawn = [list(batch) for batch in loader.batch_sampler]
            return [sum(drawn[k : k + self.workers], []) for k in range(0, len(drawn), self.workers)]
        sampler, size = loader.sampler, loader.batch_size * self.workers
        if type(sampler) is tud.RandomSampler and not sampler.replacement:
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(len(loader.dataset), generator=generator).tolist()[: len(sampler)]
        elif type(sampler) is tud.SequentialSampler:
            order = list(range(len(loader.dataset)))
        else:
            with seeded(seed):
                own = getattr(sampler, "generator", None)
                if own is not None:
                    own.manual_seed(seed_of(SEED, epoch, 0))
                order = list(sampler)
        batches = [order[k : k + size] for k in range(0, len(order), size)]
        return [batch for batch in batches if len(batch) == size] if loader.drop_last else batches


def nudged(x):
    """`whole:1`, `whole:2`, …: other last bits of the inputs show how much a script amplifies rounding."""
    if not NUDGE:
        return x
    drawing = torch.Generator().manual_seed(int(NUDGE))
    bits = torch.randint(-2, 3, x.shape, generator=drawing)
    return x * (1 + bits.to(x.dtype) * torch.finfo(x.dtype).eps)


def seed_of(*numbers):
    text = "/".join(map(str, numbers))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


class seeded:
    """Within, the global random generators begin at a seed."""

    def __init__(self, seed):
        self.seed = seed

    def __enter__(self):
        self.before = torch.get_rng_state(), random.getstate(), np.random.get_state()
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)

    def __exit__(self, *_):
        torch.set_rng_state(self.before[0])
        random.setstate(self.before[1])
        np.random.set_state(self.before[2])


def use_same_kernels(optimizer):
    """Paceline uses torch's fused kernels where the script leaves the choice open."""
    sparse = SPARSE and isinstance(optimizer, torch.optim.SGD)
    if sparse or "fused" not in inspect.signature(type(optimizer)).parameters:
        return
    for group in optimizer.param_groups:
        if group.get("fused") is None and not group.get("foreach"):
            group.update(fused=True, foreach=False)
            for state in (optimizer.state.get(p, {}) for p in group["params"]):
                if "step" in state:  # fused kernels count in float32
                    state["step"] = state["step"].float()
            if "momentum" in group:
                step_late_ones_apart(optimizer)


def step_late_ones_apart(optimizer):
    """torch's fused SGD refuses a group in which only some parameters have a momentum buffer yet."""
    step = type(optimizer).step

    def step_twice(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in given]
        begun = [optimizer.state.get(p, {}).get("momentum_buffer") is not None for p in given]
        for now in (True, False):
            for p, gradient, has_begun in zip(given, gradients, begun, strict=True):
                p.grad = gradient if has_begun is now else None
            step(optimizer)
        for p, gradient in zip(given, gradients, strict=True):
            p.grad = gradient
        return loss

    optimizer.step = types.MethodType(step_twice, optimizer)
'''
