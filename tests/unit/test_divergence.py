"""Divergence: silent on ordinary curves, however noisy, and soon heard on those that run away."""

import math
import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.modes import parse_mode
from paceline.core.modes.divergence import Divergence, explained, is_loss

STEPS = 300
Course = Callable[[int], float]
"""The loss at a step, without noise."""


def falling(step: int) -> float:
    return 2.3 * math.exp(-step / 200) + 0.2


ORDINARY: dict[str, Course] = {
    "falling": falling,
    "level": lambda s: 2.3,
    "to almost nothing": lambda s: 19 * math.exp(-s / 30) + 1e-6,
    "swings": lambda s: falling(s) * (1 + 0.8 * math.sin(s / 40)),
    "bursts": lambda s: falling(s) * (20 if s % 100 < 4 else 1),
    "a warm-up spike": lambda s: falling(s) * (40 if 4 <= s < 16 else 1),
    "a catapult": lambda s: falling(s) * (1 + 8 * math.exp(-(((s - 20) / 8) ** 2))),
    "below zero": lambda s: 5 * math.exp(-s / 100) - 5,
    "begins at zero": lambda s: -0.02 * min(1.0, s / 20) + 0.03 * math.sin(s),
    "up to chance": lambda s: 0.4 + 2 * min(1.0, s / 300),
    "a running mean from zero": lambda s: 2.3 * (1 - math.exp(-s / 3)),
    "restarts of the rate": lambda s: 0.2 + 2.1 * math.exp(-(s % 100) / 20),
}
NOISES: dict[str, Callable[[random.Random, float], float]] = {
    "none": lambda rng, loss: loss,
    "gauss": lambda rng, loss: loss + rng.gauss(0, 0.3) * abs(loss),
    "lognormal": lambda rng, loss: loss * rng.lognormvariate(0, 0.6),
    "exponential": lambda rng, loss: loss * rng.expovariate(1),
    "rare giants": lambda rng, loss: loss * rng.lognormvariate(0, 0.3) * (1e6 if rng.random() < 0.003 else 1),
    "rare NaN": lambda rng, loss: math.nan if rng.random() < 0.02 else loss * rng.lognormvariate(0, 0.3),
}


def first_seen(
    values: Callable[[int, int], Mapping[str, float]], *, workers: int = 4, steps: int = STEPS
) -> tuple[int, str] | None:
    """The step at which it is seen, and what is said. All workers log at every step."""
    found = Divergence()
    for step in range(steps):
        for worker in range(workers):
            found.logged(worker, values(step, worker), workers * step)
        if found.seen is not None:
            return step, found.seen
    assert found.outcome is None or found.outcome == found.seen
    return None


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("course", ORDINARY)
def test_no_alarm_on_ordinary_curves(course: str, noise: str) -> None:
    for seed in range(3):
        rng = random.Random(seed)
        workers = rng.choice([1, 2, 4])
        seen = first_seen(
            lambda s, w, rng=rng: {"loss": NOISES[noise](rng, ORDINARY[course](s))}, workers=workers
        )
        assert seen is None, (seed, seen)


# Growth a step, from which step on, and in how many steps more it is to be seen.
DIVERGING = [
    (1.05, 0, 150),
    (1.05, 100, 190),
    (1.3, 0, 45),
    (1.3, 50, 65),
    (3.0, 0, 16),
    (10.0, 0, 10),
    (1e5, 0, 6),
]


@pytest.mark.parametrize("noise", ["none", "gauss", "lognormal", "exponential"])
@pytest.mark.parametrize(("growth", "begins", "within"), DIVERGING)
def test_early_alarm_on_diverging_curves(growth: float, begins: int, within: int, noise: str) -> None:
    for seed in range(3):
        rng = random.Random(seed)

        def loss(step: int, worker: int, rng: random.Random = rng) -> Mapping[str, float]:
            grown = 19 * math.exp(-min(step, begins) / 40) * growth ** min(200, max(0, step - begins))
            return {"loss": NOISES[noise](rng, grown)}

        seen = first_seen(loss)
        assert seen is not None, seed
        assert begins < seen[0] <= begins + within, seed
        assert seen[1].startswith("the loss ")


def test_what_is_said() -> None:
    assert first_seen(lambda s, w: {"loss": 19.0 if s < 5 else 2.4e33}) == (
        7,
        "the loss became NaN or Inf (at first it was 19)",
    )
    assert first_seen(lambda s, w: {"train/loss": 19.0 if s < 5 else 2.4e13}) == (
        7,
        "the metric 'train/loss' rose from 19 to 2.4e+13",
    )
    assert first_seen(lambda s, w: {"loss": math.nan}) == (2, "the loss was NaN or Inf from the beginning")


