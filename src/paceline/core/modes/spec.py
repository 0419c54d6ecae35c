"""What a mode is, as a value: its knobs, its text form, and the machine that runs it.

A text is `NAME[:NUMBERS]` and then `+knob=value` for every knob that is turned: `ssp:2+period=4+quorum=3`.

| text             | bound | spare | push, fetch | payload  | outer    | a worker waits until                |
|------------------|-------|-------|-------------|----------|----------|-------------------------------------|
| `bsp`            | 0     | 0     | 1           | gradient | own      | everybody has pushed                |
| `backup:b`       | 0     | b     | 1           | gradient | own      | all but b have; late ones drop out  |
| `ssp:s`          | s     | -     | 1           | gradient | own      | it leads the slowest by at most s   |
| `asp`            | -     | -     | 1           | gradient | own      | never                               |
| `downpour:p,f`   | -     | -     | p, f        | sum      | adagrad  | never                               |
| `easgd:t,beta`   | -     | -     | t           | elastic  | -        | never                               |
| `eamsgd:t,beta`  | -     | -     | t           | elastic  | -        | never                               |
| `local:h`        | 0     | 0     | h           | delta    | average  | everybody has pushed                |
| `diloco:h`       | 0     | 0     | h           | delta    | fitted   | everybody has pushed                |
| `hogwild`        | -     | -     | 1           | none     | -        | never                               |
| `dogwild`        | -     | -     | free        | delta    | average  | never                               |
| `allreduce`      | 0     | 0     | 1           | none     | -        | everybody has its gradient          |
| `hybrid:<mode>`  | those of <mode>, which runs between groups of workers that all-reduce inside           |
| `sandblaster:m`  | -     | -     | 1           | gradient | L-BFGS   | an epoch ends                       |

Knobs: `period=n` (bsp, backup, ssp, asp: their gradients become sums over n local steps), `quorum=n` (not in
rounds: n contributions make an update), `damping=…` (not in rounds: gradients and sums), `outer=…` (sums and
deltas), `batches=speed` (ssp). What makes no sense together is refused with the reason.

Defaults are what learns with many workers: ssp, asp, downpour and dogwild have damping=momentum, and diloco
has outer=fitted. The papers' rules have names: `asp+damping=none`, `diloco:h+outer=nesterov`. `stored.py`
reads texts that are older than these defaults.
"""

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from paceline.core.modes.machine import Clocks, Epochs, Machine, Rounds
from paceline.exceptions import UsageError

__all__ = ["Batches", "Damping", "ModeSpec", "Outer", "Payload", "parse_mode"]

Payload = Literal["gradient", "sum", "delta", "elastic", "none"]
"""What a worker pushes: a gradient, gradients summed over its local steps, how far it has moved, an elastic
difference to the centre, or nothing."""

Damping = Literal["none", "momentum", "staleness", "dynsgd", "dc", "gap"]
"""What is done about a stale gradient: nothing, less momentum and a shorter step (`modes/damping.py`),
weighed by 1/staleness or 1/(staleness + 1), delay compensation, or divided by the gap since the worker
read."""

Outer = Literal["own", "adagrad", "average", "nesterov", "fitted"]
"""The servers' optimizer: the script's, Adagrad, SGD of lr 1, SGD of lr 0.7 and Nesterov momentum 0.9, or SGD
whose rate and Nesterov momentum fit the number of local steps (`ModeSpec.outer_rates`)."""

Batches = Literal["equal", "speed"]
"""Whether all workers' batches are equal, or smaller for who is waited for."""

_BETA = 0.9
_HISTORY = 10

_DILOCO = 0.7, 0.9
"""The outer learning rate and Nesterov momentum of DiLoCo (Douillard et al., 2023), …"""
_DILOCO_STEPS = 500
"""… and the number of local steps they were chosen for."""


