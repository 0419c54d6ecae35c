"""Faults on purpose, in a role, at a step: what roles ask for. Tests only.

`Faults` has none. If PACELINE_FAULTS is set, `paceline.testing.injected_faults` is loaded and makes them
happen; otherwise no role imports it.
"""

import os
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.comm.loading import load
from paceline.comm.tls import Stream

__all__ = ["FAULTS", "OF_FRAMES", "Faults", "Tamper", "tamper_with"]

FAULTS = "PACELINE_FAULTS"
"""The environment variable, read by the controller when a run starts."""
OF_FRAMES = ("flip", "cut", "hangup", "drop", "duplicate", "reorder")
"""Faults of the next frame that a role sends."""

_PARSE = "paceline.testing.injected_faults:parse_faults"
_DAMAGE = "paceline.testing.injected_faults:Damage"


class Faults:
    """The faults of a run, or of one role of it. This class has none."""

    all: tuple[object, ...] = ()

    @staticmethod
    def parse(text: str) -> "Faults":
        """The faults that a user's text means. Raises UsageError."""
        if not text.strip():
            return Faults()
        found: Faults = load(_PARSE)(text)
        return found

    @staticmethod
    def from_environment() -> "Faults":
        """Those of PACELINE_FAULTS; mostly none."""
        return Faults.parse(os.environ.get(FAULTS, ""))

    def __str__(self) -> str:
        return ""

    def of(self, role: str, rank: int, incarnation: int) -> "Faults":
        """Those of one process: none if it replaces another."""
        return self

    def at(self, step: int) -> list[str]:
        """Make the faults of this step happen. Returns the kinds that the caller has to make happen."""
        return []

    def at_checkpoint(self, number: int) -> Callable[[], None] | None:
        """What to call before every write of this checkpoint; None: nothing. It may raise OSError."""
        return None

    def reached(self, update: int) -> None:
        """As `at`, for the controller, which hears of updates now and then, not of each."""


class Tamper(Protocol):
    """Damages frames of a link."""

    delayed: bytes
    """A frame that it holds back."""

    @property
    def active(self) -> bool:
        """Whether the next frame is to be damaged."""

    def __call__(self, sock: Stream, head: bytes, payload: Sequence[memoryview]) -> bytes | None:
        """Send a frame, damaged. Returns the head that the link has to send; None: nothing."""


def tamper_with(kind: str, before: Tamper | None) -> Tamper:
    """Damage the next frame of a link in one of the ways `OF_FRAMES`.

    Args:
        before: the damage before this one.
    """
    made: Tamper = load(_DAMAGE)(kind, b"" if before is None else before.delayed)
    return made
