"""The figures of a run that people and programs get: summary.json, and the few that matter most."""

import contextlib
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypedDict

from paceline.observe.analyse import wording
from paceline.observe.analyse.diagnosis import LOSSES, Diagnosis, diagnose, diagnose_run
from paceline.observe.analyse.facts import Facts, facts_of, mean_staleness
from paceline.observe.analyse.run_data import RunData
from paceline.observe.record.pace import pace_of
from paceline.observe.record.status import RunStatus
from paceline.storage.typed_json import checked

__all__ = ["diagnosis_of", "key_figures", "known_facts", "summary_of"]


def key_figures(run: RunData, facts: Facts, state: str | None = None) -> list[tuple[str, str]]:
    """The few numbers that matter most, for the page's tiles and for the terminal."""
    status = run.status
    lasted = status.elapsed_s or facts.seconds
    figures = [("state", wording.state(status, state)), ("duration", wording.duration(lasted))]
    if not status.loader:
        figures.append(("steps a second", wording.count(status.steps_per_s)))
    if status.loader or status.samples:
        figures.append(("samples a second", wording.count(status.samples_per_s)))
    if status.earlier_s:
        total = pace_of(status, total=True)
        name, rate = ("samples", total.samples_per_s) if status.loader else ("steps", total.steps_per_s)
        figures.append((f"{name} a second, all starts", wording.count(rate)))
    if status.ended_s:
        figures.append(("start-up", wording.duration(status.startup_s)))
    if status.first_step_s >= wording.WORTH_SAYING_S:
        figures.append(("first step, extra", wording.duration(status.first_step_s)))
    figures += [(name, wording.metric(value)) for name, value in list(status.metrics.items())[:4]]
    figures.append(("idleness", wording.percent(facts.idleness if facts.timed_s else status.idleness)))
    staleness = facts.staleness or Counter(status.staleness)
    figures.append(("mean staleness", f"{mean_staleness(staleness):.2g}" if staleness else "–"))
    figures.append(("updates", wording.count(facts.updates or status.version)))
    return figures


def known_facts(run: RunData) -> Facts:
    """`facts_of`, or empty facts if the tables are too damaged; `run.missing` then says so."""
    try:
        return facts_of(run)
    except Exception as error:  # a report of the rest is worth more than this error
        run.missing.append(f"nothing could be worked out from spans and pushes ({_said(error)})")
        return Facts()


def diagnosis_of(run: RunData, facts: Facts) -> Diagnosis:
    """The diagnosis of the run in the mode that it ended in."""
    mode = run.status.mode or str(run.job.get("mode") or "bsp")
    usual = {"overlap": False, "compress": "none", "prefetch": 0}
    using = {name for name, value in usual.items() if run.job.get(name, value) != value}
    try:
        return diagnose_run(run.status, facts, mode, _cores(run), using)
    except Exception as error:
        run.missing.append(f"what limited the run could not be worked out ({_said(error)})")
        return diagnose(Facts(), mode)


