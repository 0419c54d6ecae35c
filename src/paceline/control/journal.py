"""control.json: what a controller knows that no role could tell its successor.

The controller writes it before it acts on a decision. Its successor carries out what is missing, and asks
the roles for the rest.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from paceline.control.processes import SavedOrigin
from paceline.core.run_machine_state import RunMachineState
from paceline.exceptions import UsageError
from paceline.observe import RunStatus
from paceline.storage.atomic import write_text_atomically
from paceline.storage.json_files import read_object
from paceline.storage.plain_files import reason_of
from paceline.storage.typed_json import AnyFloat, checked

__all__ = ["Journal", "KeptStatus", "Knowledge", "kept_status"]

_MOST_BYTES = 32 << 20


class KeptStatus(TypedDict):
    """The fields of the status that roles cannot tell the successor."""

    mode: str
    messages: list[str]
    lost_updates: int
    samples_before: int
    steps_before: int
    takeovers: int
    ended_early: str | None
    left_out: dict[str, int]
    diverged: str | None
    first_losses: dict[str, AnyFloat]


def kept_status(status: RunStatus) -> KeptStatus:
    """What is kept of a status."""
    return {
        "mode": status.mode,
        "messages": status.messages,
        "lost_updates": status.lost_updates,
        "samples_before": status.samples_before,
        "steps_before": status.steps_before,
        "takeovers": status.takeovers,
        "ended_early": status.ended_early,
        "left_out": status.left_out,
        "diverged": status.diverged,
        "first_losses": status.first_losses,
    }


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """The journal's record. Its fields are the keys of control.json."""

    machine: RunMachineState
    pid: int
    """Process of the controller."""
    started: float
    """Start of the run on this host's monotonic clock."""
    clock_ns: int
    """From that clock to Unix time."""
    origin: SavedOrigin
    """The checkpoint that the run started from, or went back to."""
    going_back: str | None
    """Why the run is going back to a checkpoint; None: it is not."""
    meeting_port: int
    bad_after: int | None = None
    """Checkpoints after this version are of a run that diverged, and are to be removed."""
    switching: list[str]
    """Switch requests without an answer."""
    status: KeptStatus


class Journal:
    """The file of one run directory."""

    def __init__(self, run: Path) -> None:
        self._path = run / "control.json"
        self._written = ""

    def write(self, knowledge: Knowledge) -> None:
        """Write the record if it has changed. Raises OSError (a full disk)."""
        text = json.dumps(vars(knowledge))
        if text != self._written:
            write_text_atomically(self._path, text + "\n", mode=0o600)
            self._written = text

    def read(self) -> Knowledge:
        """The last record. Raises UsageError if it cannot be read."""
        try:
            return checked(Knowledge, read_object(self._path, most=_MOST_BYTES))
        except (OSError, ValueError) as error:
            raise self.not_understood(error) from error

    def not_understood(self, error: Exception) -> UsageError:
        """The error of a controller that cannot take over with what the file holds."""
        return UsageError(f"{self._path} cannot be read: {reason_of(error)}")
