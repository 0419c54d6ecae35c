"""A run as Chrome trace events: what Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process a role, one thread a lane, one complete event (`"ph": "X"`) a span; counters for CPU, memory and
staleness. It is written in pieces: spans are held as columns, 50 bytes each, never as text.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.exceptions import UsageError
from paceline.observe.analyse.run_data import Columns, RunData
from paceline.observe.record.device_lane import DEVICE_LANE
from paceline.observe.record.phase import COMMUNICATION, COMPUTATION, PHASES, Phase
from paceline.observe.record.tables import ROLES
from paceline.storage.atomic import replacing

__all__ = ["StepRange", "write_trace"]

_CHUNK = 100_000
_WORKER, _SERVER, _HOST = ROLES.index("worker"), ROLES.index("server"), ROLES.index("host")
_KINDS = {
    **dict.fromkeys(COMPUTATION, "computation"),
    **dict.fromkeys(COMMUNICATION, "communication"),
    Phase.LOAD: "data",
    Phase.CHECKPOINT: "checkpoint",
    Phase.IDLE: "idle",
}
_ENDINGS = (".json", ".json.gz")
_LANES = {0: "main", DEVICE_LANE: "GPU"}
"""Names of lanes that have one."""


@dataclass(frozen=True)
class StepRange:
    """The steps to show, both ends included; None is open."""

    first: int | None = None
    last: int | None = None

    @classmethod
    def parse(cls, text: str) -> "StepRange":
        """Read `10:20`, `10:`, `:20` or `10`.

        Raises:
            UsageError: it is none of these.
        """
        first, colon, last = text.partition(":")
        try:
            steps = cls(
                int(first) if first.strip() else None,
                (int(last) if last.strip() else None) if colon else int(first),
            )
        except ValueError:
            raise UsageError(f"--steps {text}: expected two numbers, as in 100:120, 100: or :20") from None
        if steps.first is not None and steps.last is not None and steps.first > steps.last:
            raise UsageError(f"--steps {text}: the first step is after the last; {last}:{first} is meant?")
        return steps

    @property
    def all(self) -> bool:
        """Whether nothing is left out."""
        return self.first is None and self.last is None

    def __str__(self) -> str:
        return f"{'' if self.first is None else self.first}:{'' if self.last is None else self.last}"


def write_trace(run: RunData, path: Path, steps: StepRange | None = None) -> int:
    """Write a run's trace; the file appears when it is whole. Returns how many spans it has.

    Args:
        path: ends in `.json`, or `.json.gz` to be compressed.
        steps: only the workers' spans of these, and of the others what they did meanwhile.

    Raises:
        UsageError: there are no spans, none of these steps, or the file cannot be written.
    """
    if not path.name.endswith(_ENDINGS):
        raise UsageError(f"{path}: a trace ends in .json, or in .json.gz to be compressed")
    try:
        with replacing(path) as new:
            spans = run.columns("spans")
            if not len(spans["start"]):
                why = "; ".join(run.missing) or "it ran with --no-spans, or never began to train"
                raise UsageError(f"run {run.path.name} has no spans to show: {why}")
            chosen = _chosen(run, spans, steps or StepRange())
            with _opened(new, compressed=path.name.endswith(".gz")) as file:
                _write(file, run, spans, chosen)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}. Name a file in a directory that is there "
            "and that you may write to"
        ) from error
    return len(chosen)


def _opened(path: Path, *, compressed: bool) -> IO[str]:
    if compressed:
        return gzip.open(path, "wt", compresslevel=4, encoding="ascii")
    return path.open("w", encoding="ascii", buffering=1 << 20)


def _chosen(run: RunData, spans: Columns, steps: StepRange) -> npt.NDArray[np.int64]:
    """Positions of the spans to write: by process, by lane, by time."""
    # The last key is the first to sort by.
    keys = [spans[name] for name in ("start", "lane", "incarnation", "rank", "role")]
    order: npt.NDArray[np.int64] = np.lexsort(keys)
    if steps.all:
        return order
    workers = spans["role"] == _WORKER
    wanted = workers.copy()
    if steps.first is not None:
        wanted &= spans["step"] >= steps.first
    if steps.last is not None:
        wanted &= spans["step"] <= steps.last
    if not wanted.any():
        have = spans["step"][workers]
        there = f"it has {have.min()}:{have.max()}" if len(have) else "it has no workers' spans"
        raise UsageError(f"run {run.path.name} has no spans of the steps {steps}; {there}")
    began = spans["start"][wanted].min()
    ended = (spans["start"][wanted] + spans["ns"][wanted]).max()
    wanted |= ~workers & (spans["start"] < ended) & (spans["start"] + spans["ns"] > began)
    within: npt.NDArray[np.int64] = order[wanted[order]]
    return within


def _write(file: IO[str], run: RunData, spans: Columns, chosen: npt.NDArray[np.int64]) -> None:
    origin = int(spans["start"].min())
    resources = run.columns("resources")
    if len(resources["time"]):
        origin = min(origin, int(resources["time"].min()))
    about = {"run": run.path.name, "mode": run.status.mode, "began_unix_ns": origin}
    file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n')
    processes = _Processes()
    for events in _span_events(spans, chosen, origin, processes):
        file.write(events)
    began = int(spans["start"][chosen].min())
    ended = int((spans["start"][chosen] + spans["ns"][chosen]).max())
    for event in _counters(run, spans, processes, (began, ended)):
        shown = {"name": event.name, "pid": event.pid, "args": event.args}
        file.write(json.dumps({**shown, "ph": "C", "ts": (event.at - origin) / 1000}) + ",\n")
    # The names come last, when all are known; the last event has no comma.
    file.write(",\n".join(json.dumps(event) for event in processes.names()) + "\n]}\n")


class _Processes:
    """Numbers for roles and lanes, and their names."""

    def __init__(self) -> None:
        self._pids: dict[tuple[int, int, int], int] = {}
        self._lanes: set[tuple[int, int]] = set()

    def pid(self, role: int, rank: int, incarnation: int = 0) -> int:
        return self._pids.setdefault((role, rank, incarnation), len(self._pids) + 1)

    def lane(self, pid: int, lane: int) -> None:
        self._lanes.add((pid, lane))

    def names(self) -> Iterator[dict[str, object]]:
        for place, ((role, rank, incarnation), pid) in enumerate(sorted(self._pids.items())):
            name = _name(role, rank) + (f" (restart {incarnation})" if incarnation else "")
            for kind, args in (("name", {"name": name}), ("sort_index", {"sort_index": place})):
                yield {"name": f"process_{kind}", "ph": "M", "pid": pid, "tid": 0, "args": args}
        for pid, lane in sorted(self._lanes):
            args = {"name": _LANES.get(lane, f"lane {lane}")}
            yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": lane, "args": args}
            yield {
                **{"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": lane},
                "args": {"sort_index": lane},
            }


def _span_events(
    spans: Columns, chosen: npt.NDArray[np.int64], origin: int, processes: _Processes
) -> Iterator[str]:
    """The events as text, `_CHUNK` spans at a time."""
    heads: dict[tuple[int, int], str] = {}
    others: dict[tuple[int, int, int], str] = {}
    for at in range(0, len(chosen), _CHUNK):
        rows = chosen[at : at + _CHUNK]
        key = (spans[name][rows] for name in ("role", "rank", "incarnation", "lane"))
        threads, inverse = np.unique(
            np.stack([np.asarray(each, np.int64) for each in key]), axis=1, return_inverse=True
        )
        tails = []
        for role, rank, incarnation, lane in threads.T.tolist():
            pid = processes.pid(role, rank, incarnation)
            processes.lane(pid, lane)
            tails.append((role, f'"pid": {pid}, "tid": {lane}'))
        lines = []
        for thread, start, ns, nbytes, step, slice_, other, phase in zip(
            inverse.reshape(-1).tolist(),
            (spans["start"][rows] - origin).tolist(),
            *(spans[name][rows].tolist() for name in ("ns", "bytes", "step", "slice", "other", "phase")),
            strict=True,
        ):
            role, where = tails[thread]
            head = heads.get((phase, role)) or heads.setdefault((phase, role), _head(phase))
            who = ""
            if other >= 0:
                key_ = (phase, role, other)
                who = others.get(key_) or others.setdefault(key_, _other(phase, role, other))
            part = f', "slice": {slice_}' if slice_ >= 0 else ""
            carried = f', "bytes": {nbytes}' if nbytes else ""
            lines.append(
                f'{head}, {where}, "ts": {start // 1000}.{start % 1000:03}, '
                f'"dur": {ns // 1000}.{ns % 1000:03}, "args": {{"step": {step}{part}{carried}{who}}}}},\n'
            )
        yield "".join(lines)


def _head(phase: int) -> str:
    name = PHASES[phase] if phase < len(PHASES) else f"phase {phase}"  # of a newer version
    return f'{{"name": "{name}", "cat": "{_KINDS.get(phase, "other")}", "ph": "X"'


def _other(phase: int, role: int, rank: int) -> str:
    if phase == Phase.WAIT:
        return f', "waits for": "{_name(_WORKER, rank)}"'
    return f', "with": "{_name(_SERVER if role == _WORKER else _WORKER, rank)}"'


def _name(role: int, rank: int) -> str:
    word = ROLES[role]
    return word if word in ("controller", "host") else f"{word}:{rank}"


class _Counter(NamedTuple):
    """A value of a process at a moment (Unix ns)."""

    name: str
    pid: int
    at: int
    args: dict[str, float]


def _counters(
    run: RunData, spans: Columns, processes: _Processes, between: tuple[int, int]
) -> Iterator[_Counter]:
    table = run.columns("resources")
    inside = np.flatnonzero((table["time"] >= between[0]) & (table["time"] <= between[1]))
    names = ("time", "role", "rank", "cpu", "memory", "gpu")
    for at, role, rank, cpu, memory, gpu in zip(
        *(table[name][inside].tolist() for name in names), strict=True
    ):
        pid = processes.pid(role, rank)
        yield _Counter("CPU", pid, at, {"cores": round(cpu, 3)})
        yield _Counter("memory", pid, at, {"MB": round(memory / 1e6, 1)})
        if role == _HOST and gpu == gpu:
            yield _Counter("GPU", pid, at, {"share": round(gpu, 3)})
    yield from _staleness(run, spans, processes, between)


def _staleness(
    run: RunData, spans: Columns, processes: _Processes, between: tuple[int, int]
) -> Iterator[_Counter]:
    """Of each update that the lead server's spans know: its n-th made version n, unless it was resumed."""
    pushes = run.push_columns
    lead = (spans["role"] == _SERVER) & (spans["rank"] == 0) & (spans["phase"] == Phase.UPDATE)
    lead &= (spans["start"] >= between[0]) & (spans["start"] <= between[1])
    if not len(pushes["version"]) or not lead.any() or run.record.get("resumes"):
        return
    versions, inverse, counts = np.unique(pushes["version"], return_inverse=True, return_counts=True)
    means = np.bincount(inverse, pushes["staleness"]) / counts
    made = spans["step"][lead] + 1
    place = np.searchsorted(versions, made)
    known = (place < len(versions)) & (versions[np.minimum(place, len(versions) - 1)] == made)
    pid = processes.pid(_SERVER, 0)
    ends = (spans["start"] + spans["ns"])[lead][known]
    for at, mean in zip(ends.tolist(), means[place[known]].tolist(), strict=True):
        yield _Counter("staleness", pid, at, {"mean": round(mean, 3)})
