"""A run as Chrome trace events: whole, in order, and adding up to what the tables say."""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.exceptions import UsageError
from paceline.observe.analyse.run_data import RunData
from paceline.observe.record.phase import PHASES, Phase
from paceline.observe.record.tables import RESOURCES, ROLES, SPANS, RawTable, to_parquet
from paceline.observe.show import perfetto
from paceline.observe.show.perfetto import StepRange, write_trace

BEGAN = 1_794_746_346_000_000_000
STEPS = 20
MS = 1_000_000


def put(run: Path, owner: str, rows: list[tuple[int, ...]]) -> None:
    table = RawTable(run / "raw", owner, SPANS)
    table.append(np.array(rows, SPANS.record))
    table.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two workers, one of them replaced, and a server; 10 ms a step."""
    path = tmp_path / "a-run"
    path.mkdir()
    (path / "run.json").write_text(json.dumps({"id": "a-run", "job": {"mode": "asp"}, "directory": "/"}))
    (path / "status.json").write_text(json.dumps({"state": "succeeded", "mode": "asp"}))
    for owner, steps in (
        ("worker-0.0", range(STEPS)),
        ("worker-1.0", range(STEPS // 2)),
        ("worker-1.1", range(STEPS // 2, STEPS)),
    ):
        rows = []
        for step in steps:
            at = BEGAN + step * 10 * MS + 123
            rows += [
                (at, 4 * MS, 0, step, -1, -1, Phase.FORWARD, 0),
                (at + 4 * MS, 3 * MS, 4_000_000, step, 2, 0, Phase.PUSH, 0),
                (at + 5 * MS, 2 * MS, 0, step, -1, -1, Phase.PULL, 1),
                (at + 7 * MS, 3 * MS, 0, step, -1, 1, Phase.WAIT, 0),
            ]
        # As lanes flush: a span of another lane that began earlier may come later.
        put(path, owner, rows[::-1])
    put(
        path,
        "server-0.0",
        [(BEGAN + n * 5 * MS, MS, 0, n, -1, -1, Phase.UPDATE, 0) for n in range(2 * STEPS)]
        + [(BEGAN + n * 5 * MS, MS, 99, n, -1, 1, Phase.PUSH, 1) for n in range(2 * STEPS)],
    )
    table = RawTable(path / "raw", "controller", RESOURCES)
    for second in range(2):
        rows = [
            (BEGAN + second * 100 * MS, ROLES.index(role), 0, 0.5, 10**8, 3, *[0] * 4, 0.0, np.nan, 0)
            for role in ("worker", "host")
        ]
        table.append(np.array(rows, RESOURCES.record))
    table.close()
    lines = [f"{n + 1},0,0,{n},{n},{n % 3},32" for n in range(2 * STEPS)]
    header = "version,worker,incarnation,sequence,read_version,staleness,samples"
    (path / "pushes.csv").write_text("\n".join([header, *lines]) + "\n")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    data = json.loads(text)
    assert data["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = data["traceEvents"]
    return events


def names(events: list[dict[str, Any]], what: str) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == f"{what}_name"
    }


@pytest.mark.parametrize("ending", ["json", "json.gz"])
@pytest.mark.parametrize("chunk", [7, 100_000])
@pytest.mark.parametrize("parquet", [False, True])
def test_whole(run: Path, ending: str, chunk: int, parquet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto, "_CHUNK", chunk)
    if parquet:
        to_parquet(run)
    data = RunData(run)
    out = run.parent / f"trace.{ending}"
    number = write_trace(data, out)
    events = read(out)
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == number == len(data.columns("spans")["ns"])
    assert set(names(events, "process").values()) == {
        *("worker:0", "worker:1", "worker:1 (restart 1)", "server:0", "host")
    }
    assert set(names(events, "thread").values()) == {"main", "lane 1"}
    assert {event["ph"] for event in events} == {"X", "C", "M"}

    # Time by phase is what the table says, to the ns.
    sums: dict[str, float] = defaultdict(float)
    for span in spans:
        sums[span["name"]] += span["dur"]
    columns = data.columns("spans")
    for phase, word in enumerate(PHASES):
        assert sums[word] == pytest.approx(columns["ns"][columns["phase"] == phase].sum() / 1000, abs=1e-3)

    # A lane does one thing at a time, in order, and nothing began before the run.
    ends: dict[tuple[int, int], float] = defaultdict(float)
    for span in spans:
        lane = span["pid"], span["tid"]
        assert span["ts"] >= ends[lane] - 1e-6
        ends[lane] = span["ts"] + span["dur"]
    assert min(span["ts"] for span in spans) == 0.0
    assert max(ends.values()) == pytest.approx(STEPS * 10_000 + 0.123)


def test_what_spans_say(run: Path) -> None:
    out = run.parent / "trace.json"
    write_trace(RunData(run), out)
    events = read(out)
    processes = {pid: name for (pid, _), name in names(events, "process").items()}
    spans = [event for event in events if event["ph"] == "X"]
    push = next(span for span in spans if span["name"] == "push" and processes[span["pid"]] == "worker:0")
    assert push["args"] == {"step": 0, "slice": 2, "bytes": 4_000_000, "with": "server:0"}
    assert (push["cat"], push["ts"], push["dur"]) == ("communication", 4000.123, 3000.0)
    wait = next(span for span in spans if span["name"] == "wait")
    assert wait["args"] == {"step": 0, "waits for": "worker:1"}
    received = next(span for span in spans if span["name"] == "push" and processes[span["pid"]] == "server:0")
    assert received["args"]["with"] == "worker:1"
    counters = [event for event in events if event["ph"] == "C"]
    assert {(processes[event["pid"]], event["name"]) for event in counters} == {
        *((who, what) for who in ("worker:0", "host") for what in ("CPU", "memory")),
        ("server:0", "staleness"),
    }
    staleness = [event["args"]["mean"] for event in counters if event["name"] == "staleness"]
    assert staleness == [n % 3 for n in range(2 * STEPS)]


def test_some_steps(run: Path) -> None:
    out = run.parent / "trace.json"
    write_trace(RunData(run), out, StepRange.parse("5:7"))
    events = read(out)
    processes = {pid: name for (pid, _), name in names(events, "process").items()}
    spans = [event for event in events if event["ph"] == "X"]
    assert {span["args"]["step"] for span in spans if processes[span["pid"]].startswith("worker")} == {
        5,
        6,
        7,
    }
    updates = {span["args"]["step"] for span in spans if span["name"] == "update"}
    assert updates == set(range(10, 17)), "what the server did meanwhile"
    staleness = [event for event in events if event["name"] == "staleness"]
    assert 0 < len(staleness) <= 7


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("5:7", StepRange(5, 7)),
        ("5:", StepRange(5, None)),
        (":7", StepRange(None, 7)),
        ("5", StepRange(5, 5)),
        (":", StepRange()),
    ],
)
def test_steps(text: str, steps: StepRange) -> None:
    assert StepRange.parse(text) == steps


@pytest.mark.parametrize("text", ["", "a:b", "7:5", "1:2:3", "1.5"])
def test_steps_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--steps"):
        StepRange.parse(text)


def test_bad_input(run: Path, tmp_path: Path) -> None:
    data = RunData(run)
    with pytest.raises(UsageError, match=r"ends in \.json"):
        write_trace(data, tmp_path / "trace.txt")
    with pytest.raises(UsageError, match="cannot be written: No such file or directory"):
        write_trace(data, tmp_path / "not" / "there.json")
    with pytest.raises(UsageError, match="no spans of the steps 100:; it has 0:19"):
        write_trace(data, tmp_path / "trace.json", StepRange(100))
    (tmp_path / "is.json").mkdir()
    with pytest.raises(UsageError, match="cannot be written: Is a directory"):
        write_trace(data, tmp_path / "is.json")
    assert not list(tmp_path.glob(".*")), "nothing half-written stays"


def test_a_run_without_spans(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no spans to show: .*there are no spans"):
        write_trace(RunData(tmp_path), tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()


def test_a_resumed_run_has_no_staleness_counter(run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "resumes": [{}]}))
    out = run.parent / "trace.json"
    write_trace(RunData(run), out)
    assert "staleness" not in {event["name"] for event in read(out)}


def test_a_place_that_cannot_be_written_is_named_at_once(run: Path, tmp_path: Path) -> None:
    data = RunData(run)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file/trace.json cannot be written: Not a directory"):
        write_trace(data, tmp_path / "file" / "trace.json")
    with pytest.raises(UsageError, match="cannot be written"):
        write_trace(data, Path("/proc/trace.json"))
