"""The guard: silent on noisy runs that get better, soon heard on runs that diverge, and fair about why."""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import pytest

from paceline.core.modes import Decision, Guard, parse_mode

ASP = parse_mode("asp")


def falling(step: int) -> float:
    return 2.3 * math.exp(-step / 400) + 0.2


# A step's loss, from a source of noise and the loss that it would have without.
Noise = Callable[[random.Random, float], float]

NOISES: dict[str, Noise] = {
    "gauss": lambda rng, loss: loss + rng.gauss(0, 0.3),
    "lognormal": lambda rng, loss: loss * rng.lognormvariate(0, 0.6),
    "exponential": lambda rng, loss: loss * rng.expovariate(1),
    "outliers": lambda rng, loss: loss * rng.lognormvariate(0, 0.3) * (30 if rng.random() < 0.01 else 1),
    "rare giants": lambda rng, loss: loss * rng.lognormvariate(0, 0.3) * (1e6 if rng.random() < 0.001 else 1),
}


def first_decision(losses: Iterable[float], guard: Guard, staleness: int = 7) -> tuple[int, Decision] | None:
    for step, loss in enumerate(losses):
        guard.loss(loss)
        if step % 10 == 0:
            guard.update(staleness)
        if decision := guard.verdict(ASP):
            return step, decision
    return None


@pytest.mark.parametrize("noise", NOISES)
def test_no_alarm_in_forty_noisy_runs_that_get_better(noise: str) -> None:
    """Five kinds of noise: two hundred runs."""
    for seed in range(40):
        rng = random.Random(seed)
        losses = (NOISES[noise](rng, falling(step)) for step in range(1500))
        assert first_decision(losses, Guard()) is None, seed


def level(step: int) -> float:
    return 2.3


def to_almost_nothing(step: int) -> float:
    return 2.3 * math.exp(-step / 100) + 1e-4


def in_swings(step: int) -> float:
    return falling(step) * (1 + 0.4 * math.sin(step / 40))


def in_bursts(step: int) -> float:
    return falling(step) * (20 if step % 500 < 4 else 1)


def below_zero(step: int) -> float:
    return 5 * math.exp(-step / 300) - 5


@pytest.mark.parametrize("course", [level, to_almost_nothing, in_swings, in_bursts, below_zero])
def test_no_alarm_on_other_courses(course: Callable[[int], float]) -> None:
    for seed in range(10):
        rng = random.Random(seed)
        losses = (course(step) + abs(course(step)) * rng.gauss(0, 0.2) for step in range(1500))
        assert first_decision(losses, Guard()) is None, seed


def test_no_alarm_on_noise_that_lasts() -> None:
    for seed in range(10):
        rng, swing = random.Random(seed), 0.0
        losses = []
        for step in range(1500):
            swing = 0.9 * swing + rng.gauss(0, math.sqrt(1 - 0.9**2))
            losses.append(falling(step) * math.exp(0.3 * swing))
        assert first_decision(losses, Guard()) is None, seed


TURNED = 800

DIVERGING: dict[str, tuple[Callable[[int], float], int]] = {
    "a climb": (lambda after: falling(TURNED) + 0.005 * after, 400),
    "growth": (lambda after: falling(TURNED) * math.exp(after / 100), 250),
    "back to chance": (lambda after: 2.3, 250),
    "a leap": (lambda after: falling(TURNED) + 5, 100),
    "explosion": (lambda after: min(1e90, falling(TURNED) * 2.0**after), 60),
}


@pytest.mark.parametrize("course", DIVERGING)
@pytest.mark.parametrize("noise", ["gauss", "lognormal"])
def test_divergence_is_soon_noticed(course: str, noise: str) -> None:
    after, limit = DIVERGING[course]
    for seed in range(10):
        rng = random.Random(seed)
        courses = (falling(s) if s < TURNED else after(s - TURNED) for s in range(TURNED + limit))
        found = first_decision((NOISES[noise](rng, loss) for loss in courses), Guard())
        assert found is not None, seed
        assert found[0] >= TURNED
        assert str(found[1].mode) == "ssp:4"


def test_the_reason_is_for_people() -> None:
    losses = [0.3] * 400 + [1.2] * 200
    found = first_decision(losses, Guard())
    assert found is not None
    assert found[1].reason.startswith("the loss rose from 0.3 to ")
    assert "reports while the mean staleness was 7.0; ssp:4 allows less of it than asp" in found[1].reason


def test_staleness_is_not_blamed_where_there_is_none_and_it_is_said_once() -> None:
    guard, said = Guard(), []
    for step in range(5000):
        guard.loss(0.3 * math.exp(max(0, step - 400) / 200))
        guard.update(0)
        if decision := guard.verdict(ASP):
            said.append(decision)
    (only,) = said
    assert only.mode is None
    assert "the mean staleness was 0.0, so a tighter mode will not help" in only.reason
    assert "learning rate" in only.reason