def test_one_worker_that_is_broken_is_not_the_run() -> None:
    for broken in (1e9, math.nan):
        assert first_seen(lambda s, w, b=broken: {"loss": b if w == 2 and s > 5 else falling(s)}) is None


def test_workers_that_ended_do_not_vote() -> None:
    found = Divergence()
    for step in range(200):
        for worker in range(4):
            if worker < 2 or step < 20:
                found.logged(worker, {"loss": 2.3 if step < 20 else 1e9}, step)
    assert found.seen is not None


def test_rewards_and_parts_of_a_loss_may_rise() -> None:
    """REINFORCE's loss grows with the returns; a critic's and a generator's rise in runs that learn."""

    def learns(step: int, worker: int) -> Mapping[str, float]:
        returns = 20 + 480 * step / STEPS
        return {"loss": returns**2, "reward": returns, "critic_loss": 1e-3 + returns**2, "episode": step}

    assert first_seen(learns) is None
    assert (
        first_seen(lambda s, w: {"g_loss": 0.7 + s**2, "d_loss": 0.1, "kl": 1e3 * s, "grad_norm": 1e9 * s})
        is None
    )
    # Without a reward that gets better, and with NaN, it is divergence.
    assert first_seen(lambda s, w: {"loss": 1.3**s, "reward": 20.0}) is not None
    assert first_seen(lambda s, w: {"loss": 2.0, "critic_loss": math.nan if s > 50 else 1.0}) is not None
    assert first_seen(lambda s, w: {"loss": 2.0, "reward": math.nan}) is None


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("loss", 1),
        ("train_loss", 1),
        ("Loss/train", 1),
        ("val.loss", 1),
        ("mse", 1),
        ("lossless", 0),
        ("reward", 0),
    ],
)
def test_which_metrics_are_losses(name: str, loss: int) -> None:
    assert is_loss(name) == bool(loss)


# --- without losses ---------------------------------------------------------------------------------------


def test_norms_alone_are_enough() -> None:
    def at(growth: float, noise: float) -> int | None:
        found, rng = Divergence(), random.Random(0)
        for step in range(200):
            for worker in range(4):
                found.norm(worker, growth ** min(step, 100) * rng.lognormvariate(0, noise), 4 * step)
            if found.seen is not None:
                assert found.seen.startswith("the norm of the gradients rose from ")
                assert found.outcome == found.seen and found.good_version < 4 * step
                return step
        return None

    assert at(1.0, 1.0) is None
    assert at(1.02, 1.0) is None  # sevenfold in a hundred steps: norms do
    assert at(1.5, 0.5) is not None and at(1.5, 0.5) < 45  # type: ignore[operator]
    assert at(10, 0) is not None and at(10, 0) < 14  # type: ignore[operator]


def test_norms_say_nothing_where_there_is_a_loss() -> None:
    found = Divergence()
    for step in range(100):
        found.logged(0, {"loss": 1.0}, step)
        found.norm(0, 10.0**step, step)
    assert found.seen is None and found.good_version == 99


def test_pushes_that_are_refused() -> None:
    found = Divergence()
    found.pushes(100, 0)
    found.pushes(0, 10)
    assert found.seen is None
    found.pushes(0, 90)
    assert found.seen == "nearly all pushes hold NaN or Inf, and are refused" == found.outcome
    found.pushes(50, 50)
    assert found.seen is None  # one of two workers is broken


# --- going back, and going on -------------------------------------------------------------------------------


def test_the_good_version_is_the_last_before_the_rise() -> None:
    found = Divergence(version=40)
    assert found.good_version == 40
    for step in range(41, 200):
        found.logged(0, {"loss": 19.0 if step <= 100 else 19 * 1.2 ** (step - 100)}, step)
        if found.seen:
            break
    assert 100 <= found.good_version <= 107  # 1.2 ** 6 is not yet thrice
    found.restart(90)
    assert found.seen is None and found.good_version == 90
    found.logged(0, {"loss": 1e9}, 95)
    assert found.good_version == 90 and found.first == {"loss": 19.0}  # what is usual is still known


