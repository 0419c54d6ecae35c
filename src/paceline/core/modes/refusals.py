"""What is refused of a mode's text or its knobs, and why.

The functions `no_…` return the reason why a mode does not take a knob, or None if it does.
"""

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from paceline.core.modes.presets import FORMS, PERIOD, PLAIN, PRESETS
from paceline.exceptions import UsageError

if TYPE_CHECKING:
    from paceline.core.modes.mode_spec import ModeSpec

__all__ = [
    "nearest",
    "no_batches",
    "no_damping",
    "no_outer",
    "no_period",
    "no_quorum",
    "not_between_groups",
    "refusal",
    "unknown_mode",
]

_SENDS = {
    "delta": "how far its workers have moved",
    "elastic": "elastic differences",
    "none": "nothing to servers",
}


def no_period(name: str, period: int) -> str | None:
    """Why a mode does not take a period; None: it does."""
    if name in PLAIN:
        return None
    if PERIOD.fields[0] in (each for number in PRESETS[name].numbers for each in number.fields):
        return f"the number of {name} is its period: write {name}:{period}"
    return f"{name} has no local steps between exchanges to count: leave period out"


def no_quorum(spec: "ModeSpec") -> str | None:
    """Why a mode does not take a quorum; None: it does."""
    if spec.name in ("bsp", "backup"):
        return "quorum is for modes without rounds: to go on without the slowest B of a round, use backup:B"
    if spec.spare is not None:
        return f"an update of {spec.name} needs the part of every worker: leave quorum out"
    if spec.by_epoch:
        return f"an update of {spec.name} needs every batch of an epoch: leave quorum out"
    if spec.payload not in ("gradient", "sum"):
        return f"quorum counts gradients, and {spec.name} sends {_SENDS[spec.payload]}: leave quorum out"
    return None


def no_damping(spec: "ModeSpec") -> str | None:
    """Why a mode does not take its damping; None: it does."""
    if spec.own_threads and not spec.remembers_reads:
        return None  # what a worker changed can be added in part: it takes over the result
    if spec.payload not in ("gradient", "sum"):
        return f"damping corrects gradients, and {spec.name} sends {_SENDS[spec.payload]}: leave damping out"
    if spec.spare is not None:
        return (
            "damping corrects stale gradients, and in rounds none is stale: leave it out, or use ssp:S or asp"
        )
    if spec.by_epoch:
        return f"damping corrects stale gradients, and {spec.name} takes in no stale one: leave damping out"
    if spec.remembers_reads and spec.quorum > 1:
        return (
            f"damping={spec.damping} corrects one push at a time, got quorum={spec.quorum}: use quorum=1, "
            "or damping=staleness or dynsgd, which weigh each contribution, or leave damping out"
        )
    return None


def no_outer(spec: "ModeSpec") -> str | None:
    """Why a mode does not take its outer optimizer; None: it does."""
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


def no_batches(spec: "ModeSpec") -> str | None:
    """Why a mode does not take its way to deal batches; None: it does."""
    if spec.batches == "equal":
        return None
    if spec.name == "ssp" and spec.payload == "gradient":
        return None if spec.quorum == 1 else "batches=speed scales one push at a time: use quorum=1"
    if spec.spare is None and spec.bound is None:
        return f"nobody waits for a slow worker in {spec.name}, it takes fewer batches: leave batches out"
    return "batches=speed is for single gradients under a bound, as in ssp:4+batches=speed: leave it out"


def not_between_groups(name: str) -> str | None:
    """Why a mode cannot be the inner mode of hybrid; None: it can."""
    why = PRESETS[name].not_between_groups
    return f"{name} cannot run between groups: {why}. Use a mode such as hybrid:asp" if why else None


def nearest(word: str, words: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: the known word that is closest to it, if any is."""
    near = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {near[0]}?" if near else "."


def unknown_mode(text: str | int, name: str) -> UsageError:
    """The error for a name that no mode has."""
    return refusal(text, f"there is no such mode{nearest(name, PRESETS)}")


def refusal(text: str | int, reason: str) -> UsageError:
    """The error for a text that is no mode's, with all that would be one."""
    return UsageError(f"mode {str(text)!r}: {reason} Valid modes: {FORMS}")
