"""The report of a run: report.html for people, summary.json for programs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.observe.analyse.diagnosis import Diagnosis
from paceline.observe.analyse.facts import Facts
from paceline.observe.analyse.run_data import RunData
from paceline.observe.analyse.summary import diagnosis_of, known_facts, summary_of
from paceline.observe.record.status import RunStatus
from paceline.observe.show.page import run_page
from paceline.storage.atomic import write_text_atomically

__all__ = ["write_html", "write_report"]


def write_report(
    run_path: Path, status: RunStatus, job_json: Mapping[str, Any], command: Sequence[str] = ()
) -> Path:
    """Write report.html and summary.json into a run directory, each atomically.

    Raises OSError if that fails, and nothing else: what cannot be worked out is left out, and both say so.

    Args:
        run_path: The run directory.
        status: The run's last status.
        job_json: `Job.to_json()`.
        command: What the user typed, word by word; empty if the run was started from Python.

    Returns:
        The path of report.html.
    """
    run = RunData(run_path)
    # What the caller knows is newer than what is on disk.
    vars(run)["status"] = status
    vars(run)["record"] = {**run.record, "job": dict(job_json), "command": list(command)}
    facts = known_facts(run)
    diagnosis = diagnosis_of(run, facts)
    summary = summary_of(status, job_json, command, facts, diagnosis)
    summary["missing"] = run.missing
    text = json.dumps(summary, indent=2, allow_nan=False)
    write_text_atomically(run_path / "summary.json", text + "\n", mode=0o600)
    target = run_path / "report.html"
    write_text_atomically(target, run_page(run, facts, diagnosis), mode=0o600)
    return target


def write_html(run: RunData, target: Path, *, state: str | None = None) -> tuple[Facts, Diagnosis]:
    """Write a run's page, atomically. Raises OSError if the target cannot be written.

    In the run directory it is for its owner only; elsewhere for those whom the umask leaves.

    Args:
        state: the run's state, from a caller that knows whether its process lives.
    """
    facts = known_facts(run)
    diagnosis = diagnosis_of(run, facts)
    mode = 0o600 if target.parent == run.path else 0o666
    write_text_atomically(target, run_page(run, facts, diagnosis, state=state), mode=mode)
    return facts, diagnosis
