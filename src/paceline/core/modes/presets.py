"""The table of modes: what each name means in knobs, and what is peculiar to it.

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

Defaults are what learns with many workers: ssp, asp, downpour and dogwild have damping=momentum, and diloco
has outer=fitted. The papers' rules have names: `asp+damping=none`, `diloco:h+outer=nesterov`. `stored.py`
reads texts that are older than these defaults.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

__all__ = [
    "BETA",
    "CHOICES",
    "DAMPINGS",
    "FORMS",
    "HINTS",
    "HISTORY",
    "KNOBS",
    "PERIOD",
    "PLAIN",
    "PRESETS",
    "Batches",
    "Damping",
    "Number",
    "Outer",
    "Payload",
    "Preset",
    "Trait",
]

Payload = Literal["gradient", "sum", "delta", "elastic", "none"]
"""What a worker pushes: a gradient, gradients summed over its local steps, how far it has moved, an elastic
difference to the centre, or nothing."""

Damping = Literal["none", "momentum", "staleness", "dynsgd", "consgd", "dc", "gap"]
"""What is done about a stale gradient: nothing, less momentum and a shorter step (`damping.py`),
weighed by 1/staleness, 1/(staleness + 1) or 1/workers, delay compensation, or divided by the gap since the
worker read."""

Outer = Literal["own", "adagrad", "average", "nesterov", "fitted"]
"""The servers' optimizer: the script's, Adagrad, SGD of lr 1, SGD of lr 0.7 and Nesterov momentum 0.9, or SGD
whose rate and Nesterov momentum fit the number of local steps (`ModeSpec.outer_rates`)."""

Batches = Literal["equal", "speed"]
"""Whether all workers' batches are equal, or smaller for who is waited for."""

Trait = Literal["by_epoch", "local_nesterov", "needs_memory", "own_threads", "serverless"]
"""What a mode does that no knob says; `ModeSpec` has a property of the same name that explains each."""

BETA = 0.9
"""EASGD's beta, as in the paper."""
HISTORY = 10
"""Pairs of steps that L-BFGS remembers."""


@dataclass(frozen=True, kw_only=True)
class Number:
    """One of the numbers after a preset's colon."""

    fields: tuple[str, ...]
    least: int = 1
    needed: bool = True
    real: bool = False
    default: float | None = None
    """A value that the text form leaves out."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One name of the table."""

    form: str
    """As messages write it."""
    hint: str
    """As `--help` writes it, shorter."""
    fields: dict[str, Any] = field(default_factory=dict)
    numbers: tuple[Number, ...] = ()
    traits: frozenset[Trait] = frozenset()
    """What is peculiar to it beyond its knobs."""
    does: str = ""
    """What its workers do, if that is more peculiar than to hold an optimizer of their own."""
    not_between_groups: str | None = None
    """Why it cannot be the inner mode of hybrid; None: it can."""
    in_words: str = ""
    """Who waits for whom, and what an update is, as half a sentence; {steps} is the period and {damping} says
    that stale changes count less. Empty: the knobs tell it (`descriptions.py`)."""


_ROUNDS: dict[str, Any] = {"bound": 0, "spare": 0}
_FREE: dict[str, Any] = {"bound": None, "spare": None}
_STALE: dict[str, Any] = {"spare": None, "damping": "momentum"}
PERIOD = Number(fields=("push_every", "fetch_every"))
_DRAWN = "nobody waits: every {steps} a worker and the centre are drawn towards each other"
_MOVED = "all wait for all, every {steps}: one update is the mean of how far they moved"
_ELASTIC = (PERIOD, Number(fields=("beta",), least=0, needed=False, real=True, default=BETA))

