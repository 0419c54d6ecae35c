"""Faults on purpose: they happen where and when they were asked for, and the run takes them."""

import itertools
import re
from pathlib import Path

import psutil
import pytest
import torch

from paceline.comm.faults import FAULTS, OF_FRAMES
from paceline.observe.analyse.run_data import RunData
from tests.integration.test_faults import TOOLS, assert_every_sample_once
from tests.speed import first

# Steps take a while, so that in asp every worker makes some.
SOURCE = TOOLS + "import time; train(prepared(samples=96), epochs=3, at_step=lambda step: time.sleep(0.005))"
ROLES = ("worker", "server")
JOB = {"workers": 2, "servers": 2, "threads": 1}


def assert_all_applied(ran, samples=96, epochs=3):
    assert ran.error is None, ran.error
    assert ran.status.samples == samples * epochs
    assert [a["applied"] for a in ran.status.leases[:epochs]] == [samples] * epochs


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_a_worker_dies_at_its_step(run, monkeypatch, mode):
    monkeypatch.setenv(FAULTS, "kill worker:1@4")
    ran = run(SOURCE, mode=mode, **JOB)
    assert_all_applied(ran)
    assert ran.status.workers[1].restarts == 1 and ran.status.workers[0].restarts == 0


def test_a_server_dies_at_its_update(run, monkeypatch):
    source = """
import time
def saved():
    events = RUN_DIR / "events.jsonl"
    return events.exists() and '"kind": "checkpoint"' in events.read_text()
def fate(step):
    while step == 6 and not saved():  # there is to be something to go back to
        time.sleep(0.002)
train(prepared(), epochs=3, at_step=fate)
"""
    undisturbed = run(TOOLS + source, mode="bsp", checkpoint_every=4, **JOB)
    monkeypatch.setenv(FAULTS, "kill server:1@7")
    ran = run(TOOLS + source, mode="bsp", checkpoint_every=4, **JOB)
    assert_every_sample_once(ran, epochs=3)
    assert "went back to checkpoint version-000000000004" in ran.status.messages[0]
    assert ran.status.lost_updates in (2, 3)  # the seventh was under way
    for name, value in undisturbed.model.items():
        assert torch.equal(ran.model[name], value), name


def test_who_is_stopped_goes_on_when_it_is_woken(run, monkeypatch):
    monkeypatch.setenv(FAULTS, "stop worker:1@3:0.3s")
    ran = run(SOURCE, mode="bsp", **JOB)
    assert_all_applied(ran)
    assert ran.status.restarts == 0 and ran.status.messages == []
    spans = RunData(ran.run.path).spans
    assert spans[(spans.role == "worker") & (spans["rank"] == 1)].ns.max() > 0.25e9  # it was stopped


DAMAGES = [
    ("flip", "worker:1@5", "asp", "tcp"),
    ("drop", "server:0@5", "bsp", "shm"),
    *itertools.product(OF_FRAMES, ["worker:1@5", "worker:1@6", "server:0@5"], ["bsp", "asp"], ["shm", "tcp"]),
]


@pytest.mark.parametrize(("damage", "whose", "mode", "link"), first(2, DAMAGES))
def test_a_frame_that_is_damaged_or_lost_comes_again_and_nobody_is_replaced(
    run, monkeypatch, damage, whose, mode, link
):
    """Nothing of it is applied, and nothing twice: the link goes on over another socket."""
    monkeypatch.setenv(FAULTS, f"{damage} {whose}")
    ran = run(SOURCE, mode=mode, link=link, **JOB)
    assert_all_applied(ran)
    assert ran.status.restarts == 0 and ran.status.messages == []
    assert "is back over another socket" in ran.log("server", 0) + ran.log("server", 1)


