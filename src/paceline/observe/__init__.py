"""Observing: what a run is doing, while it runs and afterwards.

* `phases.py`    Phase: what a role can be doing.
* `spans.py`     Recorder and Lane: what every thread of a role did, from when to when.
* `tables.py`    the tables that a run leaves behind, as raw records and as Parquet.
* `values.py`    what scripts logged: written by workers, read back.
* `thinning.py`  Thinning: which records are kept in a file of bounded size.
* `status.py`    RunStatus, WorkerStatus, ServerStatus: a run at one moment, as data (also status.json).
* `words.py`     numbers, modes and statuses as people read them.
* `progress.py`  Progress: shows statuses while a run goes on, live or as plain lines.
* `passing.py`   Passing: passes a script's output on, beside ours.
* `output.py`    what scripts write: pieces of it, and the lines that a terminal is left with.
* `display.py`   the live picture in a terminal, drawn with rich (imported only when it is needed).
* `ledger.py`    Ledger: what a worker process counts itself. `counting.py`: a status from ledgers.
* `pace.py`      Pace: the one definition of samples and steps a second.
* `window.py`    rates from a run's last few statuses.
* `watch.py`     Watch: warnings while a run goes on.
* `resources.py`, `own_memory.py`, `gpu.py`  Sampler: what roles and their host use.
* `run_data.py`  RunData: a run's tables, read back.
* `facts.py`     facts_of: what follows from them. `diagnosis.py`: what limited the run.
* `report.py`    write_report: report.html for people and summary.json for programs.
* `page.py`, `comparison.py`  the pages of one run and of several; of `markup.py`, `plots.py` and `curves.py`.
* `study.py`, `study_page.py`  StudyData: many runs as data frames, over seeds; their page.
* `repetitions.py`  which runs are the same job with another seed.
* `trace.py`, `exports.py`    for Perfetto, CSV, TensorBoard, Prometheus and MLflow.
"""

from paceline.observe.progress import Progress
from paceline.observe.report import write_report
from paceline.observe.status import ENDED, RunStatus, ServerStatus, WorkerStatus

__all__ = ["ENDED", "Progress", "RunStatus", "ServerStatus", "WorkerStatus", "write_report"]
