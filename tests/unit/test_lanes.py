"""Lanes: every slice once, without grad, on cores apart; and torch's threads that rest."""

import os
import threading

import psutil
import pytest
import torch
from torch import nn

from paceline.params import OptimizerSpec, describe
from paceline.ps.lanes import Lanes
from paceline.ps.shard import Contribution, Gradients, Shard
from paceline.worker.exchange.openmp import make_rest, no_rest


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("number", [0, 1, 3, 200])
def test_every_piece_of_work_is_done_once_and_without_grad(count, number):
    lanes, done = Lanes(count), []
    try:
        for _ in range(3):
            lanes.each(number, lambda i: done.append((i, torch.is_grad_enabled())))
    finally:
        lanes.close()
    assert torch.is_grad_enabled()
    assert sorted(done) == sorted([(i, False) for i in range(number)] * 3)


def test_an_error_in_another_lane_is_raised_when_all_are_done():
    lanes, main, done = Lanes(2), threading.current_thread(), threading.Event()

    def work(i: int) -> None:
        if threading.current_thread() is main:
            assert done.wait(10)  # the other lane has had its turn
            return
        done.set()
        raise ValueError(f"slice {i}")

    try:
        with pytest.raises(ValueError, match="slice"):
            lanes.each(2, work)
    finally:
        lanes.close()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads have no cores of their own here")
def test_other_lanes_keep_off_the_caller_s_core():
    available = os.sched_getaffinity(0)
    if len(available) < 2:
        pytest.skip("one core")
    lanes, seen = Lanes(2), {}
    both = threading.Barrier(2)

    def work(_: int) -> None:
        both.wait(10)  # so that each takes one
        seen[threading.get_native_id()] = os.sched_getaffinity(0)

    try:
        lanes.each(2, work)  # begins the other thread
        seen.clear()
        lanes.each(2, work)
        assert seen.pop(threading.get_native_id()) == available
        (other,) = seen.values()
        assert len(other) == len(available) - 1
    finally:
        lanes.close()


def updated(count: int, workers: int) -> torch.Tensor:
    """The bytes of a model of 6 MB after three updates by so many lanes."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(500, 500) for _ in range(6))
    optimizer = torch.optim.SGD([{"params": layer.parameters()} for layer in layers], lr=0.1, momentum=0.9)
    layout, _ = describe(layers, optimizer, servers=1)
    base = torch.randn(layout.nbytes // 4).view(torch.uint8)
    shard = Shard(layout, OptimizerSpec.of(optimizer), layout.slices, base, lanes=count)
    try:
        for step in range(3):
            slots = [torch.randn(layout.nbytes // 4).view(torch.uint8) for _ in range(workers)]
            pushed = [Gradients(slot, layout, layout.slices) for slot in slots]
            missing = frozenset({step})  # so that views of means are made anew now and then
            shard.update([Contribution(i, g, missing=missing) for i, g in enumerate(pushed)], None)
    finally:
        shard.close()
    return base


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_an_update_is_the_same_with_any_number_of_lanes(workers):
    assert torch.equal(updated(1, workers), updated(4, workers))


def test_only_a_long_wait_of_few_threads_lets_them_go():
    assert make_rest(1 << 30, 1) is no_rest
    assert make_rest(1 << 30, 64) is no_rest
    assert make_rest(1 << 10, 2) is no_rest


def test_results_are_the_same_after_a_rest():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        rest = make_rest(1 << 30, 2)
        if rest is no_rest:
            pytest.skip("torch has another OpenMP here")
        a = torch.randn(1 << 20)
        before = a.mul(2).sum()
        for _ in range(3):
            threads_before = psutil.Process().num_threads()
            rest()
            assert psutil.Process().num_threads() == threads_before - 1
            assert torch.get_num_threads() == 2
            assert torch.equal(a.mul(2).sum(), before)
    finally:
        torch.set_num_threads(threads)
