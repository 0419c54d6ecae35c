"""The switch of the protection benchmark: off unless somebody throws it, and then not for good."""

import math

import pytest
import torch
from torch import nn

from paceline.comm import protection as module
from paceline.comm.protection import Protection
from paceline.plan import Job, make_plan
from paceline.worker.steppers.gradient_memory import GradientMemory


def test_nothing_rests_unless_asked_for():
    always = Protection(0)
    for step in range(100):
        always.begin_step(step)
        assert not always.resting
    assert module.protection.blocks == 0  # nobody set it here


def test_blocks_take_turns():
    turns = Protection(3)
    seen = []
    for step in range(9):
        turns.begin_step(step)
        seen.append(turns.resting)
    assert seen == [False] * 3 + [True] * 3 + [False] * 3


@pytest.mark.parametrize("resting", [False, True])
def test_a_worker_sees_nan_unless_it_rests(monkeypatch, resting):
    monkeypatch.setattr(module.protection, "resting", resting)
    parameter = nn.Parameter(torch.zeros(4))
    memory = GradientMemory([parameter], [torch.zeros(4)])
    (parameter * math.nan).sum().backward()
    assert memory.collect() == ([], resting)


def test_a_plan_warns_of_it(monkeypatch, tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    assert not any(module.BLOCKS in warning for warning in make_plan(Job(script=str(script))).warnings)
    monkeypatch.setattr(module.protection, "blocks", 10)
    assert any("PACELINE_PROTECTION_BLOCKS is set" in w for w in make_plan(Job(script=str(script))).warnings)
