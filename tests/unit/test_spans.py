"""Lanes, recorders, and the raw files: exact sums, bounded detail, nothing that can hurt a run."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.observe.analyse.run_data import RunData
from paceline.observe.record import spans as module
from paceline.observe.record.phase import COMMUNICATION, COMPUTATION, PHASES, Phase
from paceline.observe.record.spans import NO_SPANS, Recorder, recorder_of
from paceline.observe.record.tables import SPANS, TOTALS, RawTable, read_raw, to_parquet


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.ns = 1_000
        if monkeypatch is not None:
            monkeypatch.setattr(module, "perf_counter_ns", self)

    def __call__(self) -> int:
        return self.ns


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def recorder(path: Path, **settings) -> Recorder:
    return Recorder(path / "raw", "worker-0.0", clock_ns=0, phase=Phase.OTHER, **settings)


def spans_of(path: Path) -> np.ndarray:
    (raw,) = read_raw(path / "raw", SPANS)
    return raw.records


def totals_of(path: Path) -> dict[tuple[int, int, int], tuple[int, int, int]]:
    found: dict[tuple[int, int, int], tuple[int, int, int]] = {}
    for raw in read_raw(path / "raw", TOTALS):
        for row in raw.records:
            key = int(row["lane"]), int(row["phase"]), int(row["other"])
            before = found.get(key, (0, 0, 0))
            new = int(row["ns"]), int(row["count"]), int(row["bytes"])
            found[key] = tuple(a + b for a, b in zip(before, new, strict=True))
    return found


def test_names_and_numbers_of_phases_belong_together():
    numbers = {k.lower(): v for k, v in vars(Phase).items() if isinstance(v, int)}
    assert {name: PHASES.index(name) for name in PHASES} == numbers
    assert not COMPUTATION & COMMUNICATION


def test_phases_follow_each_other_without_a_gap(tmp_path, clock):
    made = recorder(tmp_path)
    for phase, ns in ((Phase.LOAD, 5), (Phase.FORWARD, 7), (Phase.BACKWARD, 11), (Phase.OTHER, 3)):
        clock.ns += ns
        made.main.enter(phase)
    clock.ns += 2
    made.close()
    rows = spans_of(tmp_path)
    assert rows["ns"].tolist() == [5, 7, 11, 3, 2]
    assert [PHASES[p] for p in rows["phase"]] == ["other", "load", "forward", "backward", "other"]
    assert (rows["start"][1:] == rows["start"][:-1] + rows["ns"][:-1]).all()


def test_the_same_phase_again_goes_on(tmp_path, clock):
    made = recorder(tmp_path)
    clock.ns += 5
    assert made.main.enter(Phase.OTHER) == Phase.OTHER
    clock.ns += 5
    made.close()
    assert spans_of(tmp_path)["ns"].tolist() == [10]


def test_a_wait_is_split_between_who_caused_it_and_the_rest(tmp_path, clock):
    made = recorder(tmp_path)
    made.main.enter(Phase.WAIT)
    clock.ns += 100
    made.main.blame(3, 60e-9)
    clock.ns += 1
    made.main.enter(Phase.OTHER)
    made.close()
    rows = spans_of(tmp_path)
    waits = [(int(r["other"]), int(r["ns"])) for r in rows if r["phase"] == Phase.WAIT]
    assert waits == [(3, 60), (-1, 41)]


def test_nobody_is_blamed_for_more_than_there_was(tmp_path, clock):
    """The other side's clock says it took longer than we waited: the push was on its way meanwhile."""
    made = recorder(tmp_path)
    made.main.enter(Phase.WAIT)
    clock.ns += 10
    made.main.blame(3, 60e-9)
    made.main.enter(Phase.OTHER)
    made.close()
    waits = [(int(r["other"]), int(r["ns"])) for r in spans_of(tmp_path) if r["phase"] == Phase.WAIT]
    assert waits == [(3, 10), (-1, 0)]


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(-1, 40), st.integers(0, 10**6)), max_size=60))
def test_sums_are_exact_however_few_spans_are_kept(tmp_path_factory, moves):
    path = tmp_path_factory.mktemp("spans")
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "perf_counter_ns", clock)
        made = recorder(path, most_spans=4)
        expected: dict[tuple[int, int], int] = {}
        at, since = (Phase.OTHER, -1), clock.ns
        for step, (phase, other, ns) in enumerate(moves):
            clock.ns += ns
            expected[at] = expected.get(at, 0) + clock.ns - since
            made.main.enter(phase, other)
            made.begin_step(step)
            if step % 7 == 0:
                made.flush()
            at, since = (phase, other), clock.ns
        expected[at] = expected.get(at, 0) + clock.ns - since
        made.close()
    found = {(phase, other): ns for (_, phase, other), (ns, _, _) in totals_of(path).items()}
    assert {k: v for k, v in found.items() if v} == {k: v for k, v in expected.items() if v}


def test_a_long_run_keeps_ever_fewer_steps(tmp_path, clock):
    made = recorder(tmp_path, most_spans=100)
    for step in range(10_000):
        made.begin_step(step)
        for phase in (Phase.LOAD, Phase.FORWARD):
            clock.ns += 1
            made.main.enter(phase)
        if step % 10 == 9:
            made.flush()
    made.close()
    rows = spans_of(tmp_path)
    assert 100 < len(rows) < 1_000
    late = np.unique(rows["step"][rows["step"] > 8_000])
    assert len(late) > 2 and len(set(np.diff(late))) == 1  # evenly, to the end
    assert sum(count for _, count, _ in totals_of(tmp_path).values()) == 20_001