def test_a_resumed_run_is_judged_by_its_beginning() -> None:
    """Near the end losses are small, and ten times as much is nothing."""
    found = Divergence()
    for step in range(5):
        found.logged(0, {"loss": 19.0}, step)
    again = Divergence(found.first, version=1000)
    for step in range(50):
        again.logged(0, {"loss": 1e-3 if step < 10 else 0.1}, 1000 + step)
    assert again.seen is None and again.outcome is None
    for step in range(3):
        again.logged(0, {"loss": 1e6}, 1100 + step)
    assert again.seen == "the loss rose from 19 to 1e+06"


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [
        ([19, 2.4e33], True),
        ([19, math.nan], True),
        ([19, 400, 1e5], True),
        ([19] * 10 + [250] * 3, True),
        ([19] * 10 + [250], False),
        ([19, 30], False),
        ([19], False),
        ([19] * 5 + [1e9] * 20 + [3] * 3, False),
        ([], False),
        ([0.0, 0.0, 0.0], False),
        ([-3, -4, -5], False),
    ],
)
def test_the_outcome_compares_the_last_losses_with_the_first(losses: list[float], diverged: bool) -> None:
    found = Divergence()
    for step, loss in enumerate(losses):
        for worker in range(2):
            found.logged(worker, {"loss": loss}, step)
    assert (found.outcome is not None) == diverged


# --- properties ---------------------------------------------------------------------------------------------

positive = st.floats(0.1, 1.0)


@given(st.lists(positive, min_size=1, max_size=60), st.integers(1, 5), st.integers(-20, 20))
def test_no_alarm_within_ten_times_the_first_and_units_do_not_matter(ratios, workers, power):
    found = Divergence()
    for step, ratio in enumerate([1.0] * 3 + ratios):
        for worker in range(workers):
            found.logged(worker, {"loss": 9.9 * ratio * 2.0**power if step > 2 else 2.0**power}, step)
            assert found.seen is None
    assert found.outcome is None


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60), st.integers(1, 4))
def test_whatever_came_before_nan_from_all_is_divergence(values, workers):
    found = Divergence()
    for step, value in enumerate(values):
        found.logged(step % workers, {"loss": value}, step)
        found.seen, found.outcome  # noqa: B018 - never an exception
    assert 0 <= found.good_version <= max(0, len(values) - 1)
    for step in range(3):
        for worker in range(workers):
            found.logged(worker, {"loss": math.nan}, 1000 + step)
    assert found.seen is not None and found.outcome is not None
    assert found.good_version < 1000


@given(st.floats(1.1, 50), st.floats(1e-6, 1e6), st.integers(1, 8))
def test_what_grows_without_end_is_seen_long_before_it_overflows(growth, begin, workers):
    found = Divergence()
    for step in range(400):
        loss = begin * growth**step
        for worker in range(workers):
            found.logged(worker, {"loss": loss}, step)
        if found.seen is not None:
            break
    assert growth**step < 1.01 * min(1e4 * growth**5, 100 * growth**8, 10 * growth**17)


# --- words --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "staleness", "has", "lacks"),
    [
        (
            "asp+damping=none",
            3.1,
            ["--damping momentum", "ssp:1 or bsp", "--guard", "fewer workers"],
            ["clip"],
        ),
        ("asp", 3.1, ["3.1 updates late", "ssp:1 or bsp"], ["--damping"]),
        ("asp", None, ["With 4 workers in asp gradients are applied late: "], ["average"]),
        ("bsp", None, ["The learning rate is the likely cause"], ["late"]),
        ("ssp:1", 2.0, ["wait more (bsp)"], ["ssp:1 or"]),
        ("bsp", 0.0, ["The learning rate is the likely cause: lower", "clip"], ["guard", "workers in"]),
        ("local:8", 0.0, ["exchange more often", "learning rate"], ["wait more"]),
        ("downpour:4,4", 3.0, ["exchange more often", "fewer workers"], ["wait more"]),
        ("hogwild", 0.0, ["4 workers write at once", "lower the learning rate"], ["late on average"]),
    ],
)
def test_the_cause_and_the_knobs_are_named(
    mode: str, staleness: float | None, has: list[str], lacks: list[str]
) -> None:
    text = explained("the loss rose from 19 to 1e+06", parse_mode(mode), workers=4, staleness=staleness)
    assert text.startswith("The run diverged: the loss rose from 19 to 1e+06. ") and text.endswith(".")
    for part in has:
        assert part in text, text
    for part in lacks:
        assert part not in text, text
    guarded = explained("it", parse_mode(mode), workers=4, staleness=staleness, guarded=True)
    assert "--guard" not in guarded


def test_a_run_that_was_never_a_number_is_not_blamed_on_its_rate() -> None:
    text = explained("the loss was NaN or Inf from the beginning", parse_mode("asp"), workers=4, staleness=3)
    assert "learning rate" not in text and "Look in the data" in text
