"""The statistics of benchmarks.worktrees, with made-up times."""

import math
import random
from dataclasses import asdict

import pytest

from benchmarks.worktrees import CASES, LIMIT, Measured, interval, pairs, row, table
from tests.speed import first


def blocks(ratio: float, noise: float, number: int, seed: int) -> tuple[list[float], list[float]]:
    """Medians of paired blocks: the machine's speed drifts by a third, and both sides of a pair have it."""
    draw = random.Random(seed)
    old, new = [], []
    for i in range(number):
        speed = 1 + math.sin(i) / 3
        old.append(speed * math.exp(draw.gauss(0, noise)))
        new.append(speed * ratio * math.exp(draw.gauss(0, noise)))
    return old, new


def test_a_ratio_without_noise_is_exact() -> None:
    found = interval([1.0, 2.0, 3.0], [1.1, 2.2, 3.3])
    assert found.ratio == pytest.approx(1.1)
    assert found.low == pytest.approx(1.1) and found.high == pytest.approx(1.1)
    assert found.pairs == 3


def test_drift_of_the_machine_cancels_out() -> None:
    found = interval(*blocks(1.0, 0.005, 20, seed=1))
    assert found.low < 1 < found.high
    assert found.high - found.low < 0.02  # blocks differ by a third


@pytest.mark.parametrize("ratio", first(1, [1.0, 0.9, 1.05]))
def test_the_interval_covers_the_true_ratio_about_19_times_in_20(ratio: float) -> None:
    found = [interval(*blocks(ratio, 0.03, 20, seed=seed), seed=seed) for seed in range(60)]
    covering = sum(each.low <= ratio <= each.high for each in found)
    assert 50 <= covering <= 60, covering


def test_the_same_blocks_give_the_same_interval() -> None:
    old, new = blocks(1.02, 0.02, 10, seed=3)
    assert interval(old, new) == interval(old, new)
    turned = interval(new, old)
    assert turned.ratio == pytest.approx(1 / interval(old, new).ratio)


def test_a_case_is_ok_if_the_whole_interval_is_below_the_limit() -> None:
    case = CASES[0]
    equal = row(case, *blocks(1.0, 0.002, 10, seed=1))
    slower = row(case, *blocks(1.1, 0.002, 10, seed=1))
    unclear = row(case, *blocks(1.0, 0.2, 4, seed=1))
    assert (equal.ok, slower.ok, unclear.ok) == (True, False, False)
    assert unclear.new_over_old.low < 1 < LIMIT < unclear.new_over_old.high
    # As in the other benchmarks: above 1 is better, lower milliseconds are.
    assert slower.ratio is not None and slower.ratio < 1 and slower.better == "lower"
    written = asdict(slower)
    assert {"case", "ours", "peer", "unit", "ratio", "target", "ok", "note"} < set(written)
    assert set(written["new_over_old"]) == {"ratio", "low", "high", "pairs"}
    lines = table([equal, slower]).splitlines()
    assert lines[1].endswith("ok") and lines[2].endswith("not below 1.03")


def test_blocks_take_turns() -> None:
    order: list[str] = []

    def side(name: str) -> list[float]:
        order.append(name)
        return [1.0]

    case = Measured(name="exchange/x", call="", rounds=1)
    found = pairs(case, 3, lambda: side("old"), lambda: side("new"))
    assert order == ["old", "new", "new", "old", "old", "new"]
    assert found == {"old": [[1.0]] * 3, "new": [[1.0]] * 3}


def test_programs_of_all_cases_compile() -> None:
    for case in CASES:
        compile(case.call.format(rounds=case.rounds), case.name, "eval")
