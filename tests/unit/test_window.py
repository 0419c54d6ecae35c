"""Rates of the last few seconds, from statuses that only count."""

import pytest

from paceline.observe import RunStatus, ServerStatus, WorkerStatus
from paceline.observe.analyse.window import Window, shares_of


def at(
    second: float, *, clock: int = 0, phases: dict[str, float] | None = None, **settings: float
) -> RunStatus:
    worker = WorkerStatus(rank=0, clock=clock, phases=phases or {}, step_s=settings.get("step_s", 0.0))
    return RunStatus(
        elapsed_s=second,
        samples=32 * clock,
        workers={0: worker},
        servers={0: ServerStatus(rank=0, updates=clock, update_s=0.01 * clock)},
    )


def test_empty() -> None:
    window = Window(5.0)
    assert (window.seconds, window.samples_per_s, window.phases, window.staleness) == (0.0, 0.0, {}, {})
    assert window.worker(3).idleness == window.server(3).updating == 0.0


def test_only_the_last_seconds_count() -> None:
    window = Window(5.0)
    for second in range(21):
        window.see(at(second, clock=max(0, second - 10) * 10, phases={"load": 1.0, "wait": 0.1 * second}))
    assert window.worker(0).steps_per_s == pytest.approx(10)
    assert window.samples_per_s == pytest.approx(320)
    assert window.worker(0).phases == {"wait": pytest.approx(0.5)}
    assert window.server(0).updating == pytest.approx(0.1)


def test_start_up_is_no_part_of_it() -> None:
    window = Window(5.0)
    for second in range(8):
        now = at(second, clock=max(0, second - 4) * 10)
        now.startup_s = 4.0 if second > 4 else 0.0
        window.see(now)
    assert (window.seconds, window.worker(0).steps_per_s, window.samples_per_s) == (3.0, 10.0, 320.0)


def test_many_statuses_a_second_are_thinned_out_and_change_nothing() -> None:
    window = Window(5.0)
    for hundredth in range(2001):
        window.see(at(hundredth / 100, clock=hundredth))
    assert window.worker(0).steps_per_s == pytest.approx(100)
    assert 5.0 <= window.seconds <= 5.5
    assert len(window._past) < 60  # noqa: SLF001 (memory is what is tested)


def test_longer_where_steps_are() -> None:
    window = Window(10.0, least_steps=5)
    for second in range(100):
        window.see(at(second, clock=second // 7))
    assert window.worker(0).steps >= 5
    assert 30 <= window.seconds <= 50


def test_a_replaced_worker_begins_again() -> None:
    window = Window(5.0)
    window.see(at(1, clock=100, phases={"forward": 50.0}, step_s=50.0))
    window.see(at(2, clock=100, phases={"forward": 0.5, "load": 0.25}, step_s=0.5))
    assert window.worker(0).phases == {"forward": 0.5, "load": 0.25}


def test_a_resumed_run_begins_again() -> None:
    window = Window(5.0)
    window.see(at(100, clock=1000))
    window.see(at(1, clock=1010))
    window.see(at(2, clock=1020))
    assert window.worker(0).steps == 10


def test_a_status_that_changes_in_place() -> None:
    """The controller has one status and changes it."""
    window, status = Window(5.0), at(1, clock=10, phases={"load": 1.0})
    window.see(status)
    status.elapsed_s, status.workers[0].clock, status.workers[0].phases["load"] = 2.0, 30, 1.5
    window.see(status)
    assert window.worker(0).steps == 20
    assert window.worker(0).phases == {"load": 0.5}


def test_shares() -> None:
    assert shares_of({"forward": 1.0, "backward": 2.0, "wait": 6.0, "update": 1.0}) == {
        "wait": pytest.approx(0.6),
        "compute": pytest.approx(0.4),
    }
    assert shares_of({}) == {}
