"""gather, mean, broadcast and barrier in real runs: every mode, replaced workers, scripts that part ways."""

import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.integration.test_scaling import Scaling
from tests.speed import first

MODES = [
    *("bsp", "asp", "allreduce", "ssp:1", "backup:1", "local:2", "easgd:2", "hogwild", "dogwild"),
    *("hybrid:asp", "downpour:2", "sandblaster", "diloco:2"),
]

TRAIN = """
torch.manual_seed(7)
data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(data, batch_size=2))

def train_one_epoch():
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
"""

SOURCE = (
    TRAIN
    + """
found = []
name = paceline.broadcast(f"from {RANK}")
for epoch in range(3):
    train_one_epoch()
    found.append(paceline.gather([RANK, epoch]))
    found.append(paceline.mean({"a": [RANK]}, weight=RANK + 1)["a"][0])
    paceline.barrier()
found.append(paceline.broadcast(RANK, source=1))
result([name, *found])
"""
)


@pytest.mark.parametrize("mode", first(3, MODES))
def test_all_workers_get_all_values_in_every_mode(run, mode):
    ran = run(SOURCE, workers=3, mode=mode, threads=1)
    assert ran.error is None, ran.error
    expected: list = ["from 0"]
    for epoch in range(3):
        expected += [[[rank, epoch] for rank in range(3)], (1 * 2 + 2 * 3) / 6]
    assert ran.results() == {rank: [*expected, 1] for rank in range(3)}
    assert not [text for text in ran.status.messages if "answered without" in text]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"overlap": True, "link": "tcp"}, {"prefetch": 2, "mode": "asp"}])
def test_calls_pass_leases_that_were_asked_for_ahead(run, settings):
    ran = run(SOURCE, workers=3, threads=1, **settings)
    assert ran.error is None, ran.error
    assert len({str(each) for each in ran.results().values()}) == 1


@pytest.mark.parametrize("mode", first(1, ["asp", "bsp"]))
def test_a_worker_that_dies_is_not_waited_for_and_its_successor_takes_part(run, mode):
    source = (
        TRAIN
        + """
marker, found = RUN_DIR / "died", []
for epoch, batches in until_enough(loader):
    steps = 0
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        steps += 1
    if epoch == 1 and RANK == 1 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    found.append(len(paceline.gather(RANK)))
    if RANK == 1 and steps and marker.exists() and found[-1] == 2:
        (RUN_DIR / "enough").touch()
result(found)
"""
    )
    ran = run(source, workers=2, mode=mode, threads=1)
    assert ran.error is None, ran.error
    assert ran.status.restarts == 1
    survivor, successor = ran.results()[0], ran.results()[1]
    assert survivor[0] == 2 and 2 in successor


def test_a_script_whose_workers_part_ways_is_told_so(run):
    """In bsp the other worker waits for a step, so the caller goes on, and the run says so."""
    source = (
        TRAIN
        + """
if paceline.is_main():
    result(paceline.gather("alone"))
train_one_epoch()
"""
    )
    ran = run(source, workers=2, threads=1)
    assert ran.error is None, ran.error
    assert ran.results() == {0: ["alone"]}
    (said,) = [text for text in ran.status.messages if "answered without" in text]
    assert "gather() at script0.py:" in said and "worker:1" in said


@pytest.mark.slow
def test_in_asp_a_call_that_others_never_make_ends_the_run_at_the_deadline(run):
    source = (
        TRAIN
        + """
import time
if paceline.is_main():
    paceline.gather("alone")
for _ in range(200):
    train_one_epoch()
    time.sleep(0.05)
"""
    )
    ran = run(source, workers=2, mode="asp", threads=1, deadline_s=2.0)
    assert ran.error is not None and "UsageError" in ran.error
    assert "paceline.gather() at script0.py:" in ran.error and "worker:1, which went on training" in ran.error


