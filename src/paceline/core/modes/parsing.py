"""Reads a mode's text.

A text is `NAME[:NUMBERS]` and then `+knob=value` for every knob that is turned: `ssp:2+period=4+quorum=3`.

Knobs: `period=n` (bsp, backup, ssp, asp: their gradients become sums over n local steps), `quorum=n` (not in
rounds: n contributions make an update), `damping=…` (not in rounds: gradients and sums), `outer=…` (sums and
deltas), `batches=speed` (ssp). What makes no sense together is refused with the reason.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from paceline.core.modes.mode_spec import ModeSpec
from paceline.core.modes.presets import CHOICES, KNOBS, PRESETS
from paceline.core.modes.refusals import (
    nearest,
    no_period,
    no_quorum,
    not_between_groups,
    refusal,
    unknown_mode,
)
from paceline.exceptions import UsageError

__all__ = ["parse_mode"]


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
    if name not in PRESETS:
        raise unknown_mode(text, name)
    if name == "hybrid":
        within = asked.partition(":")[2]
        if not within:
            raise refusal(text, "hybrid needs the mode that runs between its groups, as in hybrid:asp.")
        if within.startswith("hybrid"):  # looked at here, so that no text makes us descend without end
            raise UsageError(f"mode {str(text)!r}: {not_between_groups('hybrid')}")
        inner = parse_mode(within)
        return replace(inner, name="hybrid", inner=inner)
    fields = {"bound": None, "spare": None, **PRESETS[name].fields}
    fields |= _read_numbers(text, name, numbers if colon else None)
    given = _read_knobs(text, knobs)
    if "period" in given:
        period = given.pop("period")
        if reason := no_period(name, period):
            raise UsageError(f"mode {str(text)!r}: {reason}")
        fields |= {
            "push_every": period,
            "fetch_every": period,
            "payload": "sum" if period > 1 else "gradient",
        }
    spec = ModeSpec(name=name, **{**fields, **given})
    # In rounds, not even quorum=1 is what happens anyway.
    if "quorum" in given and (reason := no_quorum(spec)):
        raise UsageError(f"mode {str(text)!r}: {reason}")
    return spec


def _read_numbers(text: str | int, name: str, given: str | None) -> dict[str, Any]:
    numbers = PRESETS[name].numbers
    if not numbers and given is not None:
        raise refusal(text, f"{name} takes no number.")
    parts = given.split(",") if given is not None else []
    if len(parts) > len(numbers):
        raise refusal(text, f"{name} takes no more than {len(numbers)} number(s), got {len(parts)}.")
    fields: dict[str, Any] = {}
    for place, number in enumerate(numbers):
        if place >= len(parts) and not number.needed:
            continue
        part = parts[place] if place < len(parts) else ""
        if number.real:
            if not re.fullmatch(r"[0-9]{0,9}\.?[0-9]{1,20}(e-?[0-9]{1,3})?", part):
                raise refusal(text, f"{name}'s {number.fields[0]} must be a number, got {_shown(part)}.")
            value: float = float(part)
        elif _is_count(part) and int(part) >= number.least:
            value = int(part)
        else:
            raise refusal(
                text, f"{name} needs a whole number of at least {number.least}, got {_shown(part)}."
            )
        fields |= dict.fromkeys(number.fields, value)
    return fields


def _read_knobs(text: str | int, parts: Iterable[str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for part in parts:
        knob, _, value = part.partition("=")
        where = f"mode {str(text)!r}: "
        if knob not in KNOBS:
            raise UsageError(
                f"{where}there is no knob {knob!r}{nearest(knob, KNOBS)} Knobs: {', '.join(KNOBS)}, "
                "as in ssp:2+period=4"
            )
        if knob in given:
            raise UsageError(f"{where}{knob} is given twice: give it once")
        choices = CHOICES.get(knob, ())
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
