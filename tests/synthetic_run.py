"""A run directory made up with numpy: any number of workers, steps and spans, and no process."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from paceline.observe import RunStatus, ServerStatus, WorkerStatus
from paceline.observe.record.phase import Phase
from paceline.observe.record.tables import RESOURCES, ROLES, SPANS, TOTALS
from paceline.plan import Job

BEGAN = 1_794_746_394
"""Unix time."""
# What a worker does in a step: phase and milliseconds.
STEP = (
    (Phase.LOAD, 1.0),
    (Phase.FORWARD, 3.0),
    (Phase.BACKWARD, 6.0),
    (Phase.OTHER, 0.5),
    (Phase.COMPRESS, 0.4),
    (Phase.PUSH, 1.1),
    (Phase.WAIT, 2.0),
    (Phase.PULL, 1.0),
)


def write_run(
    path: Path,
    *,
    workers: int = 3,
    servers: int = 1,
    steps: int = 200,
    mode: str = "asp",
    state: str = "succeeded",
    wait_ms: float = 2.0,
    ms: Mapping[int, float] | None = None,
    slow: float = 1.8,
    waits_for: str = "worker",
    update_ms: float = 0.7,
    dropped: Mapping[int, int] | None = None,
    error: str | None = None,
    diverged: str | None = None,
    with_resources: bool = True,
    name: str = "digits",
) -> Path:
    """Write it.

    Args:
        ms: milliseconds of a phase in a step, instead of STEP's.
        slow: how many times as long as the others the last worker takes.
        waits_for: `worker`: the last one is the one that the others wait for; `server`: nobody waits for it.
        dropped: pushes that were not applied, by worker.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / "raw").mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    seconds = 0.0
    for rank in range(workers):
        takes = {**dict(STEP), Phase.WAIT: wait_ms, **(ms or {})}
        times = slow if rank == workers - 1 and workers > 1 else 1.0
        awaited = workers - 1 if waits_for == "worker" and rank < workers - 1 else -1
        spans = _worker_spans(takes, times, awaited, steps, random)
        seconds = max(seconds, float(spans["start"][-1] / 1e9 - BEGAN))
        spans.tofile(path / "raw" / f"worker-{rank}.0.spans")
        _totals(spans).tofile(path / "raw" / f"worker-{rank}.0.totals")
    for rank in range(servers):
        spans = np.zeros(steps, SPANS.record)
        spans["start"] = BEGAN * 10**9 + (np.arange(steps) * seconds / steps * 1e9).astype(np.int64)
        spans["ns"] = int(update_ms * 1e6)
        spans["step"], spans["phase"], spans["slice"], spans["other"] = np.arange(steps), Phase.UPDATE, -1, -1
        spans.tofile(path / "raw" / f"server-{rank}.0.spans")
        _totals(spans).tofile(path / "raw" / f"server-{rank}.0.totals")
    if with_resources:
        _resources(workers, servers, seconds).tofile(path / "raw" / "controller.resources")
    staleness = _pushes(path, workers, steps, random)
    _events(path, workers, steps, seconds)
    _record(path, workers, servers, mode, name)
    status = RunStatus(
        state=state,
        run_id=f"20261115-081502-{name}-4f2a",
        run_dir=str(path),
        elapsed_s=seconds + 3,
        startup_s=3.0,
        mode=mode,
        rule="nobody waits: every gradient is applied when it arrives",
        version=workers * steps,
        epoch=2,
        samples=32 * workers * steps,
        samples_per_epoch=16 * workers * steps,
        parameters=61_706,
        workers={
            rank: WorkerStatus(
                rank=rank,
                state="finished",
                clock=steps,
                metrics={"loss": 0.07, "accuracy": 0.98},
                dropped=(dropped or {}).get(rank, 0),
            )
            for rank in range(workers)
        },
        servers={rank: ServerStatus(rank=rank, updates=steps) for rank in range(servers)},
        staleness=staleness,
        leases=[{"epoch": 0, "samples": 100, "applied": 98, "refused": 2, "unused": 0}],
        checkpoints=["version-000000000090"],
        messages=["worker:1 was killed by signal 9 <replaced>"],
        restarts=1,
        error=error,
        diverged=diverged,
    )
    (path / "status.json").write_text(json.dumps(status.to_json()))
    return path


def _worker_spans(
    takes: Mapping[int, float], slow: float, awaited: int, steps: int, random: np.random.Generator
) -> np.ndarray:
    each = len(takes)
    spans = np.zeros(steps * each, SPANS.record)
    ms = np.array([length * (1.0 if phase == Phase.WAIT else slow) for phase, length in takes.items()])
    ns = (np.tile(ms, steps) * random.uniform(0.8, 1.2, steps * each) * 1e6).astype(np.int64)
    spans["ns"] = ns
    spans["start"] = BEGAN * 10**9 + np.cumsum(ns) - ns
    spans["phase"] = np.tile(list(takes), steps)
    spans["step"] = np.repeat(np.arange(steps), each)
    spans["slice"] = -1
    spans["other"] = np.where(spans["phase"] == Phase.WAIT, awaited, -1)
    moves = (spans["phase"] == Phase.PUSH) | (spans["phase"] == Phase.PULL)
    spans["other"][moves] = 0
    spans["bytes"][moves] = 250_000
    return spans


