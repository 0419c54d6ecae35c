"""Observing: what a run is doing, while it runs and afterwards.

* `record/`   what a run writes while it goes on: spans, values, ledgers, tables, statuses.
* `analyse/`  what follows from it: facts, the diagnosis, curves, comparisons, studies.
* `show/`     how people and other programs see it: the live display, report pages, exports.

A package imports only from those above it in this list.
"""

from paceline.observe.record.status import ENDED, RunStatus, ServerStatus, WorkerStatus
from paceline.observe.show.progress import Progress
from paceline.observe.show.run_report import write_report

__all__ = ["ENDED", "Progress", "RunStatus", "ServerStatus", "WorkerStatus", "write_report"]