PRESETS = {
    "bsp": Preset(form="bsp", hint="bsp", fields=_ROUNDS),
    "backup": Preset(
        form="backup:B with B >= 1",
        hint="backup:B",
        fields={"bound": 0},
        numbers=(Number(fields=("spare",)),),
    ),
    "ssp": Preset(
        form="ssp:S with S >= 0",
        hint="ssp:S",
        fields=_STALE,
        numbers=(Number(fields=("bound",), least=0),),
    ),
    "asp": Preset(form="asp", hint="asp", fields={**_STALE, "bound": None}),
    "downpour": Preset(
        form="downpour[:P,F]",
        hint="downpour:P,F",
        fields={**_STALE, "bound": None, "payload": "sum", "outer": "adagrad"},
        numbers=(replace(PERIOD, needed=False), Number(fields=("fetch_every",), needed=False)),
    ),
    "easgd": Preset(
        form="easgd:T[,BETA]",
        hint="easgd:T",
        fields={**_FREE, "payload": "elastic"},
        numbers=_ELASTIC,
        in_words=_DRAWN,
    ),
    "eamsgd": Preset(
        form="eamsgd:T[,BETA]",
        hint="eamsgd:T",
        fields={**_FREE, "payload": "elastic"},
        numbers=_ELASTIC,
        traits=frozenset({"local_nesterov"}),
        in_words=_DRAWN,
    ),
    "local": Preset(
        form="local:H",
        hint="local:H",
        fields={**_ROUNDS, "payload": "delta", "outer": "average"},
        numbers=(PERIOD,),
        in_words=_MOVED,
    ),
    "diloco": Preset(
        form="diloco:H",
        hint="diloco:H",
        fields={**_ROUNDS, "payload": "delta", "outer": "fitted"},
        numbers=(PERIOD,),
        in_words=_MOVED,
    ),
    "hogwild": Preset(
        form="hogwild",
        hint="hogwild",
        fields={**_FREE, "payload": "none"},
        traits=frozenset({"needs_memory"}),
        does="write into one memory themselves",
        not_between_groups="groups do not share one memory",
        in_words="nobody waits: workers write into one shared memory without locks",
    ),
    "dogwild": Preset(
        form="dogwild",
        hint="dogwild",
        fields={**_STALE, "bound": None, "payload": "delta", "outer": "average"},
        traits=frozenset({"own_threads"}),
        does="exchange in threads of their own",
        not_between_groups="its threads would change one worker's parameters while its group needs them "
        "equal",
        in_words="nobody waits: each worker's exchange thread carries what changed, at its own pace{damping}",
    ),
    "allreduce": Preset(
        form="allreduce",
        hint="allreduce",
        fields={**_ROUNDS, "payload": "none"},
        traits=frozenset({"serverless"}),
        does="do without servers",
        not_between_groups="groups all-reduce inside, and between them it would be allreduce alone",
        in_words="all wait for all: gradients are averaged among the workers, each updates its own "
        "parameters",
    ),
    "hybrid": Preset(form="hybrid:MODE", hint="hybrid:MODE", not_between_groups="groups are not nested"),
    "sandblaster": Preset(
        form="sandblaster[:HISTORY]",
        hint="sandblaster",
        fields=_FREE,
        numbers=(Number(fields=("history",), needed=False, default=HISTORY),),
        traits=frozenset({"by_epoch"}),
        does="evaluate batches for L-BFGS on the servers",
        not_between_groups="it hands portions of a batch to single workers",
        in_words="an epoch is one gradient of the whole data set, then a step of L-BFGS",
    ),
}

# Every gradient goes to the servers as it is, unless a period is given.
PLAIN = ("bsp", "backup", "ssp", "asp")

DAMPINGS: tuple[str, ...] = get_args(Damping)
CHOICES: dict[str, tuple[str, ...]] = {
    "damping": DAMPINGS,
    "outer": get_args(Outer),
    "batches": get_args(Batches),
}
KNOBS = ("period", "quorum", *CHOICES)

FORMS = (
    ", ".join(preset.form for preset in PRESETS.values())
    + "; with knobs as in ssp:2+period=4; or a number as in Angel and Hetu: 0 (bsp), -1 (asp), S (ssp:S)"
)

HINTS = tuple(preset.hint for preset in PRESETS.values())
