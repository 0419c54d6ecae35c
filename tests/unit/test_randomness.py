"""Every worker draws random numbers of its own; worker 0 of a new run draws the script's."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from paceline.worker.randomness import Apart, derive, part_generator, part_ways


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    """Other tests' random numbers stay as they were."""
    python, numpy_ = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    np.random.set_state(numpy_)


def draw() -> list[float]:
    return [float(torch.rand(())), float(np.random.rand()), random.random()]


def drawn(rank: int, *, version: int = 0, seed: int = 0, script: int = 5) -> list[float]:
    """What a worker draws after prepare() in a script that seeds everything."""
    torch.manual_seed(script)
    np.random.seed(script)
    random.seed(script)
    part_ways(seed, rank, version)
    return draw()


def test_streams_differ_by_seed_worker_script_and_the_update_at_which_it_joined():
    each = [
        drawn(0),
        drawn(1),
        drawn(2),
        drawn(1, seed=1),
        drawn(1, script=6),
        drawn(1, version=7),
        drawn(0, version=7),
    ]
    for values in zip(*each, strict=True):
        assert len(set(values)) == len(each)
    assert drawn(1) == drawn(1), "not repeatable"


def test_worker_0_of_a_new_run_draws_what_the_script_would():
    plain = torch.rand((), generator=torch.Generator().manual_seed(5))
    expected = [float(plain), float(np.random.RandomState(5).rand()), random.Random(5).random()]
    assert drawn(0) == drawn(0, seed=9) == expected


def test_a_loaders_generator_differs_too_and_the_scripts_own_is_left_alone():
    mine = torch.Generator().manual_seed(3)
    before = mine.get_state()
    assert part_generator(mine, 0, 0, 0) is mine
    assert part_generator(None, 0, 1, 0) is None
    others = [part_generator(mine, 0, rank, 0).initial_seed() for rank in (1, 2)]
    assert len({3, *others}) == 3
    assert torch.equal(mine.get_state(), before)


def test_what_is_drawn_apart_goes_on_and_leaves_the_scripts_numbers_alone():
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    expected = [draw() for _ in range(3)]
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    here, there = Apart(42), Apart(42)
    found, apart = [], []
    for _ in range(3):
        found.append(draw())
        with here:
            apart.append(draw())
    assert found == expected
    with there:
        assert [draw() for _ in range(3)] == apart
    assert len({value for values in apart for value in values}) == 9


def test_seeds_are_what_torch_takes():
    seeds = {derive(b"state", 2**64, rank, 10**9) for rank in range(1000)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
