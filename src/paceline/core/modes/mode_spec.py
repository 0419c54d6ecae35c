"""What a mode is, as a value: its knobs, what follows from them, its text form, and the machine that runs it.

`presets.py` has the table of all modes; `parsing.py` reads texts such as `ssp:2+period=4`.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from paceline.core.modes.machine import Clocks, Machine, Rounds, WholeEpochs
from paceline.core.modes.presets import (
    BETA,
    HISTORY,
    PLAIN,
    PRESETS,
    Batches,
    Damping,
    Outer,
    Payload,
    Trait,
)
from paceline.core.modes.refusals import (
    no_batches,
    no_damping,
    no_outer,
    no_quorum,
    not_between_groups,
    unknown_mode,
)
from paceline.exceptions import UsageError

__all__ = ["ModeSpec"]

_DILOCO = 0.7, 0.9
"""The outer learning rate and Nesterov momentum of DiLoCo (Douillard et al., 2023), …"""
_DILOCO_STEPS = 500
"""… and the number of local steps they were chosen for."""


@dataclass(frozen=True, kw_only=True)
class ModeSpec:
    """A consistency policy. `str(spec)` is its text form, which `parse_mode` reads back.

    Outside of this package, ask the properties and methods below, which say what a mode does, and not its
    name or its knobs: then a new mode needs no change elsewhere.
    """

    bound: int | None
    """How many exchanges a worker may lead the slowest; None is unlimited."""

    spare: int | None
    """An update is complete with all contributions but this many; None: the mode does not go in rounds."""

    name: str = ""
    """The preset's name. Empty: that of bsp, backup, ssp and asp that `bound` and `spare` mean."""

    quorum: int = 1
    """Not in rounds: this many contributions make an update (n-softsync)."""

    push_every: int = 1
    """Local steps between pushes."""

    fetch_every: int = 1
    """Local steps between fetches."""

    payload: Payload = "gradient"

    damping: Damping = "none"

    beta: float = BETA
    """Elastic: beta = workers × alpha, and alpha is the part of its distance that a worker moves by."""

    outer: Outer = "own"

    batches: Batches = "equal"

    history: int = HISTORY
    """Sandblaster: how many pairs of steps L-BFGS remembers."""

    inner: "ModeSpec | None" = None
    """Hybrid: the mode between the groups."""

    def __post_init__(self) -> None:
        if not self.name:
            rounds = "backup" if self.spare else "bsp"
            clocks = "asp" if self.bound is None else "ssp"
            object.__setattr__(self, "name", clocks if self.spare is None else rounds)
        if self.name not in PRESETS:
            raise unknown_mode(self.name, self.name)
        if problem := self._problem():
            raise UsageError(f"mode {str(self)!r}: {problem}")

    @property
    def in_place(self) -> bool:
        """Whether workers may read the servers' memory: no worker reads while a server writes."""
        return self.spare == 0 and self.payload == "gradient" and self.inner is None

    @property
    def by_round(self) -> bool:
        """Whether leases are dealt by rounds in rank order, which makes a run repeatable."""
        return self.spare == 0

    @cached_property
    def copies(self) -> Literal["none", "slow", "any"]:
        """Whose last leases of an epoch are given out twice (see `LeaseBook`)."""
        if self.by_epoch:
            return "any"
        free = self.spare is None and self.payload == "gradient" and self.inner is None
        return "slow" if free else "none"

    @cached_property
    def by_epoch(self) -> bool:
        """Whether parameters change only when an epoch is over: it is one gradient of the whole data set."""
        return self._has("by_epoch")

    @property
    def local(self) -> bool:
        """Whether workers step by themselves, with an optimizer of their own, between exchanges."""
        return self.payload != "gradient"

    @cached_property
    def needs_memory(self) -> bool:
        """Whether all workers must share the memory of one host."""
        return self._has("needs_memory")

    @cached_property
    def serverless(self) -> bool:
        """Whether servers have nothing to do."""
        return self._has("serverless")

    @property
    def grouped(self) -> bool:
        """Whether workers all-reduce in groups, whose roots speak for them."""
        return self.serverless or self.inner is not None

    @property
    def in_rounds(self) -> bool:
        """Whether workers wait for each other's pushes of the same version."""
        return self.spare is not None

    @property
    def averages_all(self) -> bool:
        """Whether an update is one average of the gradients of all workers."""
        return self.name == "bsp"

    @cached_property
    def own_threads(self) -> bool:
        """Whether a thread of each worker exchanges at its own pace, whatever the worker's steps."""
        return self._has("own_threads")

    @cached_property
    def local_nesterov(self) -> bool:
        """Whether workers step by SGD with Nesterov momentum instead of the script's optimizer."""
        return self._has("local_nesterov")

    @property
    def remembers_reads(self) -> bool:
        """Whether servers keep what each worker read last, because a push is corrected by it."""
        return self.damping in ("dc", "gap")

    @property
    def sends_gradients(self) -> bool:
        """Whether workers push gradients, single ones or sums, and not what they made of them."""
        return self.payload in ("gradient", "sum")

    @property
    def deals_by_speed(self) -> bool:
        """Whether the batches of a worker that others wait for get smaller."""
        return self.batches == "speed"

    @property
    def switchable(self) -> bool:
        """Whether a run may go from this mode to another such one, and back, while it runs."""
        return self.name in PLAIN and self.payload == "gradient"

    def one_optimizer_reason(self) -> str | None:
        """Why a script with several optimizers cannot run in this mode; None: it can."""
        if self.by_epoch:
            return f"mode {self} minimises one loss over the whole data set; use bsp or asp"
        if self.grouped:
            return f"mode {self} averages one gradient in a group of workers; use bsp, ssp, asp or local:h"
        if self.spare:
            return (
                f"in mode {self} a late step is dropped, and its worker would step the optimizers out of "
                "order from then on; use bsp or ssp"
            )
        return None

    def machine(self) -> Machine:
        """A new machine of this mode, without members, at version 0."""
        if self.by_epoch:
            return WholeEpochs()
        return Clocks(self.bound, self.quorum) if self.spare is None else Rounds(self.spare)

    def check(self, workers: int) -> None:
        """Raise UsageError if this many workers cannot run in this mode.

        Of a hybrid mode this tells what no number of groups would allow; when that number is known, ask
        `spec.inner.check(groups)`.
        """
        if workers < 1:
            raise UsageError(f"a run needs at least one worker, got workers={workers}")
        if self.inner is not None:
            self.inner.check(workers)
            return
        if self.spare is not None and self.spare >= workers:
            fitting = f"backup:{workers - 1} or less" if workers > 1 else "bsp"
            raise UsageError(
                f"mode {self} goes on without the slowest {self.spare}, so it needs at least "
                f"{self.spare + 1} workers, got workers={workers}; add workers or use {fitting}"
            )
        if self.quorum > workers:
            raise UsageError(
                f"mode {self} makes an update of {self.quorum} contributions, so it needs at least "
                f"{self.quorum} workers, got workers={workers}; add workers or use quorum={workers} or less"
            )
        if self.payload == "elastic" and self.beta > workers:
            raise UsageError(
                f"mode {self}: alpha = beta / workers = {self.beta / workers:g} would take a worker beyond "
                f"the centre; elastic averaging is stable for alpha <= (4 - 2·lr) / (4 - lr), never above 1. "
                f"Use beta <= {workers}"
            )

    def scale(self, staleness: int, workers: int) -> float:
        """The part of its step that a push of this staleness makes, in a run of `workers` workers.

        Elastic: alpha, which follows the number of workers, since beta = workers * alpha keeps the centre
        stable.
        """
        if self.payload == "elastic":
            return min(1.0, self.beta / max(1, workers))
        match self.damping:
            case "staleness":
                return 1 / max(1, staleness)
            case "dynsgd" | "momentum":
                return 1 / (staleness + 1)
            case "consgd":
                return 1 / max(1, workers)
            case _:
                return 1.0

    @property
    def outer_rates(self) -> tuple[float, float]:
        """Learning rate and Nesterov momentum of the servers' optimizer for `outer` nesterov and fitted.

        DiLoCo's 0.7 and 0.9 lengthen a step 0.7 / (1 - 0.9) = 7 times. That is right after hundreds of local
        steps, which are worth less and less, and too much after a few, whose sum grows in proportion. So
        `fitted` is plain averaging for 1 local step and DiLoCo's own for 500, and goes from one to the other
        with the logarithm of the steps in between.
        """
        rate, momentum = _DILOCO
        if self.outer == "nesterov":
            return rate, momentum
        part = min(1.0, math.log(self.push_every) / math.log(_DILOCO_STEPS))
        return 1 - part * (1 - rate), part * momentum

    def tighter(self) -> "ModeSpec | None":
        """The next mode on the way to bsp, by less staleness; None where there is none to switch to.

        asp, ssp:4, ssp:1, bsp; other bounds are halved. Quorum and damping stay until there are rounds.
        """
        if not self.switchable or self.spare == 0:
            return None
        if self.spare is None and (self.bound is None or self.bound > 1):
            bound = 4 if self.bound is None else self.bound // 2 if self.bound > 4 else 1
            return replace(self, name="ssp", bound=bound)
        return ModeSpec(bound=0, spare=0)

    def switch_refusal(self, other: "ModeSpec") -> str | None:
        """Why a run in this mode cannot be switched to `other` while it runs; None if it can."""
        if self == other or (self.switchable and other.switchable):
            return None
        odd, even = (other, self) if self.switchable else (self, other)
        does, usual = odd.workers_do, even.workers_do
        contrast = f"and so cannot change to {even}" if does == usual else f"which {even}'s do not"
        return (
            f"workers of {odd} {does}, {contrast}. A run is switched only among bsp, backup, ssp and asp "
            f"without a period: start a new run in {other}"
        )

    def __str__(self) -> str:
        if self.inner is not None:
            return f"hybrid:{self.inner}"
        preset = PRESETS[self.name]
        shown = [(getattr(self, number.fields[0]), number.default) for number in preset.numbers]
        numbers = ",".join(str(value) for value, default in shown if value != default)
        knobs = []
        if self.name in PLAIN and self.push_every != 1:
            knobs.append(f"+period={self.push_every}")
        if self.quorum != 1:
            knobs.append(f"+quorum={self.quorum}")
        if self.damping != preset.fields.get("damping", "none"):
            knobs.append(f"+damping={self.damping}")
        if self.outer != preset.fields.get("outer", "own"):
            knobs.append(f"+outer={self.outer}")
        if self.batches != "equal":
            knobs.append(f"+batches={self.batches}")
        return "".join([self.name, ":" * bool(numbers), numbers, *knobs])

    @property
    def workers_do(self) -> str:
        """What a mode's workers do that those of another mode cannot take up in the middle of a run."""
        if self.inner is not None:
            return "reduce their gradients in groups"
        return PRESETS[self.name].does or (
            "hold their own optimizer" if self.local else "push every gradient"
        )

    def _has(self, trait: Trait) -> bool:
        return trait in PRESETS[self.name].traits

    def _problem(self) -> str | None:
        """What about these values makes no sense, and what would."""
        if (self.inner is None) is (self.name == "hybrid"):
            return "hybrid, and hybrid alone, needs an inner mode, as in hybrid:asp"
        if self.inner is not None:
            return not_between_groups(self.inner.name) or no_batches(self)
        preset = PRESETS[self.name]
        for number in preset.numbers:
            for value in (getattr(self, name) for name in number.fields):
                if value is None or value < number.least:
                    return f"{self.name} needs {'/'.join(number.fields)} >= {number.least}, got {value}"
        fixed = {"payload": "gradient", **preset.fields}
        if self.name in PLAIN and max(self.push_every, self.fetch_every) > 1:
            fixed |= {"payload": "sum", "fetch_every": self.push_every}
        for name, value in fixed.items():
            if name not in ("outer", "damping") and getattr(self, name) != value:
                return f"{self.name} means {name}={value}, got {name}={getattr(self, name)}"
        if not 0 < self.beta < 2:
            return (
                f"beta must be above 0 and below 2, got {self.beta:g}: in a sweep over all workers "
                "the centre moves by beta times its distance to their mean, so from 2 on it overshoots "
                f"further each time; the paper's value is {BETA}"
            )
        if min(self.push_every, self.fetch_every, self.quorum, self.history) < 1:
            return "period, quorum and history must be at least 1"
        if self.quorum > 1 and (reason := no_quorum(self)):
            return reason
        if self.damping != "none" and (reason := no_damping(self)):
            return reason
        if self.outer != preset.fields.get("outer", "own") and (reason := no_outer(self)):
            return reason
        return no_batches(self)