def test_it_tightens_step_by_step_while_the_loss_goes_on_rising() -> None:
    guard, mode, at, modes = Guard(), ASP, [], []
    for step in range(5000):
        guard.loss(0.3 * math.exp(max(0, step - 400) / 200))
        guard.update(3)
        if decision := guard.verdict(mode):
            at.append(step)
            modes.append(str(decision.mode))
            mode = decision.mode or mode
    assert modes == ["ssp:4", "ssp:1", "bsp", "None"]
    assert all(later - earlier >= 200 for earlier, later in pairwise(at))


def test_a_loss_that_stays_high_after_a_decision_is_not_one_that_rises() -> None:
    guard = Guard()
    rng = random.Random(0)
    losses = iter([0.3] * 400 + [1.2 + rng.gauss(0, 0.1) for _ in range(3000)])
    assert first_decision(losses, guard) is not None
    assert first_decision(losses, guard) is None


def test_it_may_speak_again_about_a_new_rise() -> None:
    guard = Guard()
    losses = iter([0.3] * 400 + [1.2] * 100 + [0.5] * 800 + [1.5] * 100)
    assert first_decision(losses, guard) is not None
    found = first_decision(losses, guard)
    assert found is not None
    assert "from 0.5" in found[1].reason


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_losses_that_are_not_numbers(bad: float) -> None:
    found = first_decision([0.3] * 300 + [bad] * 100, Guard())
    assert found is not None
    assert found[0] < 350
    assert "most of the recent losses were NaN or Inf while the mean staleness was 7.0" in found[1].reason
    assert first_decision(([0.3] * 9 + [bad]) * 200, Guard()) is None  # a few are no divergence


def test_refused_pushes() -> None:
    guard = Guard()
    for _ in range(300):
        guard.update(2)
    for _ in range(40):
        guard.refused()
        if decision := guard.verdict(parse_mode("ssp:1")):
            break
    assert decision is not None
    assert str(decision.mode) == "bsp"
    assert "most of the recent pushes held NaN or Inf and were refused" in decision.reason


def test_pushes_told_together_have_no_order() -> None:
    guard = Guard()
    for _ in range(20):
        guard.pushes({0: 900, 50: 20}, refused=80)
        assert guard.verdict(ASP) is None
    guard.pushes({0: 0, 4: 100}, refused=200)
    decision = guard.verdict(ASP)
    assert decision is not None
    guard.pushes({})
    assert guard.verdict(ASP) is None


def test_nothing_is_said_during_the_warm_up() -> None:
    guard = Guard(warmup=500)

    def losses() -> Iterator[float]:
        for step in range(600):
            yield 0.3 if step < 150 else 0.3 * 1.01 ** (step - 150)

    found = first_decision(losses(), guard)
    assert found is not None
    assert 499 <= found[0] < 560


def test_a_mode_that_cannot_be_switched() -> None:
    guard, easgd = Guard(), parse_mode("easgd:4")
    decisions = []
    for loss in [0.3] * 400 + [1.2] * 100:
        guard.loss(loss)
        guard.update(5)
        decisions.append(guard.verdict(easgd))
    (only,) = [decision for decision in decisions if decision]
    assert only.mode is None
    assert "but a run in easgd:4 cannot be switched to a tighter mode" in only.reason


def test_a_run_that_runs_away_goes_back_and_on_without_staleness() -> None:
    seen = "the loss rose from 19 to 1e+06"
    for text in ("asp", "ssp:4", "ssp:1", "backup:1"):
        guard = Guard()
        guard.pushes({2: 30, 3: 30})
        decision = guard.ran_away(parse_mode(text), seen, 120)
        assert (str(decision.mode), decision.back_to, decision.ran_away) == ("bsp", 120, True)
        assert decision.reason == f"{seen} while the mean staleness was 2.5; bsp has none"
    assert str(Guard().ran_away(ASP, seen, 0).mode) == "bsp"  # too early to know how stale pushes are
    fresh = Guard()
    fresh.pushes({0: 50})
    for guard, mode in ((fresh, ASP), (Guard(), parse_mode("bsp"))):
        decision = guard.ran_away(mode, seen, 7)
        assert (decision.mode, decision.back_to, decision.ran_away) == (None, 7, True)


def test_what_workers_logged_last_before_the_run_went_back_does_not_count() -> None:
    guard = Guard()
    guard.pushes({3: 60})
    for version in range(60):
        guard.loss(28.0 * 1.7**version, version)
    guard.ran_away(ASP, "the loss rose from 28 to 1e+15", 0)
    for version in range(60, 100):  # they are yet to be ended
        guard.loss(28.0 * 1.7**version, version)
    guard.restart()
    for version in range(2000):
        guard.loss(0.45 + 0.1 * (version % 2), version)
        assert guard.verdict(parse_mode("bsp")) is None


def test_a_decline_names_the_version_to_go_back_to() -> None:
    guard = Guard()
    for version, loss in enumerate([0.3] * 400 + [1.2] * 100):
        guard.loss(loss, version)
        guard.update(3)
        if decision := guard.verdict(ASP):
            break
    assert decision is not None and not decision.ran_away
    assert decision.back_to is not None and 50 <= decision.back_to < 400


def test_a_run_without_losses_is_left_alone() -> None:
    guard = Guard()
    for _ in range(1000):
        guard.update(9)
        assert guard.verdict(ASP) is None
