"""What remains of a run to read: report.md for people, summary.json for programs."""

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.observe import words
from paceline.observe.status import RunStatus
from paceline.storage.atomic import write_text_atomically

__all__ = ["summary_of", "write_report"]


def write_report(
    run_path: Path, status: RunStatus, job_json: Mapping[str, Any], command: Sequence[str] = ()
) -> Path:
    """Write report.md and summary.json into a run directory, each atomically.

    Args:
        run_path: The run directory.
        status: The run's last status.
        job_json: `Job.to_json()`.
        command: What the user typed, word by word; empty if the run was started from Python.

    Returns:
        The path of report.md.
    """
    summary = json.dumps(summary_of(status, job_json, command), indent=2, allow_nan=False)
    write_text_atomically(run_path / "summary.json", summary + "\n")
    report = run_path / "report.md"
    sections = _sections(run_path, status, job_json, command)
    write_text_atomically(report, "\n\n".join(sections) + "\n")
    return report


def summary_of(status: RunStatus, job_json: Mapping[str, Any], command: Sequence[str] = ()) -> dict[str, Any]:
    """The report's numbers as plain data; a metric that is NaN or infinite is null, as in JSON."""
    return {
        "state": status.state,
        "error": status.error,
        "command": list(command),
        "job": dict(job_json),
        "elapsed_s": status.elapsed_s,
        "startup_s": status.startup_s,
        "version": status.version,
        "samples": status.samples,
        "samples_before": status.samples_before,
        "samples_per_s": status.samples_per_s,
        "samples_per_epoch": status.samples_per_epoch,
        "parameters": status.parameters,
        "metrics": _finite(status.metrics),
        "idleness": status.idleness,
        "update_s": status.update_s,
        "workers": [
            {
                "rank": worker.rank,
                "state": worker.state,
                "steps": worker.clock,
                "step_s": worker.step_s,
                "wait_s": worker.wait_s,
                "idleness": worker.idleness,
                "restarts": worker.restarts,
                "metrics": _finite(worker.metrics),
            }
            for _, worker in sorted(status.workers.items())
        ],
        "staleness": {
            "mean": status.staleness_mean,
            "max": status.staleness_max,
            "pushes": {str(each): n for each, n in sorted(status.staleness.items())},
        },
        "leases": status.leases,
        "refused": status.refused,
        "dropped": status.dropped,
        "lost": status.lost,
        "restarts": status.restarts,
        "checkpoints": status.checkpoints,
    }


def _sections(run_path: Path, status: RunStatus, job: Mapping[str, Any], command: Sequence[str]) -> list[str]:
    run = status.run_id or run_path.name
    mode, workers = str(job.get("mode", "?")), int(job.get("workers", len(status.workers)))
    sections = [f"# Run {run}", _outcome(status)]
    if status.error:
        sections += ["## Error", _fenced(status.error)]
    sections += ["## Setting", _setting(status, job, mode, workers)]
    if command:
        sections.append(_fenced(shlex.join(command)))
    sections += ["## Speed", _speed(status)]
    if status.workers:
        sections += ["## Workers", _workers(status)]
    if status.staleness:
        sections += ["## Staleness", _staleness(status)]
    if status.leases:
        sections += ["## Samples", _samples(status)]
    sections += ["## Incidents", _incidents(status)]
    sections += ["## Files", _files(run, status, job)]
    return sections


def _outcome(status: RunStatus) -> str:
    text = f"**{status.state.capitalize()}** after {words.duration(status.elapsed_s)}"
    if not status.version:
        return text + ", before the first update."
    text += f": {words.progress(status)}, {words.plural(status.version, 'update')}."
    if status.metrics:
        metrics = [f"{name} **{words.metric(each)}**" for name, each in status.metrics.items()]
        text += f" Last reported, mean over the workers: {', '.join(metrics)}."
    return text


def _mode(status: RunStatus, asked: str) -> str:
    rule = f" ({status.rule})" if status.rule else ""
    return f"{asked}, at the end {status.mode}{rule}" if status.mode not in ("", asked) else f"{asked}{rule}"


