"""The guard: sees from the losses that a run gets worse, and from the staleness whether its mode is to blame.

A run that runs away is seen by `Divergence`, early. The guard then has it go back, and on in bsp, which has
no staleness; a bound does not help, since among workers of one speed it changes the staleness little.

The guard itself sees a slower decline. The loss has risen if its recent mean stays above its lowest longer
mean by more than four times the noise, a quarter of what training has gained so far, and a fifth of that
loss. The noise is taken from the means of neighbouring blocks of losses, whose differences show slow swings
as well as quick ones but little of a trend, and a single loss is cut to what it may count. So a burst of bad
batches does not look like a decline, and a steady climb soon does. Losses that are mostly NaN or Inf are
one too, and so are pushes most of which had to be refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.modes.mode_spec import ModeSpec

__all__ = ["Decision", "Guard"]

# What a rise must exceed: this many times the noise, these parts of the gain and of the loss.
_NOISES, _OF_GAIN, _OF_LOSS = 4.0, 0.25, 0.2
# The noise is that of about this many blocks.
_BLOCKS = 24
# No single loss counts for more than this many times such a rise.
_CUT = 20.0
# The share of bad losses or pushes that is divergence.
_MOST = 0.5
# A mean staleness below this explains nothing.
_STALE = 0.5
# Number of pushes before which their staleness says nothing.
_FEW = 10
# Losses beyond this are as bad as Inf: their squares would overflow.
_HUGE = 1e100

_BSP = ModeSpec(bound=0, spare=0)


@dataclass(frozen=True)
class Decision:
    """What the guard advises, once."""

    mode: ModeSpec | None
    """The mode to go on in; None: the run diverges, and no switch would help."""

    reason: str
    """For people: what was seen, and what follows from it."""

    back_to: int | None = None
    """First the run is to go back to what was kept of it at this version or before. If it `ran_away`, to its
    beginning if nothing was; else only if something was."""

    ran_away: bool = False
    """What it has learned is lost. Without a mode to go on in, going on makes no sense."""


class Guard:
    """Feed it every loss, update and refusal of a run, and ask for its verdict after each.

    It counts events and knows no time: the lengths below are numbers of losses, or of pushes for what is
    told by pushes. Not thread-safe.

    Args:
        recent: length of the recent mean, and how long it must stay too high. Longer is slower to speak and
            harder to fool.
        longer: length of the mean that it is compared with.
        warmup: no verdict before this many. The first quarter of them is not looked at, since a fresh model's
            first steps say little, and the next half makes the first longer mean.
        cooldown: no verdict for this many after a decision, so that it can show what it does. The comparison
            starts afresh then: a loss that stays high is not a loss that rises.
    """

    def __init__(
        self, *, recent: int = 25, longer: int = 200, warmup: int = 200, cooldown: int = 200
    ) -> None:
        self._lengths = recent, longer
        self._skipped, self._settling = warmup // 4, warmup // 2
        self._cooldown = cooldown
        self._bad_losses, self._bad_pushes = _Mean(2 * recent), _Mean(2 * recent)
        self._quiet_losses = self._quiet_pushes = warmup
        self._staleness = _Mean(longer)
        self._recent, self._longer = _Mean(recent), _Mean(longer)
        # Half the squared difference of neighbouring blocks is, on average, the variance of a block's mean.
        self._block, self._block_before = _Mean(recent), math.nan
        self._variance = _Mean(_BLOCKS)
        self._highest, self._gain = -math.inf, 0.0
        self._lowest, self._lowest_at, self._lowest_version = math.inf, 0, 0
        self._too_high = 0
        self._despaired = False

    def loss(self, value: float, version: int = 0) -> None:
        """A worker reported the loss of a step, when the run was at about this version."""
        bad = not abs(value) < _HUGE
        self._bad_losses.add(bad)
        if bad or self._bad_losses.count <= self._skipped:
            return
        margin = self._margin()
        if 0 < margin < math.inf:
            value = min(value, self._lowest + _CUT * margin)
        self._block.add(value)
        if self._block.count == self._lengths[0]:
            if not math.isnan(self._block_before):
                self._variance.add((self._block.value - self._block_before) ** 2 / 2)
            self._block, self._block_before = _Mean(self._lengths[0]), self._block.value
        self._recent.add(value)
        self._longer.add(value)
        if self._longer.count < self._settling:
            return
        mean = self._longer.value
        self._highest = max(self._highest, mean)
        self._gain = max(self._gain, self._highest - mean)
        if mean < self._lowest:
            self._lowest, self._lowest_at = mean, self._bad_losses.count
            self._lowest_version = version
        self._too_high = self._too_high + 1 if self._recent.value > self._lowest + self._margin() else 0

    def update(self, staleness: int) -> None:
        """A push was applied that many versions after the one that it was computed from."""
        self.pushes({staleness: 1})

    def refused(self) -> None:
        """A push was refused, since it held NaN or Inf."""
        self.pushes({}, refused=1)

    def pushes(self, staleness: Mapping[int, int], *, refused: int = 0) -> None:
        """Pushes whose order is not known: how many were applied by staleness, and how many refused.

        One by one, those told last would count for more.
        """
        applied = sum(staleness.values())
        if applied:
            self._staleness.add(sum(each * count for each, count in staleness.items()) / applied, applied)
        if applied + refused:
            self._bad_pushes.add(refused / (applied + refused), applied + refused)

    def restart(self) -> None:
        """The run went back: what was heard until now says nothing about what comes."""
        self._start_afresh()
        self._recent, self._block = _Mean(self._lengths[0]), _Mean(self._lengths[0])
        self._gain = 0.0

    def ran_away(self, mode: ModeSpec, seen: str, good_version: int) -> Decision:
        """What to do about a run that diverges, as `Divergence` saw.

        Args:
            good_version: up to which nothing was wrong.
        """
        staleness, early = self._staleness.value, self._staleness.count < _FEW
        self._start_afresh()
        if not early:
            seen += f" while the mean staleness was {staleness:.1f}"
        if mode.tighter() is None or (staleness < _STALE and not early):
            why = f"{mode} has no tighter mode" if mode.tighter() is None else "no other mode will help"
            return Decision(None, f"{seen}, and {why}", good_version, ran_away=True)
        less = "no staleness" if early else "none"
        return Decision(_BSP, f"{seen}; {_BSP} has {less}", good_version, ran_away=True)

    def verdict(self, mode: ModeSpec) -> Decision | None:
        """What to do about a run in this mode: mostly nothing. To be carried out: it is not said again soon.

        That no switch would help, since staleness is not to blame or the mode has no tighter one that a run
        could be switched to, is said a single time.
        """
        seen = self._divergence()
        if seen is None:
            return None
        staleness, back_to = self._staleness.value, self._lowest_version
        self._start_afresh()
        seen += f" while the mean staleness was {staleness:.1f}"
        tighter = mode.tighter() if staleness >= _STALE else None
        if tighter is not None:
            return Decision(tighter, f"{seen}; {tighter} allows less of it than {mode}", back_to)
        if self._despaired:
            return None
        self._despaired = True
        if staleness < _STALE:
            why = "so a tighter mode will not help"
        else:
            why = f"but a run in {mode} cannot be switched to a tighter mode"
        return Decision(None, f"{seen}, {why}: try a lower learning rate, or clip the gradients")

    def _divergence(self) -> str | None:
        """The sign of it, if there is one and it is time to speak."""
        losses, pushes = self._bad_losses, self._bad_pushes
        if losses.count >= self._quiet_losses:
            if losses.value > _MOST:
                return "most of the recent losses were NaN or Inf"
            if self._too_high >= self._lengths[0]:
                rise = f"from {self._lowest:.3g} to {self._recent.value:.3g}"
                return f"the loss rose {rise} over the last {losses.count - self._lowest_at} reports"
        if pushes.count >= self._quiet_pushes and pushes.value > _MOST:
            return "most of the recent pushes held NaN or Inf and were refused"
        return None

    def _margin(self) -> float:
        noise = math.sqrt(self._variance.value)
        return max(_NOISES * noise, _OF_GAIN * self._gain, _OF_LOSS * abs(self._lowest))

    def _start_afresh(self) -> None:
        self._quiet_losses = self._bad_losses.count + self._cooldown
        self._quiet_pushes = self._bad_pushes.count + self._cooldown
        self._staleness, self._longer = _Mean(self._lengths[1]), _Mean(self._lengths[1])
        self._block_before, self._variance = math.nan, _Mean(_BLOCKS)
        self._highest, self._lowest, self._too_high = -math.inf, math.inf, 0


class _Mean:
    """The mean of all values while they are few, then exponential over about `length` of them."""

    def __init__(self, length: int) -> None:
        self.count = 0
        self.value = 0.0
        self._length = length

    def add(self, value: float, times: int = 1) -> None:
        self.count += times
        self.value += (value - self.value) * min(1, times / min(self.count, self._length))
