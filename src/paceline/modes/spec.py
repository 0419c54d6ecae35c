"""What a mode is, as a value: its knobs, its text form, and the machine that runs it.

| text       | bound | spare | a worker waits until                              |
|------------|-------|-------|---------------------------------------------------|
| `bsp`      | 0     | 0     | everybody has pushed                              |
| `backup:b` | 0     | b     | all but b have pushed; late pushes are dropped    |
| `ssp:s`    | s     | -     | it leads the slowest by no more than s steps      |
| `asp`      | -     | -     | never                                             |
"""

import re
from dataclasses import dataclass

from paceline.exceptions import UsageError
from paceline.modes.machine import Clocks, Machine, Rounds

__all__ = ["ModeSpec", "parse_mode"]

_FORMS = (
    "bsp, backup:B with B >= 1, ssp:S with S >= 0, asp, "
    "or a number as in Angel and Hetu: 0 (bsp), -1 (asp), S (ssp:S)"
)


@dataclass(frozen=True, kw_only=True)
class ModeSpec:
    """A consistency policy. `str(spec)` is its text form, which `parse_mode` reads back."""

    bound: int | None
    """How many steps a worker may lead the slowest; None is unlimited."""

    spare: int | None
    """An update is complete with all contributions but this many; None: with every single one."""

    def __post_init__(self) -> None:
        if self.spare is not None and (self.spare < 0 or self.bound != 0):
            raise UsageError(
                f"a mode with spare={self.spare} goes in rounds and needs spare >= 0 and bound=0, "
                f"got bound={self.bound}"
            )
        if self.bound is not None and self.bound < 0:
            raise UsageError(f"a mode's bound must be None or >= 0, got bound={self.bound}")

    @property
    def name(self) -> str:
        """`bsp`, `backup`, `ssp` or `asp`."""
        if self.spare is not None:
            return "backup" if self.spare else "bsp"
        return "asp" if self.bound is None else "ssp"

    @property
    def in_place(self) -> bool:
        """Whether workers may read the servers' memory: nobody reads while a server writes."""
        return self.spare == 0

    @property
    def by_round(self) -> bool:
        """Whether leases are dealt by rounds in rank order, which makes a run repeatable."""
        return self.spare == 0

    def machine(self) -> Machine:
        """A new machine of this mode, without members, at version 0."""
        return Clocks(self.bound) if self.spare is None else Rounds(self.spare)

    def check(self, workers: int) -> None:
        """Raise UsageError if this many workers cannot run in this mode."""
        if workers < 1:
            raise UsageError(f"a run needs at least one worker, got workers={workers}")
        if self.spare is not None and self.spare >= workers:
            fitting = f"backup:{workers - 1} or less" if workers > 1 else "bsp"
            raise UsageError(
                f"mode {self} goes on without the slowest {self.spare}, so it needs at least "
                f"{self.spare + 1} workers, got workers={workers}; add workers or use {fitting}"
            )

    def __str__(self) -> str:
        match self.name:
            case "backup":
                return f"backup:{self.spare}"
            case "ssp":
                return f"ssp:{self.bound}"
            case name:
                return name


def parse_mode(text: str | int) -> ModeSpec:
    """The mode that a user's text means.

    Args:
        text: `bsp`, `backup:2`, `ssp:3` or `asp`; or the number that Angel and Hetu use, `0` for
            bsp, `-1` for asp and `3` for ssp:3 (an int too, since YAML reads it as one).

    Raises:
        UsageError: with the text, what is wrong with it, and the valid forms.
    """
    asked = str(text).strip().lower()
    name, colon, number = asked.partition(":")
    if name in ("bsp", "asp"):
        if colon:
            raise _refusal(text, f"{name} takes no number")
        return ModeSpec(bound=0, spare=0) if name == "bsp" else ModeSpec(bound=None, spare=None)
    if name in ("ssp", "backup"):
        least = 0 if name == "ssp" else 1
        if not _is_count(number) or int(number) < least:
            got = repr(number) if number else "none"
            raise _refusal(text, f"{name} needs a whole number of at least {least}, got {got}")
        if name == "ssp":
            return ModeSpec(bound=int(number), spare=None)
        return ModeSpec(bound=0, spare=int(number))
    if asked == "-1":
        return ModeSpec(bound=None, spare=None)
    if _is_count(asked):
        return ModeSpec(bound=int(asked), spare=None) if int(asked) else ModeSpec(bound=0, spare=0)
    raise _refusal(text, "there is no such mode")


def _is_count(text: str) -> bool:
    # int() alone would also take "1_0", "+1", other scripts' digits, and choke on very long ones.
    return re.fullmatch("[0-9]{1,9}", text) is not None


def _refusal(text: str | int, reason: str) -> UsageError:
    return UsageError(f"mode {str(text)!r}: {reason}. Valid modes: {_FORMS}")
