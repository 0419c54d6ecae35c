"""What is shown while a run goes on: live or plain, and never at the run's cost."""

import io
import json
import logging
import math
from dataclasses import replace

import pytest
from rich.console import Console

from paceline.observe import Progress, RunStatus, ServerStatus, WorkerStatus
from paceline.observe.analyse import wording
from paceline.observe.analyse.window import Window
from paceline.observe.show import display, progress
from paceline.observe.show.display import picture


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def running(workers: int = 2) -> RunStatus:
    return RunStatus(
        state="running",
        elapsed_s=42.0,
        version=2407,
        epoch=1,
        samples=2000,
        samples_per_epoch=1437,
        parameters=61706,
        workers={
            rank: WorkerStatus(
                rank=rank,
                state="running",
                clock=1204,
                step_s=9.0,
                wait_s=1.0 + rank,
                metrics={"accuracy": 0.98, "loss": 0.0712345},
            )
            for rank in range(workers)
        },
        staleness={0: 6, 1: 3, 2: 1},
    )


def drawn(
    status: RunStatus, width: int = 80, height: int = 24, *, full: bool = False, window: Window | None = None
) -> list[str]:
    if window is None:
        window = Window(5.0)
        window.see(replace(status, elapsed_s=status.elapsed_s - 10, samples=status.samples - 31044))
        window.see(status)
    console = Console(width=width, height=height, file=io.StringIO())
    with console.capture() as capture:
        console.print(picture(status, window, width=width, height=height, full=full))
    return [line.rstrip() for line in capture.get().splitlines()]


def measured(workers: int = 2, servers: int = 1, *, seconds: float = 40.0) -> RunStatus:
    """A run with spans, servers and resources, so far into its training."""
    status = running(workers)
    status.mode, status.elapsed_s, status.startup_s = "asp", 2.0 + seconds, 2.0
    for worker in status.workers.values():
        worker.clock = int(50 * seconds)
        worker.moved_out, worker.moved_in = int(20e6 * seconds), int(10e6 * seconds)
        worker.bytes_out = int(1e6 * seconds)
        worker.phases = {"forward": 0.2 * seconds, "backward": 0.4 * seconds, "wait": 0.35 * seconds}
        worker.phases |= {"load": 0.05 * seconds}
        worker.cpu, worker.memory = 0.97, 412_000_000
    status.servers = {
        rank: ServerStatus(
            rank=rank, updates=int(100 * seconds), update_s=0.12 * seconds, cpu=0.31, memory=388_000_000
        )
        for rank in range(servers)
    }
    return status


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    monkeypatch.setenv("TERM", "xterm")
    return clock


def test_picture() -> None:
    lines = drawn(running())
    assert lines[1].startswith(" running  epoch 2  ━")
    assert lines[1].endswith("39 %  0:42")
    assert lines[2] == " 48 samples/s (last 10 s: 3,104) · version 2,407 · staleness 0.5 mean, 2 max"
    assert lines[4].split() == ["worker", "state", "step", "loss", "accuracy", "waiting"]
    assert lines[5].split() == ["0", "running", "1,204", "0.07123", "0.98", "10", "%"]
    assert lines[6].split()[-2:] == ["18", "%"]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
def test_picture_fits_its_terminal(width: int) -> None:
    status = running(40)
    for worker in status.workers.values():
        worker.metrics = {f"a_rather_long_metric_{n}": float(n) for n in range(9)}
    lines = drawn(status, width=width)
    assert max(map(len, lines)) <= width
    assert len(lines) <= 24
    assert "… and 25 more workers" in lines[-1] or width < 40


def test_picture_before_the_first_update() -> None:
    lines = drawn(RunStatus(state="starting", workers={0: WorkerStatus(rank=0)}))
    assert lines[1].split() == ["starting", "0:00"]
    assert "samples/s" not in "".join(lines)


def test_picture_of_a_run_that_is_over_counts_epochs() -> None:
    status = running()
    status.state, status.epoch = "succeeded", 3
    status.leases = [{"epoch": 3, "samples": 1437, "applied": 0, "refused": 0, "unused": 0}]
    assert drawn(status)[1].split() == ["succeeded", "3", "epochs", "0:42"]


def test_picture_of_a_stream_has_no_bar() -> None:
    status = running()
    status.samples_per_epoch = None
    assert drawn(status)[1].split() == ["running", "2,000", "samples", "0:42"]


def test_nan_metrics_are_shown() -> None:
    status = running()
    status.workers[0].metrics = {"loss": math.nan}
    assert "nan" in drawn(status)[5]
    assert "nan" in progress.plain_line(status, Window(1.0))