def summary_of(
    status: RunStatus,
    job_json: Mapping[str, Any],
    command: Sequence[str] = (),
    facts: Facts | None = None,
    diagnosis: Diagnosis | None = None,
) -> dict[str, object]:
    """The report's numbers as plain data; a metric that is NaN or infinite is null, as in JSON."""
    facts = facts or Facts()
    timed = bool(facts.timed_s)
    summary = {
        "state": status.state,
        "error": status.error,
        "diverged": status.diverged,
        "command": list(command),
        "job": dict(job_json),
        "elapsed_s": status.elapsed_s,
        "startup_s": status.startup_s,
        "trained_s": status.pace.seconds,
        "first_step_s": status.first_step_s,
        "earlier_s": status.earlier_s,
        "version": status.version,
        "samples": status.samples,
        "samples_before": status.samples_before,
        "samples_per_s": status.samples_per_s,
        "samples_per_s_all_starts": pace_of(status, total=True).samples_per_s if status.earlier_s else None,
        "samples_per_epoch": status.samples_per_epoch,
        "steps": status.steps,
        "steps_per_s": status.steps_per_s,
        "parameters": status.parameters,
        "metrics": status.metrics,
        "idleness": facts.idleness if timed else status.idleness,
        "computation": facts.computation if timed else None,
        "communication": facts.communication if timed else None,
        "shares": _shares(diagnosis) if timed and diagnosis is not None else None,
        "diagnosis": asdict(diagnosis) if diagnosis is not None else None,
        "update_s": status.update_s,
        "updates": facts.updates or status.version,
        "reads": facts.reads,
        "writes": facts.writes,
        "push": asdict(facts.push),
        "pull": asdict(facts.pull),
        "update": asdict(facts.update),
        "moved_out": sum(worker.moved_out for worker in status.workers.values()),
        "moved_in": sum(worker.moved_in for worker in status.workers.values()),
        "wire_out": sum(worker.bytes_out for worker in status.workers.values()),
        "wire_in": sum(worker.bytes_in for worker in status.workers.values()),
        "bytes_out": sum(link.bytes_out for link in facts.links),
        "bytes_in": sum(link.bytes_in for link in facts.links),
        "workers": _workers(status, facts),
        "servers": [asdict(server) for server in facts.servers],
        "links": [asdict(link) for link in facts.links],
        "gpu": asdict(facts.device) if facts.device.marked or facts.device.share is not None else None,
        "staleness": {
            "mean": status.staleness_mean,
            "max": status.staleness_max,
            "pushes": {str(each): n for each, n in sorted((facts.staleness or status.staleness).items())},
        },
        "leases": status.leases,
        "earlier_epochs": status.earlier_epochs,
        "left_out": status.left_out,
        "refused": status.refused,
        "skipped": status.skipped,
        "dropped": status.dropped,
        "lost": status.lost,
        "restarts": status.restarts,
        "takeovers": status.takeovers,
        "checkpoints": status.checkpoints,
    }
    found: dict[str, object] = _finite(summary)
    return found


def _workers(status: RunStatus, facts: Facts) -> list[dict[str, object]]:
    known = {worker.rank: worker for worker in facts.workers}
    found = []
    for rank, worker in sorted(status.workers.items()):
        row: dict[str, object] = {
            "rank": rank,
            "state": worker.state,
            "steps": worker.clock,
            "step_s": worker.step_s,
            "wait_s": worker.wait_s,
            "idleness": worker.idleness,
            "restarts": worker.restarts,
            "moved_out": worker.moved_out,
            "moved_in": worker.moved_in,
            "wire_out": worker.bytes_out,
            "wire_in": worker.bytes_in,
            "metrics": worker.metrics,
        }
        fact = known.get(rank)
        if fact is not None and fact.total_s:
            row |= {
                "idleness": fact.idleness,
                "seconds": fact.seconds,
                "step": asdict(fact.step),
                "busy_s": fact.busy,
                "blocked_on": {str(other): seconds for other, seconds in sorted(fact.blocked_on.items())},
                "bytes_out": fact.bytes_out,
                "bytes_in": fact.bytes_in,
            }
        if fact is not None:
            row["staleness"] = {str(each): n for each, n in sorted(fact.staleness.items())}
        found.append(row)
    return found


def _shares(diagnosis: Diagnosis) -> dict[str, float]:
    return {name: getattr(diagnosis, name) for name in ("computing", *LOSSES)}


class _Place(TypedDict, total=False):
    """The part of a planned role that a summary needs."""

    host: str


class _Places(TypedDict, total=False):
    """The part of a run's plan that a summary needs."""

    roles: list[_Place]


def _cores(run: RunData) -> int | None:
    """Number of cores of the run's host; None if roles ran on other hosts."""
    with contextlib.suppress(ValueError):
        plan = checked(_Places, run.record.get("plan") or {})
        if any(role.get("host") != "localhost" for role in plan.get("roles", [])):
            return None
    return os.cpu_count()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:160]
