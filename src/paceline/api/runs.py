"""Looking at runs from Python."""

from pathlib import Path

from paceline.control import find_run
from paceline.observe.run_data import RunData

__all__ = ["load_run"]


def load_run(run: str | Path) -> RunData:
    """A run's tables as data frames: `.spans`, `.totals`, `.resources`, `.pushes`, `.metrics`.

    It may be going on, have ended, or have been killed. Columns: docs/observing.md.

    Args:
        run: its id, the beginning of one, `last`, or its directory.

    Raises:
        RunNotFound: there is none.
    """
    return RunData(find_run(str(run)).path)
