"""What a run writes while it goes on.

* `phase.py`       Phase: what a role can be doing.
* `spans.py`       Recorder and Lane: what every thread of a role did, from when to when.
* `device_lane.py` DeviceLane: what a device did in the phases of a role's main thread.
* `tables.py`      the tables that a run leaves behind, as raw records and as Parquet.
* `parquet_files.py` read_parquet, write_parquet: the files that tables are kept in.
* `values.py`      what scripts logged: written by workers, read back.
* `thinning.py`    Thinning: which records are kept in a file of bounded size.
* `run_files.py`   reads run.json, status.json, events.jsonl and summary.json.
* `status.py`      RunStatus, WorkerStatus, ServerStatus: a run at one moment, as data (also status.json).
* `ledger.py`      Ledger: what a worker process counts itself.
* `counting.py`    a status from ledgers.
* `pace.py`        TrainingPace: the one definition of samples and steps a second.
* `resources.py`   Sampler: what roles and their host use.
* `own_memory.py`  OwnMemory: the memory that a process does not share.
* `gpu.py`         Gpus: how busy the host's GPUs are.
* `output.py`      what scripts write: pieces of it, and the lines that a terminal is left with.
"""

__all__: list[str] = []
