"""What follows from a run's records, while it goes on and afterwards.

* `run_data.py`     RunData: a run's tables, read back.
* `facts.py`        facts_of: figures of workers, servers and links from the tables.
* `device_facts.py` device_facts_of: what the GPUs did, beside the CPU's phases.
* `diagnosis.py`    diagnose: what limited the run, and what to change.
* `summary.py`      summary.json, and the few figures that matter most.
* `curves.py`       what plots show: tables as a few curves and timeline rows.
* `comparison.py`   compare: a table of several runs.
* `repetitions.py`  which runs are the same job with another seed.
* `study_data.py`   StudyData: many runs as data frames, over seeds.
* `window.py`       Window: rates from a run's last few statuses.
* `watch.py`        Watch: warnings while a run goes on.
* `wording.py`      numbers, modes and statuses as people read them.
"""

__all__: list[str] = []