def test_full_picture() -> None:
    window = Window(5.0)
    for second in range(30, 41):
        window.see(measured(seconds=second))
    lines = drawn(measured(), width=120, full=True, window=window)
    assert lines[2].endswith("staleness 0.5 mean, 2 max · 60 MB/s, 2 MB/s on the wire · asp")
    assert lines[3] == " time: compute 60 % · wait 35 % · load 5 %"
    assert lines[5].split() == [
        *("worker", "state", "step", "steps/s", "loss", "accuracy", "waiting"),
        *("out/s", "in/s", "CPU", "memory"),
    ]
    row = "0 running 2,000 50 0.07123 0.98 35 % 20 MB 10 MB 0.97 412 MB"
    assert lines[6].split() == row.split()
    assert lines[9].split() == ["server", "updates", "updates/s", "updating", "CPU", "memory"]
    assert lines[10].split() == ["0", "4,000", "100", "12", "%", "0.31", "388", "MB"]


def test_full_picture_is_of_the_last_seconds() -> None:
    """A run that computed for long and now waits is shown to wait."""
    window, status = Window(5.0), measured(seconds=1000)
    window.see(status)
    for second in range(1, 11):
        later = measured(seconds=1000)
        later.elapsed_s += second
        for worker in later.workers.values():
            worker.phases["wait"] += second
        window.see(later)
    lines = drawn(later, full=True, window=window)
    assert lines[3] == " time: wait 100 %"
    assert lines[6].split()[3] == "0", "no steps lately"
    assert "100 %" in lines[6]


def test_full_picture_of_one_status_is_of_the_whole_run() -> None:
    window = Window(5.0)
    window.see(measured())
    lines = drawn(measured(), width=120, full=True, window=window)
    assert lines[2].startswith(" 50 samples/s")
    assert lines[6].split()[2:4] == ["2,000", "50"]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 0), (40, 12), (64, 64)])
@pytest.mark.parametrize("height", [5, 24])
def test_full_picture_fits_its_terminal(width: int, height: int, workers: int, servers: int) -> None:
    status = measured(workers, servers)
    for worker in status.workers.values():
        worker.metrics = {f"a_rather_long_metric_{n}": math.nan for n in range(9)}
    lines = drawn(status, width=width, height=height, full=True)
    assert max(map(len, lines)) <= width
    assert len(lines) <= max(height, 8)
    assert ("more workers" in "".join(lines)) == (workers > 2) or width < 40


def test_full_picture_at_60_columns_keeps_what_matters_most() -> None:
    window = Window(5.0)
    window.see(measured())
    lines = drawn(measured(), width=60, full=True, window=window)
    assert lines[5].split()[:6] == ["worker", "state", "step", "steps/s", "loss", "waiting"]


def test_full_picture_without_measures() -> None:
    """Of an older version, or of a run without spans: what is not known is not shown."""
    lines = drawn(
        RunStatus.from_json({"state": "running", "version": 3, "workers": {"0": {"rank": 0}}}), full=True
    )
    assert lines[4].split() == ["worker", "state", "step", "steps/s", "waiting"]
    old = running()
    window = Window(5.0)
    window.see(old)
    assert drawn(old, full=True, window=window)[3] == " time: compute 86 % · wait 14 %"


def test_live_shows_the_full_picture(now: list[float]) -> None:
    out = Terminal()
    with Progress(stream=out, live=True) as shown:
        shown.show(measured())
    assert "updates/s" in out.getvalue()
    out = Terminal()
    with Progress(stream=out) as shown:
        shown.show(measured())
    assert "updates/s" not in out.getvalue()


def test_live_in_a_pipe_stays_plain(now: list[float]) -> None:
    out = io.StringIO()
    with Progress(stream=out, live=True) as shown:
        shown.show(measured())
    assert out.getvalue().startswith("0:42 running · ")
    assert out.getvalue().count("\n") == 1


def test_the_last_checkpoint_of_a_run_shows_how_far_it_is() -> None:
    status = RunStatus(state="stopping", saving=(1_200_000_000, 4_800_000_000))
    assert "stopping · checkpoint 25 % of 4.8 GB" in progress.plain_line(status, 1.0)
    status.state = "stopped"
    assert "checkpoint" not in progress.plain_line(status, 1.0)


def test_plain_lines_at_most_every_two_seconds(now: list[float]) -> None:
    out = io.StringIO()
    status = running()
    with Progress(stream=out) as shown:
        for now[0] in (0.0, 0.5, 1.9, 2.0, 2.1):
            shown.show(status)
        status.state = "finishing"
        shown.show(status)
        shown.print_line("the script's own")
    lines = out.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0] == (
        "0:42 running · epoch 2, 39 % · 48 samples/s · version 2,407 · staleness 0.5 mean, 2 max · "
        "loss 0.07123 · accuracy 0.98 · waiting 14 %"
    )
    assert lines[2].startswith("0:42 finishing")
    assert lines[3] == "the script's own"


def test_messages_once_each(now: list[float]) -> None:
    out = io.StringIO()
    status = running()
    shown = Progress(stream=out)
    for message in ("worker:1 died", "worker:1 is back"):
        status.messages.append(message)
        shown.show(status)
        shown.show(status)
    lines = out.getvalue().splitlines()
    assert lines.count("worker:1 died") == lines.count("worker:1 is back") == 1