def _setting(status: RunStatus, job: Mapping[str, Any], mode: str, workers: int) -> str:
    return _table(
        ("setting", "value"),
        [
            ("mode", _mode(status, mode)),
            ("workers", workers),
            ("servers", job.get("servers", "?")),
            ("parameters", words.count(status.parameters)),
            ("link", job.get("link", "?")),
            ("seed", job.get("seed", "?")),
            ("deadline", words.duration(float(job.get("deadline_s", 0)))),
        ],
    )


def _speed(status: RunStatus) -> str:
    rows = [
        ("samples per second", words.count(status.samples_per_s)),
        ("samples", words.count(status.samples)),
        ("updates", words.count(status.version)),
        ("workers' time spent waiting", words.percent(status.idleness)),
    ]
    if status.startup_s:
        rows.append(("starting up", words.duration(status.startup_s)))
    if status.samples_before:
        rows.insert(2, ("of these before the resume", words.count(status.samples_before)))
    if status.version:
        per_update = 1000 * status.update_s / status.version
        rows.append(("lead server's time per update", f"{per_update:.3g} ms"))
    return _table(("", ""), rows)


def _workers(status: RunStatus) -> str:
    names = list(status.metrics)
    return _table(
        ("worker", "state", "steps", "computing", "waiting", "waiting %", "restarts", *names),
        [
            (
                worker.name,
                worker.state,
                words.count(worker.clock),
                words.duration(worker.step_s),
                words.duration(worker.wait_s),
                words.percent(worker.idleness),
                worker.restarts,
                *(words.metric(worker.metrics[n]) if n in worker.metrics else "–" for n in names),
            )
            for _, worker in sorted(status.workers.items())
        ],
    )


def _staleness(status: RunStatus) -> str:
    pushes = sum(status.staleness.values())
    table = _table(
        ("staleness", "pushes", "share"),
        [
            (each, words.count(number), words.percent(number / max(1, pushes)))
            for each, number in sorted(status.staleness.items())
        ],
    )
    return (
        "Updates by others between a worker's read and the applying of what it computed from it: "
        f"mean {status.staleness_mean:.2g}, at most {status.staleness_max}.\n\n{table}"
    )


def _samples(status: RunStatus) -> str:
    table = _table(
        ("epoch", "samples", "applied", "refused", "unused"),
        [
            (
                account.get("epoch", 0) + 1,
                *(words.count(account.get(what, 0)) for what in ("samples", "applied", "refused", "unused")),
            )
            for account in status.leases
            # The epoch that begins as the last one ends: nothing happened in it.
            if len(status.leases) == 1 or any(account.get(what) for what in ("applied", "refused", "unused"))
        ],
    )
    return (
        "Every sample of an epoch is applied once, refused with a NaN or Inf gradient, or left "
        f"unused (a short last batch, or a loop that ended early).\n\n{table}"
    )


def _incidents(status: RunStatus) -> str:
    rows = [
        ("workers replaced", words.count(status.restarts)),
        ("pushes refused (NaN or Inf)", words.count(status.refused)),
        ("pushes dropped (late or repeated)", words.count(status.dropped)),
        ("pushes lost with a role that died", words.count(status.lost)),
    ]
    text = _table(("what", "how often"), rows)
    if status.messages:
        text += "\n\n" + "\n".join(f"- {_cell(message)}" for message in status.messages)
    return text


def _files(run: str, status: RunStatus, job: Mapping[str, Any]) -> str:
    kept = ", ".join(f"`{name}`" for name in status.checkpoints) or "none"
    lines = [
        f"- checkpoints: {kept}, in `checkpoints/`",
        "- logs, one per role: `logs/`",
        "- every applied push: `pushes.csv`; what happened: `events.jsonl`",
        "- the numbers above: `summary.json`",
    ]
    if status.checkpoints:
        lines.append(f"- the model for plain PyTorch: `paceline export {run} model.safetensors`")
        # What `paceline.fit` started has no script to start again.
        if status.state != "succeeded" and job.get("script"):
            lines.append(f"- to go on from the last checkpoint: `paceline resume {run}`")
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _fenced(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text.rstrip()}\n{fence}"


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
