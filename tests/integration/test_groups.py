"""Workers in groups: `allreduce`, and `hybrid:MODE` with a mode between the groups."""

import json
from typing import Any

import pytest
import torch

from tests.integration.test_equivalence import (
    SOURCE,
    assert_close,
    assert_same_bits,
    one_thread,  # noqa: F401 - used by every test
    plain,
    with_state,
)


def go(run: Any, mode: str, *, workers: int, job: dict[str, Any] | None = None, **options: Any) -> Any:
    settings = {"mode": mode, "servers": 1, "threads": 1, **(job or {})}
    ran = run(SOURCE, workers=workers, args=(json.dumps({"single": True, **options}),), **settings)
    assert ran.error is None
    return ran


# --- allreduce and one process -------------------------------------------------------------------------


@pytest.mark.parametrize("workers, shuffle", [(2, False), (3, True)], ids=["2-in-order", "3-shuffled"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_allreduce_equals_one_process_with_the_joint_batch(run, optimizer, workers, shuffle):
    """55 steps, a short last row in every epoch: to 1e-10 (float64); and bsp, to the bit."""
    options = {"optimizer": optimizer, "batch": 12 // workers, "shuffle": shuffle}
    ran = go(run, "allreduce", workers=workers, **options)
    sizes = [ran.results()[rank]["sizes"] for rank in range(workers)]
    assert all(len(s) == 55 for s in sizes) and sum(map(sum, sizes)) == 5 * 125
    assert_close(ran.model, plain(optimizer, batch=12, shuffle=shuffle)[0])
    assert ran.status.samples == 5 * 125
    bsp = go(run, "bsp", workers=workers, **options)
    assert_same_bits(with_state(ran), with_state(bsp))


def test_allreduce_over_tcp_equals_one_process(run):
    """gloo's ring sums in its own order."""
    ran = go(run, "allreduce", workers=3, optimizer="adam", batch=4, job={"link": "tcp"})
    assert_close(ran.model, plain("adam", batch=12)[0])
    assert ran.status.samples == 5 * 125


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_a_row_with_fewer_samples_than_workers_still_equals_one_process(run, link):
    """61 = 5 · 12 + 1: worker 0 has the last sample; the others step with it, and count for nothing."""
    options = {"optimizer": "momentum", "batch": 4, "samples": 61, "epochs": 4}
    ran = go(run, "allreduce", workers=3, **options, job={"link": link})
    assert [len(ran.results()[r]["sizes"]) for r in range(3)] == [24, 24, 24]
    assert ran.status.samples == 4 * 61
    assert [(a["applied"], a["unused"]) for a in ran.status.leases[:4]] == [(61, 0)] * 4
    assert_close(ran.model, plain("momentum", batch=12, samples=61, epochs=4)[0])
    if link == "shm":
        bsp = go(run, "bsp", workers=3, **options)
        assert_same_bits(with_state(ran), with_state(bsp))


def test_a_model_of_many_slices_and_dtypes_is_averaged_to_the_bit(run):
    options = {"optimizer": "adamw", "hidden": 700, "samples": 33, "epochs": 2, "batch": 6}
    ran = go(run, "allreduce", workers=2, **options)
    bsp = go(run, "bsp", workers=2, **options)
    assert_same_bits(with_state(ran), with_state(bsp))


# --- hybrid ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("inner", ["bsp", "asp"])
def test_hybrid_with_one_group_is_allreduce_to_the_bit(run, inner, optimizer):
    options = {"optimizer": optimizer, "batch": 6, "epochs": 3, "shuffle": True}
    alone = go(run, "allreduce", workers=2, **options)
    grouped = go(run, f"hybrid:{inner}", workers=2, **options)
    assert_same_bits(with_state(grouped), with_state(alone))


@pytest.mark.parametrize("workers, groups, link", [(4, 2, "shm"), (3, 2, "tcp"), (3, 3, "shm")])
def test_hybrid_bsp_equals_bsp(run, workers, groups, link):
    options = {"optimizer": "adam", "batch": 3, "epochs": 3, "shuffle": True, "samples": 61}
    job = {"link": link, "servers": 2}
    grouped = go(run, "hybrid:bsp", workers=workers, **options, job={**job, "groups": groups})
    single = go(run, "bsp", workers=workers, **options, job=job)
    assert_close(grouped.model, single.model)
    assert grouped.status.samples == single.status.samples == 3 * 61
