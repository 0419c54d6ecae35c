"""Observing: what a run is doing, while it runs and afterwards.

* `status.py`    RunStatus and WorkerStatus: a run at one moment, as data (also status.json).
* `words.py`     numbers, modes and statuses as people read them.
* `progress.py`  Progress: shows statuses while a run goes on, live or as plain lines.
* `display.py`   the live picture in a terminal, drawn with rich (imported only when it is needed).
* `report.py`    write_report: report.md for people and summary.json for programs.
"""

from paceline.observe.progress import Progress
from paceline.observe.report import write_report
from paceline.observe.status import ENDED, FAILURE_MARK, RunStatus, WorkerStatus

__all__ = ["ENDED", "FAILURE_MARK", "Progress", "RunStatus", "WorkerStatus", "write_report"]