def test_threads_have_lanes_of_their_own(tmp_path):
    made = recorder(tmp_path)
    rounds = 2_000

    def work(name: str) -> None:
        lane = made.lane(name)
        for i in range(rounds):
            lane.enter(Phase.PUSH, 0, i)
            lane.carried(3)
            lane.enter(Phase.IDLE)

    threads = [threading.Thread(target=work, args=(f"sender {i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        made.flush()
    for thread in threads:
        thread.join()
    made.close()
    totals = totals_of(tmp_path)
    pushes = {lane: found for (lane, phase, _), found in totals.items() if phase == Phase.PUSH}
    assert set(pushes) == {1, 2, 3}
    assert all((count, nbytes) == (rounds, 3 * rounds) for _, count, nbytes in pushes.values())
    assert (spans_of(tmp_path)["phase"] != Phase.IDLE).all()


def test_times_are_the_runs_not_the_hosts(tmp_path, clock):
    made = Recorder(tmp_path / "raw", "server-1.0", clock_ns=5_000_000, phase=Phase.UPDATE)
    clock.ns += 4
    made.close()
    (raw,) = read_raw(tmp_path / "raw", SPANS)
    assert (raw.role, raw.rank, raw.incarnation) == ("server", 1, 0)
    assert raw.records["start"].tolist() == [5_001_000]


def test_flush_tells_what_is_new(tmp_path, clock):
    made = recorder(tmp_path)
    clock.ns += 10**9
    made.main.enter(Phase.LOAD)
    assert made.flush() == {Phase.OTHER: 1.0}
    assert made.flush() == {}
    made.close()


def test_off_costs_and_leaves_nothing(tmp_path):
    assert recorder_of(None, "worker-0.0", clock_ns=0) is NO_SPANS
    before = NO_SPANS.main.enter(Phase.LOAD)
    NO_SPANS.main.enter(before)
    NO_SPANS.main.blame(1, 2.0)
    NO_SPANS.main.carried(5)
    NO_SPANS.lane("x").enter(Phase.PUSH)
    NO_SPANS.begin_step(3)
    assert NO_SPANS.flush() == {} and NO_SPANS.broken is None and not NO_SPANS.on
    NO_SPANS.close()


# --- the files ---------------------------------------------------------------------------------------------


def test_a_record_that_was_cut_short_is_left_out(tmp_path, clock):
    made = recorder(tmp_path)
    for _ in range(3):
        clock.ns += 1
        made.main.enter(Phase.LOAD)
        clock.ns += 1
        made.main.enter(Phase.OTHER)
    made.close()
    path = tmp_path / "raw" / "worker-0.0.spans"
    whole = len(spans_of(tmp_path))
    path.write_bytes(path.read_bytes()[:-5])
    assert len(spans_of(tmp_path)) == whole - 1


def test_strange_files_are_nobodys(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    for name in ("worker-0.spans", "somebody-0.0.spans", "worker-0.0.spans.bak", "x"):
        (raw / name).write_bytes(b"x" * 72)
    assert list(read_raw(raw, SPANS)) == []


def test_a_directory_that_cannot_be_written_is_said_and_survived(tmp_path):
    (tmp_path / "raw").write_text("in the way")
    made = recorder(tmp_path)
    made.main.enter(Phase.LOAD)
    made.close()
    assert made.broken is not None


def test_a_full_disk_is_said_and_survived(tmp_path, monkeypatch):
    full_disk = lambda _: os.open("/dev/full", os.O_WRONLY)  # noqa: E731
    monkeypatch.setattr("paceline.observe.record.tables.append_to", full_disk)
    full = RawTable(tmp_path, "worker-0.0", SPANS)
    full.append(np.zeros(3, SPANS.record))
    assert full.broken is not None and "space" in str(full.broken)
    full.append(np.zeros(3, SPANS.record))


def test_parquet_takes_over_and_adds_to_what_was_there(tmp_path, clock):
    for incarnation in range(2):
        made = Recorder(tmp_path / "raw", f"worker-0.{incarnation}", clock_ns=0, phase=Phase.LOAD)
        clock.ns += 7
        made.close()
        written = to_parquet(tmp_path)
        assert sorted(path.name for path in written) == ["spans.parquet", "totals.parquet"]
        assert not (tmp_path / "raw").exists()
    frame = RunData(tmp_path).spans
    assert frame.ns.tolist() == [7, 7]
    assert frame.incarnation.tolist() == [0, 1]
    assert frame.phase.tolist() == ["load", "load"]
    assert to_parquet(tmp_path) == [tmp_path / "spans.parquet", tmp_path / "totals.parquet"]
    assert len(RunData(tmp_path).spans) == 2


def test_raw_and_parquet_are_read_together(tmp_path, clock):
    for rank in range(2):
        made = Recorder(tmp_path / "raw", f"worker-{rank}.0", clock_ns=0, phase=Phase.LOAD)
        clock.ns += 7
        made.close()
        if not rank:
            to_parquet(tmp_path)
    assert RunData(tmp_path).spans["rank"].tolist() == [0, 1]