def _totals(spans: np.ndarray) -> np.ndarray:
    """What the recorder would have added up, every half a second."""
    flush = ((spans["start"] - spans["start"][0]) // 500_000_000).astype(np.int64)
    key = flush * 4096 + (spans["other"].astype(np.int64) + 1) * 16 + spans["phase"]
    _, first, at = np.unique(key, return_index=True, return_inverse=True)
    totals = np.zeros(len(first), TOTALS.record)
    ends = np.zeros(flush.max() + 1, np.int64)
    np.maximum.at(ends, flush, spans["start"] + spans["ns"])
    lasts = np.zeros(flush.max() + 1, np.int64)
    np.maximum.at(lasts, flush, spans["step"])
    totals["time"], totals["step"] = ends[flush[first]], lasts[flush[first]]
    totals["ns"] = np.bincount(at, spans["ns"]).astype(np.int64)
    totals["bytes"] = np.bincount(at, spans["bytes"]).astype(np.int64)
    totals["count"] = np.bincount(at)
    for name in ("other", "phase", "lane"):
        totals[name] = spans[name][first]
    return totals


def _resources(workers: int, servers: int, seconds: float) -> np.ndarray:
    roles = [("controller", 0), ("host", 0)]
    roles += [("worker", rank) for rank in range(workers)] + [("server", rank) for rank in range(servers)]
    parts = []
    for role, rank in roles:
        n = max(3, int(seconds))
        rows = np.zeros(n, RESOURCES.record)
        at = np.arange(n)
        rows["time"] = (BEGAN + at * seconds / n) * 10**9
        rows["role"], rows["rank"] = ROLES.index(role), rank
        rows["cpu"] = 0.7 + 0.2 * np.sin(at / 3 + rank)
        rows["memory"] = 250_000_000 + 1_000_000 * at
        rows["threads"], rows["read"], rows["written"] = 4, at * 1000, at * 200_000
        rows["sent"], rows["received"], rows["iowait"] = at * 9_000, at * 5_000, 0.01
        rows["gpu"] = np.nan
        parts.append(rows)
    return np.concatenate(parts)


def _pushes(path: Path, workers: int, steps: int, random: np.random.Generator) -> dict[int, int]:
    total = min(workers * steps, 200_000)
    version = np.arange(1, total + 1)
    staleness = np.minimum(random.poisson(max(0, workers - 1), total), version - 1)
    columns = [
        *(version, (version - 1) % workers, np.zeros(total), (version - 1) // workers),
        *(version - 1 - staleness, staleness, np.full(total, 32)),
    ]
    with (path / "pushes.csv").open("w") as file:
        file.write("version,worker,incarnation,sequence,read_version,staleness,samples\n")
        np.savetxt(file, np.stack(columns, axis=1).astype(np.int64), fmt="%d", delimiter=",")
    values, counts = np.unique(staleness, return_counts=True)
    return {int(v): int(n) for v, n in zip(values, counts, strict=True)}


def _events(path: Path, workers: int, steps: int, seconds: float) -> None:
    from datetime import UTC, datetime

    lines = []
    for i in range(40):
        for rank in range(workers):
            at = datetime.fromtimestamp(BEGAN + seconds * (i + 1) / 40, UTC).isoformat()
            metrics = {"loss": float("nan") if i == 20 else 2.3 / (1 + i / 4) + rank / 50}
            if rank == 0:
                metrics["accuracy"] = 1 - 0.9 / (1 + i / 3)
            event = {
                "at": at,
                "kind": "metrics",
                "worker": rank,
                "clock": steps * i // 40,
                "metrics": metrics,
            }
            lines.append(json.dumps(event))
    (path / "events.jsonl").write_text("\n".join(lines) + '\n{"at": "2026-11')


def _record(path: Path, workers: int, servers: int, mode: str, name: str) -> None:
    job = Job(script=f"{name}.py", workers=workers, servers=servers, mode=mode).to_json()
    roles = [{"role": "server", "rank": r, "host": "localhost", "threads": 1} for r in range(servers)]
    roles += [{"role": "worker", "rank": r, "host": "localhost", "threads": 1} for r in range(workers)]
    record = {
        "id": f"20261115-081502-{name}-4f2a",
        "created": "2026-11-15T08:15:02+00:00",
        "directory": str(path),
        "job": job,
        "plan": {"job": job, "roles": roles, "mode": mode},
        "command": ["paceline", "run", "--mode", mode, f"{name}.py", "--note", "two <b>words</b>"],
        "versions": {"paceline": "0.1.0", "torch": "2.15.0"},
        "resumes": [],
    }
    (path / "run.json").write_text(json.dumps(record))