@pytest.mark.slow
@pytest.mark.parametrize("link", first(1, ["tcp", "shm"]))
def test_with_a_tenth_of_all_frames_lost_doubled_or_out_of_order_bsp_is_bitwise_the_same(
    run, monkeypatch, link
):
    undisturbed = run(SOURCE, mode="bsp", link=link, **JOB)
    faults = [f"{kind} {role}:*@1-1000:10%" for kind in ("drop", "duplicate", "reorder") for role in ROLES]
    monkeypatch.setenv(FAULTS, "; ".join(faults))
    ran = run(SOURCE, mode="bsp", link=link, **JOB)
    assert_all_applied(ran)
    assert ran.status.restarts == 0
    assert (ran.log("server", 0) + ran.log("server", 1)).count("is back over another socket") > 10
    assert all(torch.equal(ran.model[name], value) for name, value in undisturbed.model.items())


def test_a_huge_gradient_is_applied_and_a_nan_is_not(run, monkeypatch):
    monkeypatch.setenv(FAULTS, "nan worker:0@2-3; huge worker:0@5")
    ran = run(SOURCE, workers=1, mode="bsp", threads=1)
    assert ran.error is None and ran.status.refused == 2
    plain = run(SOURCE, workers=1, mode="bsp", threads=1)
    assert all(bool(t.isfinite().all()) for t in ran.model.values())
    assert plain.model  # it has the faults as well: they are the environment's
    monkeypatch.delenv(FAULTS)
    assert any(not torch.equal(ran.model[k], v) for k, v in run(SOURCE, workers=1, threads=1).model.items())


def test_a_bound_on_norms_refuses_huge_gradients_and_replaces_who_sends_them(run, monkeypatch):
    monkeypatch.setenv(FAULTS, "huge worker:1@15-1000")
    ran = run(TOOLS + "train(prepared(samples=480), epochs=1)", mode="bsp", norm_bound=100, **JOB)
    refused = ran.status.refused  # it goes on until it is killed
    assert ran.error is None and 5 <= refused < 20
    assert ran.status.workers[1].restarts == 1
    assert "worker:1 pushed NaN or Inf, or more than --norm-bound, 5 times in a row" in ran.status.messages[0]
    assert (ran.status.leases[0]["applied"], ran.status.leases[0]["refused"]) == (
        480 - 4 * refused,
        4 * refused,
    )
    assert all(float(t.abs().max()) < 100 for t in ran.model.values())


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(run, monkeypatch):
    def watch(status, lines, engine):
        if status.messages and len(status.checkpoints) > 1:
            (Path(status.run_dir) / "enough").touch()

    source = """
model, optimizer, loader = prepared(samples=96)
for _, batches in until_enough(loader):
    train((model, optimizer, batches), epochs=1)
"""
    monkeypatch.setenv(FAULTS, "full server:1@2; slowdisk server:0@1:1ms")
    ran = run(TOOLS + source, mode="bsp", checkpoint_every=4, keep_checkpoints=1000, watch=watch, **JOB)
    assert ran.error is None and ran.status.samples == 96 * ran.status.leases[-1]["epoch"]
    (said,) = ran.status.messages
    assert said.startswith("a checkpoint failed: cannot write") and "No space left on device. Free" in said
    assert ran.status.restarts == 0 and ran.status.lost_updates == 0
    (failed,) = re.findall(r"version-\d+", said)
    assert failed not in ran.status.checkpoints and ran.status.checkpoints[0] == "version-000000000004"
    assert not list(ran.run.checkpoints_path.glob(".version*"))


def test_a_slow_worker_is_a_straggler(run, monkeypatch):
    from paceline.observe.analyse.facts import facts_of

    monkeypatch.setenv(FAULTS, "slow worker:1@1-1000:20ms")
    ran = run(SOURCE, mode="bsp", **JOB)
    assert_all_applied(ran)
    slowest, factor = facts_of(RunData(ran.run.path)).straggler
    assert slowest.rank == 1 and factor > 2


def test_a_text_that_means_nothing_ends_the_run_before_it_begins(run, monkeypatch):
    from paceline.exceptions import UsageError

    before = {p.pid for p in psutil.Process().children(recursive=True)}
    monkeypatch.setenv(FAULTS, "kill everybody")
    with pytest.raises(UsageError, match="'kill everybody' is not a fault"):
        run(SOURCE, mode="bsp", **JOB)
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= before
