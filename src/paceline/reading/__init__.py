"""Reading: processes that evaluate a run's model while others train it. They are no members of the mode.

A reader has no connection to servers, workers or the controller. It asks for snapshots through the run
directory, and reads them there. So nothing can wait for it.

* `reader_config.py` ReaderConfig: what a run's own reader is told when it starts.
* `snapshots.py`   Snapshot; RunSnapshots: those of a run that goes on; SavedSnapshot: of a checkpoint.
* `model_state.py` puts a snapshot into the script's models, or names the first difference.
* `reader_session.py` ReaderSession: what the script's prepare() talks to; evaluates, and ends the script.
* `reader_process.py` run_reader: the reader of a run, as a process.
"""

from paceline.reading.reader_config import ReaderConfig
from paceline.reading.reader_process import run_reader
from paceline.reading.reader_session import ReaderSession
from paceline.reading.snapshots import RunSnapshots, SavedSnapshot, Snapshot

__all__ = ["ReaderConfig", "ReaderSession", "RunSnapshots", "SavedSnapshot", "Snapshot", "run_reader"]