@dataclass(frozen=True, kw_only=True)
class ModeSpec:
    """A consistency policy. `str(spec)` is its text form, which `parse_mode` reads back."""

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

    beta: float = _BETA
    """Elastic: beta = workers × alpha, and alpha is the part of its distance that a worker moves by."""

    outer: Outer = "own"

    batches: Batches = "equal"

    history: int = _HISTORY
    """Sandblaster: how many pairs of steps L-BFGS remembers."""

    inner: "ModeSpec | None" = None
    """Hybrid: the mode between the groups."""

    def __post_init__(self) -> None:
        if not self.name:
            rounds = "backup" if self.spare else "bsp"
            clocks = "asp" if self.bound is None else "ssp"
            object.__setattr__(self, "name", clocks if self.spare is None else rounds)
        if self.name not in _PRESETS:
            raise _unknown(self.name, self.name)
        if problem := self._problem():
            raise UsageError(f"mode {str(self)!r}: {problem}")

    @property
    def in_place(self) -> bool:
        """Whether workers may read the servers' memory: nobody reads while a server writes."""
        return self.spare == 0 and self.payload == "gradient" and self.inner is None

    @property
    def by_round(self) -> bool:
        """Whether leases are dealt by rounds in rank order, which makes a run repeatable."""
        return self.spare == 0

    @property
    def copies(self) -> Literal["none", "slow", "any"]:
        """Whose last leases of an epoch are given out twice (see `LeaseBook`)."""
        if self.by_epoch:
            return "any"
        free = self.spare is None and self.payload == "gradient" and self.inner is None
        return "slow" if free else "none"

    @property
    def by_epoch(self) -> bool:
        """Whether parameters change only when an epoch is over: it is one gradient of the whole data set."""
        return self.name == "sandblaster"

    @property
    def local(self) -> bool:
        """Whether workers step by themselves, with an optimizer of their own, between exchanges."""
        return self.payload != "gradient"

    @property
    def needs_memory(self) -> bool:
        """Whether all workers must share the memory of one host."""
        return self.name == "hogwild"

    @property
    def serverless(self) -> bool:
        """Whether servers have nothing to do."""
        return self.name == "allreduce"

    @property
    def grouped(self) -> bool:
        """Whether workers all-reduce in groups, whose roots speak for them."""
        return self.serverless or self.inner is not None

    @property
    def switchable(self) -> bool:
        """Whether a run may go from this mode to another such one, and back, while it runs."""
        return self.name in _PLAIN and self.payload == "gradient"

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
            return Epochs()
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

    def scale(self, staleness: int) -> float:
        """The part of its step that a push of this staleness makes."""
        match self.damping:
            case "staleness":
                return 1 / max(1, staleness)
            case "dynsgd" | "momentum":
                return 1 / (staleness + 1)
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

    def carries(self, other: "ModeSpec") -> str | None:
        """Why a run in this mode cannot be switched to `other` while it runs; None if it can."""
        if self == other or (self.switchable and other.switchable):
            return None
        odd, even = (other, self) if self.switchable else (self, other)
        trait = f"workers of {odd} {odd._trait}"
        contrast = (
            f"and so cannot change to {even}" if odd._trait == even._trait else f"which {even}'s do not"
        )
        return (
            f"{trait}, {contrast}. A run is switched only among bsp, backup, ssp and asp without a period: "
            f"start a new run in {other}"
        )

    def __str__(self) -> str:
        if self.inner is not None:
            return f"hybrid:{self.inner}"
        preset = _PRESETS[self.name]
        shown = [(getattr(self, number.fields[0]), number.default) for number in preset.numbers]
        numbers = ",".join(str(value) for value, default in shown if value != default)
        knobs = []
        if self.name in _PLAIN and self.push_every != 1:
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
    def _trait(self) -> str:
        """What a mode's workers do that those of another mode cannot take up in the middle of a run."""
        if self.inner is not None:
            return "reduce their gradients in groups"
        return _PRESETS[self.name].trait or (
            "hold their own optimizer" if self.local else "push every gradient"
        )

    def _problem(self) -> str | None:
        """What about these values makes no sense, and what would."""
        if (self.inner is None) is (self.name == "hybrid"):
            return "hybrid, and hybrid alone, needs an inner mode, as in hybrid:asp"
        if self.inner is not None:
            return _not_between(self.inner.name) or _no_batches(self)
        preset = _PRESETS[self.name]
        for number in preset.numbers:
            for value in (getattr(self, name) for name in number.fields):
                if value is None or value < number.least:
                    return f"{self.name} needs {'/'.join(number.fields)} >= {number.least}, got {value}"
        fixed = {"payload": "gradient", **preset.fields}
        if self.name in _PLAIN and max(self.push_every, self.fetch_every) > 1:
            fixed |= {"payload": "sum", "fetch_every": self.push_every}
        for name, value in fixed.items():
            if name not in ("outer", "damping") and getattr(self, name) != value:
                return f"{self.name} means {name}={value}, got {name}={getattr(self, name)}"
        if not 0 < self.beta < 2:
            return (
                f"beta must be above 0 and below 2, got {self.beta:g}: in a sweep over all workers "
                "the centre moves by beta times its distance to their mean, so from 2 on it overshoots "
                f"further each time; the paper's value is {_BETA}"
            )
        if min(self.push_every, self.fetch_every, self.quorum, self.history) < 1:
            return "period, quorum and history must be at least 1"
        if self.quorum > 1 and (reason := _no_quorum(self)):
            return reason
        if self.damping != "none" and (reason := _no_damping(self)):
            return reason
        if self.outer != preset.fields.get("outer", "own") and (reason := _no_outer(self)):
            return reason
        return _no_batches(self)