@pytest.mark.slow
def test_a_lead_that_dies_loses_no_call(run):
    source = (
        TRAIN
        + """
found = []
for epoch in range(6):
    train_one_epoch()
    found.append(paceline.gather([RANK, epoch]))
    if epoch == 2 and RANK == 0:
        (RUN_DIR / "kill").touch()
result(found)
"""
    )
    killed = []

    def kill_the_lead(status, lines, engine):
        if not killed and (Path(status.run_dir) / "kill").exists():
            killed.append(engine.pids()["server:0"])
            os.kill(killed[0], signal.SIGKILL)

    ran = run(source, workers=2, servers=2, replicas=1, threads=1, watch=kill_the_lead)
    assert ran.error is None, ran.error
    assert ran.results() == {rank: [[[0, epoch], [1, epoch]] for epoch in range(6)] for rank in range(2)}


VALIDATED = (
    TRAIN
    + """
held_out = TensorDataset(torch.arange(23))
CHOICE
passes = []
for epoch in range(3):
    train_one_epoch()
    for _ in range(2):
        mine = [i for (batch,) in validation for i in batch.tolist()]
        mean = paceline.mean(sum(mine) / len(mine), weight=len(mine))
        passes.append([mine, paceline.gather(len(mine)), mean])
result([passes, isinstance(loader, DataLoader), isinstance(validation, DataLoader)])
"""
)
DIVIDED = "validation = paceline.prepare_validation(DataLoader(held_out, batch_size=4))"


@pytest.mark.parametrize("mode", first(1, ["bsp", "asp", "allreduce"]))
def test_validation_data_is_divided_and_training_does_not_notice(run, mode):
    ran = run(VALIDATED.replace("CHOICE", DIVIDED), workers=3, mode=mode, threads=1)
    assert ran.error is None, ran.error
    results = ran.results()
    for i in range(6):
        parts = [results[rank][0][i] for rank in range(3)]
        assert [sample for mine, _, _ in parts for sample in mine] == list(range(23))
        assert all((counts, mean) == ([7, 8, 8], 11.0) for _, counts, mean in parts)
    assert all(each[1:] == [True, True] for each in results.values())
    if mode == "bsp":
        whole = "validation = DataLoader(held_out, batch_size=4)"
        other = run(VALIDATED.replace("CHOICE", whole), workers=3, mode=mode, threads=1)
        assert other.error is None, other.error
        assert all(torch.equal(ran.model[name], value) for name, value in other.model.items())


SCALED = (
    TRAIN
    + """
import time
validation = paceline.prepare_validation(DataLoader(TensorDataset(torch.arange(23)), batch_size=4))
passes = []
for epoch, batches in until_enough(loader):
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        time.sleep(0.01)
        optimizer.step()
    mine = [i for (batch,) in validation for i in batch.tolist()]
    passes.append(paceline.gather(mine))
result(passes)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_parts_make_up_the_whole_while_workers_come_and_go(run, mode):
    ran = run(SCALED, workers=2, mode=mode, threads=1, watch=Scaling(3, 2))
    assert ran.error is None, ran.error
    passes = ran.results()[0]
    sizes = [len(parts) for parts in passes]
    assert sizes[0] == 2 and 3 in sizes
    # A worker that joins or leaves between the start of a pass and its end is in one of the two only.
    whole = [[i for part in parts for i in part] == list(range(23)) for parts in passes]
    assert whole.count(False) <= 2, passes
    assert all(ok for ok, (before, size) in zip(whole[1:], pairwise(sizes), strict=True) if before == size)


@pytest.mark.slow
def test_after_a_resume_all_workers_take_part_from_the_start(run):
    source = (
        TRAIN
        + """
name = paceline.broadcast(os.urandom(8).hex())
result([name])
for epoch in range(4):
    train_one_epoch()
    counted = paceline.gather(epoch)
result([name, counted])
"""
    )
    stopped = run(source, workers=2, threads=1, max_updates=9)
    assert stopped.error is None, stopped.error
    names = {each[0] for each in stopped.results().values()}
    ran = run(source, workers=2, threads=1, resume=stopped)
    assert ran.error is None, ran.error
    first_, second = ran.results().values()
    assert first_ == second and first_[1] == [3, 3]
    assert len(names) == 1 and first_[0] not in names
