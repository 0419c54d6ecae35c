"""Random histories of faults (make chaos), and that their judge can tell right from wrong."""

from dataclasses import replace

import pytest
import torch

from tests.histories.history import SAMPLES, Event, draw
from tests.histories.player import play
from tests.histories.script import COLUMNS, ENORMOUS
from tests.histories.witness import problems

EPOCHS = 3
TOO_LATE = Event("kill", "worker:0", after=10**9)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(50))
def test_every_sample_is_applied_exactly_once_whatever_happens(seed, tmp_path):
    verdict = play(draw(seed), tmp_path)
    assert not verdict.problems, str(verdict)


@pytest.mark.chaos
def test_a_history_whose_events_all_come_too_late_is_no_success(tmp_path):
    verdict = play(replace(draw(0), events=(TOO_LATE,), faults="", epochs=2), tmp_path)
    assert verdict.effective == 0
    assert [problem for problem in verdict.problems if "no event took effect" in problem], str(verdict)


@pytest.fixture
def model():
    """Every sample of every epoch applied once, by one of the workers."""
    marks = [torch.zeros(SAMPLES, COLUMNS, dtype=torch.float64) for _ in range(EPOCHS)]
    for epoch in marks:
        for sample in range(SAMPLES):
            epoch[sample, sample % COLUMNS] = 0.25
    return {f"epochs.{i}": epoch for i, epoch in enumerate(marks)}


def judged(model):
    return problems(model, samples=SAMPLES, epochs=EPOCHS)


def test_the_judge_accepts_what_is_right(model):
    assert judged(model) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda marks: marks[7].zero_(), "never applied"),
        (lambda marks: marks[7].fill_(0.5), "applied by several workers"),
        (lambda marks: marks[7, 1].fill_(ENORMOUS / 4), "applied again by the same worker"),
        (lambda marks: marks[7, 1].fill_(float("nan")), "not finite"),
    ],
)
def test_the_judge_finds_what_is_wrong(model, change, said):
    change(model["epochs.1"])
    assert any(said in problem for problem in judged(model)), judged(model)


def test_a_seed_is_always_the_same_history_and_seeds_differ():
    assert draw(3) == draw(3)
    assert len({str(draw(seed)) for seed in range(100)}) == 100


def test_histories_reach_every_mode_link_kind_and_target():
    drawn = [draw(seed) for seed in range(500)]
    events = [event for history in drawn for event in history.events]
    assert {event.kind for event in events} == {"kill", "stop", "scale", "switch", "interrupt", "crash"}
    targets = {event.target for event in events if event.kind == "kill"}
    assert {"lead", "controller", "worker:0", "worker:3", "server:0", "server:2"} <= targets
    assert {history.settings["link"] for history in drawn} == {"shm", "tcp"}
    assert {history.settings["replicas"] for history in drawn} == {0, 1, 2}
    assert len({history.settings["mode"] for history in drawn}) > 12
    assert all(3 <= len(history.events) <= 12 for history in drawn)