def parse_mode(text: str | int) -> ModeSpec:
    """The mode that a user's text means.

    Args:
        text: `bsp`, `backup:2`, `ssp:3`, `downpour:4,4`, `hybrid:asp`, … (see the module's table), with knobs
            as in `asp+damping=dc`; or the number that Angel and Hetu use, `0` for bsp, `-1` for asp and `3`
            for ssp:3 (an int too, since YAML reads it as one).

    Raises:
        UsageError: with the text, what is wrong with it, and what would be right.
    """
    asked = re.sub(r"\s*\+\s*", "+", str(text).strip().lower())
    head, *knobs = asked.split("+")
    if head == "-1":
        head = "asp"
    elif _is_count(head):
        head = f"ssp:{head}" if int(head) else "bsp"
    name, colon, numbers = head.partition(":")
    if name not in _PRESETS:
        raise _unknown(text, name)
    if name == "hybrid":
        within = asked.partition(":")[2]
        if not within:
            raise _refusal(text, "hybrid needs the mode that runs between its groups, as in hybrid:asp.")
        if within.startswith("hybrid"):  # looked at here, so that no text makes us descend without end
            raise UsageError(f"mode {str(text)!r}: {_not_between('hybrid')}")
        inner = parse_mode(within)
        return replace(inner, name="hybrid", inner=inner)
    fields = {"bound": None, "spare": None, **_PRESETS[name].fields}
    fields |= _read_numbers(text, name, numbers if colon else None)
    given = _read_knobs(text, knobs)
    if "period" in given:
        period = given.pop("period")
        if reason := _no_period(name, period):
            raise UsageError(f"mode {str(text)!r}: {reason}")
        fields |= {
            "push_every": period,
            "fetch_every": period,
            "payload": "sum" if period > 1 else "gradient",
        }
    spec = ModeSpec(name=name, **{**fields, **given})
    # In rounds, not even quorum=1 is what happens anyway.
    if "quorum" in given and (reason := _no_quorum(spec)):
        raise UsageError(f"mode {str(text)!r}: {reason}")
    return spec


# Presets


@dataclass(frozen=True, kw_only=True)
class _Number:
    """One of the numbers after a preset's colon."""

    fields: tuple[str, ...]
    least: int = 1
    needed: bool = True
    real: bool = False
    default: float | None = None
    """A value that the text form leaves out."""


@dataclass(frozen=True, kw_only=True)
class _Preset:
    form: str
    fields: dict[str, Any] = field(default_factory=dict)
    numbers: tuple[_Number, ...] = ()
    trait: str = ""
    """What its workers do, if that is more peculiar than to hold an optimizer of their own."""


_ROUNDS: dict[str, Any] = {"bound": 0, "spare": 0}
_FREE: dict[str, Any] = {"bound": None, "spare": None}
_STALE: dict[str, Any] = {"spare": None, "damping": "momentum"}
_PERIOD = _Number(fields=("push_every", "fetch_every"))
_ELASTIC = (_PERIOD, _Number(fields=("beta",), least=0, needed=False, real=True, default=_BETA))

