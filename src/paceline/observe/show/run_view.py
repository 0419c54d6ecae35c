"""RunView: everything that a section of a run's page is made from."""

from dataclasses import dataclass

from paceline.observe.analyse.diagnosis import Diagnosis
from paceline.observe.analyse.facts import Facts
from paceline.observe.analyse.run_data import RunData
from paceline.observe.record.status import RunStatus

__all__ = ["MOST_ROWS", "RunView"]

MOST_ROWS = 100
"""Of a table that grows with the run; the page says what it leaves out."""


@dataclass(frozen=True)
class RunView:
    """A run, what follows from its tables, and its state as the caller knows it."""

    run: RunData
    facts: Facts
    diagnosis: Diagnosis
    state: str

    @property
    def status(self) -> RunStatus:
        return self.run.status

    @property
    def name(self) -> str:
        return self.status.run_id or str(self.run.record.get("id", "")) or self.run.path.name
