"""A device's lane: spans between marks that are passed later, on the run's clock, without a wait."""

import json

import pytest

from paceline.observe.analyse.curves import timeline_lanes
from paceline.observe.analyse.facts import facts_of
from paceline.observe.analyse.run_data import RunData
from paceline.observe.record import device_lane, spans
from paceline.observe.record.device_lane import DEVICE_LANE, EVERY_NS, DeviceLane
from paceline.observe.record.phase import PHASES, Phase
from paceline.observe.record.spans import NO_SPANS, Recorder
from paceline.observe.record.tables import SPANS, TOTALS, read_raw
from paceline.observe.show.page_device import device
from paceline.observe.show.perfetto import write_trace
from paceline.observe.show.run_view import RunView

US = 1_000


class Clock:
    """The CPU's, which goes on when it is told to."""

    def __init__(self, monkeypatch) -> None:
        self.ns = 10**9
        monkeypatch.setattr(device_lane, "perf_counter_ns", self)
        monkeypatch.setattr(spans, "perf_counter_ns", self)

    def __call__(self) -> int:
        return self.ns


class Device:
    """Does its work one piece after the other, beginning no piece before it is given."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.free_at = 0
        """When all that it was given is done."""
        self.made = 0
        self.fails = False
        self.captures = False
        self.rate = 1.0
        """How fast its clock goes."""

    def work(self, ns: int) -> None:
        self.free_at = max(self.free_at, self.clock.ns) + ns

    def mark(self) -> "Mark":
        self.made += 1
        return Mark(self)


class Mark:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at = 0

    def record(self) -> bool:
        if self.device.fails:
            raise RuntimeError("CUDA error: device-side assert triggered")
        if not self.device.captures:
            self.at = self.device.free_at = max(self.device.free_at, self.device.clock.ns)
        return not self.device.captures

    def passed(self) -> bool:
        if self.device.fails:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self.at <= self.device.clock.ns

    def ms_since(self, earlier: "Mark") -> float:
        assert self.passed() and earlier.passed()
        return (self.at - earlier.at) * self.device.rate / 1e6


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def gpu(clock):
    return Device(clock)


def followed(gpu) -> tuple[DeviceLane, list[tuple[int, int, int, int, bool]]]:
    found: list[tuple[int, int, int, int, bool]] = []
    lane = DeviceLane(gpu.mark, lambda *span: found.append(span))
    return lane, found


def test_a_span_is_the_devices_time_not_the_threads(clock, gpu):
    lane, found = followed(gpu)
    lane.begin_step(0, Phase.FORWARD, detailed=True)
    began = clock.ns
    gpu.work(5000 * US)
    clock.ns += 100 * US  # the thread has handed forward over
    lane.enter(Phase.BACKWARD, clock.ns)
    gpu.work(8000 * US)
    clock.ns += 100 * US
    lane.enter(Phase.OTHER, clock.ns)
    lane.drain()
    assert found == []  # the device is not there yet, and the CPU does not wait
    clock.ns += 6000 * US
    lane.drain()
    assert found == [(Phase.FORWARD, began, 5000 * US, 0, True)]
    clock.ns += 9000 * US
    lane.drain()
    assert found[1:] == [(Phase.BACKWARD, began + 5000 * US, 8000 * US, 0, True)]


def test_short_steps_are_sampled_and_the_time_between_is_nobodys(clock, gpu):
    lane, found = followed(gpu)
    for step in range(40):
        lane.begin_step(step, Phase.OTHER, detailed=True)
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OTHER):
            lane.enter(phase, clock.ns)
            gpu.work(2000 * US)
            clock.ns += 2000 * US
    clock.ns += EVERY_NS
    lane.begin_step(40, Phase.OTHER, detailed=True)
    steps = [step for phase, _, _, step, _ in found if phase == Phase.FORWARD]
    assert steps == list(range(0, 40, 4))  # 6 ms each: at least 20 ms apart
    assert {ns for phase, _, ns, _, _ in found if phase != Phase.OTHER} == {2000 * US}
    assert sum(ns for _, _, ns, _, _ in found) == 10 * 6000 * US


def test_marks_are_used_again(clock, gpu):
    lane, found = followed(gpu)
    for step in range(500):
        lane.begin_step(step, Phase.FORWARD, detailed=True)
        lane.enter(Phase.BACKWARD, clock.ns)
        clock.ns += EVERY_NS
    assert len(found) >= 990
    assert gpu.made < 10


@pytest.mark.parametrize("rate", [0.99, 1.01])
def test_places_do_not_drift_from_the_cpus_clock(clock, gpu, rate):
    """Each mark is passed after it was given and before it was seen passed. 1 % of an hour are 36 s."""
    gpu.rate = rate
    lane, found = followed(gpu)
    for step in range(2000):
        lane.begin_step(step, Phase.FORWARD, detailed=True)
        began = clock.ns
        gpu.work(40_000 * US)
        clock.ns += 50_000 * US
        lane.enter(Phase.OTHER, clock.ns)
        lane.drain()
        forward = [span for span in found if span[0] == Phase.FORWARD][-1]
        assert abs(forward[1] - began) < 2_000 * US


def test_a_device_that_fails_is_measured_no_more_and_nobody_hears_of_it(clock, gpu):
    lane, found = followed(gpu)
    lane.begin_step(0, Phase.FORWARD, detailed=True)
    gpu.fails = True
    lane.enter(Phase.BACKWARD, clock.ns)
    lane.drain()
    gpu.fails = False
    clock.ns += 2 * EVERY_NS
    lane.begin_step(1, Phase.FORWARD, detailed=True)
    lane.enter(Phase.OTHER, clock.ns)
    lane.drain()
    assert found == [] and gpu.made == 1 + 1  # the mark that failed


def test_a_phase_that_cannot_be_marked_is_part_of_the_one_before(clock, gpu):
    """While a CUDA graph is captured."""
    lane, found = followed(gpu)
    lane.begin_step(0, Phase.OTHER, detailed=True)
    gpu.captures = True
    lane.enter(Phase.FORWARD, clock.ns)
    clock.ns += 100
    gpu.captures = False
    lane.enter(Phase.BACKWARD, clock.ns)
    clock.ns += 100
    lane.enter(Phase.OTHER, clock.ns)
    lane.drain()
    assert [(phase, ns) for phase, _, ns, _, _ in found] == [(Phase.OTHER, 100), (Phase.BACKWARD, 100)]


def test_a_device_that_is_far_behind_is_marked_no_further(clock, gpu):
    lane, found = followed(gpu)
    gpu.work(10**12)
    lane.begin_step(0, Phase.FORWARD, detailed=True)
    for _ in range(10_000):
        lane.enter(Phase.BACKWARD, clock.ns)
        lane.enter(Phase.FORWARD, clock.ns)
    assert gpu.made <= 4097
    assert found == []


def record_run(tmp_path, clock, gpu) -> RunData:
    """Ten steps of 50 ms: the thread's forward takes 1 ms of them, the device's 30."""
    made = Recorder(tmp_path / "raw", "worker-0.0", clock_ns=0, phase=Phase.OTHER)
    made.follow_device(gpu.mark)
    made.follow_device(gpu.mark)  # prepare() was called again
    for step in range(10):
        made.main.enter(Phase.FORWARD)
        gpu.work(30_000 * US)
        clock.ns += 1_000 * US
        made.main.enter(Phase.OTHER)
        clock.ns += 49_000 * US
        made.begin_step(step + 1)
    made.flush()
    made.close()
    return RunData(tmp_path)


def test_the_second_lane_is_in_the_files_and_in_no_sum_of_threads(tmp_path, clock, gpu):
    data = record_run(tmp_path, clock, gpu)
    (raw,) = read_raw(tmp_path / "raw", SPANS)
    device_rows = raw.records[raw.records["lane"] == DEVICE_LANE]
    forward = device_rows[device_rows["phase"] == Phase.FORWARD]
    assert forward["ns"].tolist() == [30_000 * US] * 10
    (totals,) = read_raw(tmp_path / "raw", TOTALS)
    summed = totals.records[(totals.records["lane"] == DEVICE_LANE)]
    assert int(summed["ns"][summed["phase"] == Phase.FORWARD].sum()) == 300_000 * US
    facts = facts_of(data)
    (worker,) = facts.workers
    assert worker.seconds["forward"] == pytest.approx(0.010)  # the thread's alone
    assert worker.total_s == pytest.approx(0.5)
    found = facts.device.workers[0]
    assert found.gpu["forward"] == pytest.approx(0.030)
    assert found.cpu["forward"] == pytest.approx(0.001)
    assert found.gpu_s == pytest.approx(0.050)


def test_the_page_has_a_section_on_the_gpu(tmp_path, clock, gpu):
    data = record_run(tmp_path, clock, gpu)
    facts = facts_of(data)
    page = device(RunView(data, facts, None, "succeeded"))
    assert "On the GPU" in page
    assert "<td>forward</td>" in page and "<td>30</td>" in page


def test_traces_and_the_timeline_name_the_lane(tmp_path, clock, gpu):
    data = record_run(tmp_path, clock, gpu)
    write_trace(data, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {0: "main", DEVICE_LANE: "GPU"}
    rows, _ = timeline_lanes(data, facts_of(data))
    assert [row.name for row in rows] == ["worker:0", "worker:0 GPU"]


def test_a_servers_update_on_the_device_is_not_counted_with_the_threads(tmp_path, clock, gpu):
    made = Recorder(tmp_path / "raw", "server-0.0", clock_ns=0)
    made.follow_device(gpu.mark)
    for update in range(8):
        made.begin_step(update)
        made.main.enter(Phase.UPDATE)
        gpu.work(3_000 * US)
        clock.ns += 200 * US
        made.main.enter(Phase.IDLE)
        clock.ns += 30_000 * US
    made.close()
    facts = facts_of(RunData(tmp_path))
    (server,) = facts.servers
    assert server.updates == 8
    assert server.update.p50 == pytest.approx(0.0002)
    assert facts.device.updates == {0: pytest.approx(0.003)}


def test_without_spans_no_device_is_followed(gpu):
    NO_SPANS.follow_device(gpu.mark)
    NO_SPANS.main.enter(Phase.FORWARD)
    NO_SPANS.begin_step(1)
    assert gpu.made == 0
    assert PHASES[Phase.IDLE] == "idle"