_PRESETS = {
    "bsp": _Preset(form="bsp", fields=_ROUNDS),
    "backup": _Preset(
        form="backup:B with B >= 1", fields={"bound": 0}, numbers=(_Number(fields=("spare",)),)
    ),
    "ssp": _Preset(form="ssp:S with S >= 0", fields=_STALE, numbers=(_Number(fields=("bound",), least=0),)),
    "asp": _Preset(form="asp", fields={**_STALE, "bound": None}),
    "downpour": _Preset(
        form="downpour[:P,F]",
        fields={**_STALE, "bound": None, "payload": "sum", "outer": "adagrad"},
        numbers=(replace(_PERIOD, needed=False), _Number(fields=("fetch_every",), needed=False)),
    ),
    "easgd": _Preset(form="easgd:T[,BETA]", fields={**_FREE, "payload": "elastic"}, numbers=_ELASTIC),
    "eamsgd": _Preset(form="eamsgd:T[,BETA]", fields={**_FREE, "payload": "elastic"}, numbers=_ELASTIC),
    "local": _Preset(
        form="local:H", fields={**_ROUNDS, "payload": "delta", "outer": "average"}, numbers=(_PERIOD,)
    ),
    "diloco": _Preset(
        form="diloco:H", fields={**_ROUNDS, "payload": "delta", "outer": "fitted"}, numbers=(_PERIOD,)
    ),
    "hogwild": _Preset(
        form="hogwild", fields={**_FREE, "payload": "none"}, trait="write into one memory themselves"
    ),
    "dogwild": _Preset(
        form="dogwild",
        fields={**_STALE, "bound": None, "payload": "delta", "outer": "average"},
        trait="exchange in threads of their own",
    ),
    "allreduce": _Preset(form="allreduce", fields={**_ROUNDS, "payload": "none"}, trait="do without servers"),
    "hybrid": _Preset(form="hybrid:MODE"),
    "sandblaster": _Preset(
        form="sandblaster[:HISTORY]",
        fields=_FREE,
        numbers=(_Number(fields=("history",), needed=False, default=_HISTORY),),
        trait="evaluate batches for L-BFGS on the servers",
    ),
}

# Every gradient goes to the servers as it is, unless a period is given.
_PLAIN = ("bsp", "backup", "ssp", "asp")

_CHOICES: dict[str, tuple[str, ...]] = {
    "damping": get_args(Damping),
    "outer": get_args(Outer),
    "batches": get_args(Batches),
}
_KNOBS = ("period", "quorum", *_CHOICES)

_FORMS = (
    ", ".join(preset.form for preset in _PRESETS.values())
    + "; with knobs as in ssp:2+period=4; or a number as in Angel and Hetu: 0 (bsp), -1 (asp), S (ssp:S)"
)

_SENDS = {
    "delta": "how far its workers have moved",
    "elastic": "elastic differences",
    "none": "nothing to servers",
}


# Why a mode does not take a knob


def _no_period(name: str, period: int) -> str | None:
    if name in _PLAIN:
        return None
    if _PERIOD.fields[0] in (each for number in _PRESETS[name].numbers for each in number.fields):
        return f"the number of {name} is its period: write {name}:{period}"
    return f"{name} has no local steps between exchanges to count: leave period out"


def _no_quorum(spec: ModeSpec) -> str | None:
    if spec.name in ("bsp", "backup"):
        return "quorum is for modes without rounds: to go on without the slowest B of a round, use backup:B"
    if spec.spare is not None:
        return f"an update of {spec.name} needs the part of every worker: leave quorum out"
    if spec.by_epoch:
        return f"an update of {spec.name} needs every batch of an epoch: leave quorum out"
    if spec.payload not in ("gradient", "sum"):
        return f"quorum counts gradients, and {spec.name} sends {_SENDS[spec.payload]}: leave quorum out"
    return None


def _no_damping(spec: ModeSpec) -> str | None:
    if spec.name == "dogwild" and spec.damping not in ("dc", "gap"):
        return None  # what a worker changed can be added in part: it takes over the result
    if spec.payload not in ("gradient", "sum"):
        return f"damping corrects gradients, and {spec.name} sends {_SENDS[spec.payload]}: leave damping out"
    if spec.spare is not None:
        return (
            "damping corrects stale gradients, and in rounds none is stale: leave it out, or use ssp:S or asp"
        )
    if spec.by_epoch:
        return f"damping corrects stale gradients, and {spec.name} takes in no stale one: leave damping out"
    if spec.damping in ("dc", "gap") and spec.quorum > 1:
        return (
            f"damping={spec.damping} corrects one push at a time, got quorum={spec.quorum}: use quorum=1, "
            "or damping=staleness or dynsgd, which weigh each contribution, or leave damping out"
        )
    return None