def test_the_recent_rate_stands_behind_the_mean(now: list[float]) -> None:
    out = io.StringIO()
    shown = Progress(stream=out)
    for second in range(20):
        status = running()
        status.elapsed_s = float(second)
        status.samples = max(0, second - 10) * 100
        now[0] = 3.0 * second
        shown.show(status)
    assert "47 samples/s (last 5 s: 100)" in out.getvalue().splitlines()[-1]


def test_live(now: list[float]) -> None:
    out = Terminal()
    with Progress(stream=out) as shown:
        shown.show(running())
        shown.print_line("\x1b[32mgreen\x1b[0m [b]not markup[/b] :smile:\x1b[2J")
        status = running()
        status.messages.append("worker:1 died")
        shown.show(status)
    text = out.getvalue()
    assert "[b]not markup[/b] :smile:" in text
    assert "worker:1 died" in text
    assert "\x1b[2J" not in text
    assert "\x1b[?25l" not in text, "the cursor is not hidden: who is killed could not show it again"
    shown.close()


def test_live_draws_at_most_ten_times_a_second(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    drawings: list[float] = []
    monkeypatch.setattr(display.Display, "draw", lambda *_: drawings.append(now[0]))
    with Progress(stream=Terminal()) as shown:
        for hundredth in range(100):
            now[0] = hundredth / 100
            shown.show(running())
    assert 9 <= len(drawings) - 1 <= 10


def test_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    with Progress(stream=out) as shown:
        shown.show(running())
    assert "\x1b" not in out.getvalue()


def test_quiet(now: list[float]) -> None:
    out = Terminal()
    status = running()
    status.messages.append("worker:1 died")
    with Progress(stream=out, quiet=True) as shown:
        shown.show(status)
        shown.print_line("accuracy 0.98")
    assert out.getvalue() == "worker:1 died\naccuracy 0.98\n"


def test_broken_pipe_ends_the_display_only(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), Progress(stream=Broken()) as shown:
        for _ in range(3):
            shown.show(running())
            shown.print_line("x")
    assert [record.message for record in caplog.records] == [
        "the progress display failed, the run goes on: BrokenPipeError(32, 'Broken pipe')"
    ]


def test_failing_picture_falls_back_to_plain_lines(
    now: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("drawing failed")

    monkeypatch.setattr(display, "picture", fail)
    out = Terminal()
    with Progress(stream=out) as shown:
        shown.show(running())
        shown.print_line("still here")
        now[0] = 10.0
        shown.show(running())
    assert "still here\n0:42 running" in out.getvalue()


def test_closed_stream() -> None:
    out = io.StringIO()
    out.close()
    with Progress(stream=out) as shown:
        shown.show(running())


def test_status_json_round_trip() -> None:
    status = running()
    status.checkpoints = ["version-000000000050"]
    data = json.loads(json.dumps(status.to_json()))
    assert RunStatus.from_json(data) == status
    assert RunStatus.from_json({**data, "controller": {}, "later": 1}) == status
    assert RunStatus.from_json({}) == RunStatus()


def test_status_numbers() -> None:
    status = running()
    assert status.staleness_mean == 0.5
    assert status.staleness_max == 2
    assert status.idleness == pytest.approx(3 / 21)
    assert list(status.metrics) == ["loss", "accuracy"]
    assert status.samples_per_s == pytest.approx(2000 / 42)
    status.samples_before = 1000
    assert status.samples_per_s == pytest.approx(1000 / 42)
    status.startup_s = 2.0
    assert status.samples_per_s == pytest.approx(1000 / 40)
    empty = RunStatus()
    assert (empty.staleness_mean, empty.staleness_max, empty.idleness) == (0, 0, 0)
    assert (empty.samples_per_s, empty.epoch_share, empty.metrics) == (0, None, {})


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (wording.count(1234567), "1,234,567"),
        (wording.count(3.25), "3.2"),
        (wording.count(0), "0"),
        (wording.size(0), "0 B"),
        (wording.size(999), "999 B"),
        (wording.size(46_758_048), "46.8 MB"),
        (wording.size(1e6 - 1), "1 MB"),
        (wording.size(5e15), "5,000 TB"),
        (wording.duration(4.21), "4.2 s"),
        (wording.duration(59.97), "1 min"),
        (wording.duration(200), "3 min 20 s"),
        (wording.duration(7500), "2 h 05 min"),
        (wording.clock(3723), "1:02:03"),
        (wording.ago(-3), "0 s"),
        (wording.ago(59), "59 s"),
        (wording.ago(7300), "2 h"),
        (wording.ago(86400), "1 day"),
        (wording.ago(86400 * 3), "3 days"),
        (wording.percent(0.126), "13 %"),
        (wording.plural(1, "worker"), "1 worker"),
    ],
)
def test_words(said: str, expected: str) -> None:
    assert said == expected