def _no_outer(spec: ModeSpec) -> str | None:
    if spec.payload == "delta" or (spec.payload == "sum" and spec.outer in ("own", "adagrad")):
        return None
    if spec.payload == "sum":
        return (
            f"{spec.outer} steps by all it is given: right for how far workers moved, not for gradients; "
            "use outer=own or adagrad, or local or diloco"
        )
    if spec.payload == "gradient":
        if spec.by_epoch:
            return f"the servers of {spec.name} step by L-BFGS: leave outer out"
        return (
            "the servers apply single gradients with the script's own optimizer: leave outer out, "
            "or add period=N, or use downpour, local or diloco"
        )
    return f"outer applies what workers push, and {spec.name} sends {_SENDS[spec.payload]}: leave outer out"


def _no_batches(spec: ModeSpec) -> str | None:
    if spec.batches == "equal":
        return None
    if spec.name == "ssp" and spec.payload == "gradient":
        return None if spec.quorum == 1 else "batches=speed scales one push at a time: use quorum=1"
    if spec.spare is None and spec.bound is None:
        return f"nobody waits for a slow worker in {spec.name}, it takes fewer batches: leave batches out"
    return "batches=speed is for single gradients under a bound, as in ssp:4+batches=speed: leave it out"


def _not_between(name: str) -> str | None:
    why = {
        "hybrid": "groups are not nested",
        "allreduce": "groups all-reduce inside, and between them it would be allreduce alone",
        "hogwild": "groups do not share one memory",
        "dogwild": "its threads would change one worker's parameters while its group needs them equal",
        "sandblaster": "it hands portions of a batch to single workers",
    }.get(name)
    return f"{name} cannot run between groups: {why}. Use a mode such as hybrid:asp" if why else None


# Reading


def _read_numbers(text: str | int, name: str, given: str | None) -> dict[str, Any]:
    numbers = _PRESETS[name].numbers
    if not numbers and given is not None:
        raise _refusal(text, f"{name} takes no number.")
    parts = given.split(",") if given is not None else []
    if len(parts) > len(numbers):
        raise _refusal(text, f"{name} takes no more than {len(numbers)} number(s), got {len(parts)}.")
    fields: dict[str, Any] = {}
    for place, number in enumerate(numbers):
        if place >= len(parts) and not number.needed:
            continue
        part = parts[place] if place < len(parts) else ""
        if number.real:
            if not re.fullmatch(r"[0-9]{0,9}\.?[0-9]{1,20}(e-?[0-9]{1,3})?", part):
                raise _refusal(text, f"{name}'s {number.fields[0]} must be a number, got {_shown(part)}.")
            value: float = float(part)
        elif _is_count(part) and int(part) >= number.least:
            value = int(part)
        else:
            raise _refusal(
                text, f"{name} needs a whole number of at least {number.least}, got {_shown(part)}."
            )
        fields |= dict.fromkeys(number.fields, value)
    return fields


def _read_knobs(text: str | int, parts: Iterable[str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for part in parts:
        knob, _, value = part.partition("=")
        where = f"mode {str(text)!r}: "
        if knob not in _KNOBS:
            raise UsageError(
                f"{where}there is no knob {knob!r}{_nearest(knob, _KNOBS)} Knobs: {', '.join(_KNOBS)}, "
                "as in ssp:2+period=4"
            )
        if knob in given:
            raise UsageError(f"{where}{knob} is given twice: give it once")
        choices = _CHOICES.get(knob, ())
        if choices and value not in choices:
            raise UsageError(f"{where}{knob} is one of {', '.join(choices)}, got {_shown(value)}")
        if not choices and not (_is_count(value) and int(value) >= 1):
            raise UsageError(f"{where}{knob} must be a whole number of at least 1, got {_shown(value)}")
        given[knob] = value if choices else int(value)
    return given


def _is_count(text: str) -> bool:
    # int() alone would also take "1_0", "+1", other scripts' digits, and choke on very long ones.
    return re.fullmatch("[0-9]{1,9}", text) is not None


def _shown(part: str) -> str:
    return repr(part) if part else "none"


def _nearest(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {near[0]}?" if near else "."


def _unknown(text: str | int, name: str) -> UsageError:
    return _refusal(text, f"there is no such mode{_nearest(name, _PRESETS)}")


def _refusal(text: str | int, reason: str) -> UsageError:
    return UsageError(f"mode {str(text)!r}: {reason} Valid modes: {_FORMS}")
