"""Schedules follow the run: a straggler and the others are at the same place, nobody runs past the end."""

import pytest
import torch

# 60 samples, batches of 4, three epochs: 45 steps in all, planned as 24 for each of two workers.
SOURCE = """
import time

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x = torch.randn(60, 4)
loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=4)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=0.1, epochs=3, steps_per_epoch=len(loader))
found = []
for epoch in paceline.epochs(3):
    for x, y in loader:
        end = time.perf_counter() + (0.03 if RANK else 0.002)
        while time.perf_counter() < end:
            pass
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        at = paceline.progress()
        found.append([at.fraction, at.samples, at.updates, at.epoch, optimizer.param_groups[0]["lr"]])
at = paceline.progress()
result({"found": found, "len": len(loader), "state": sorted(scheduler.state_dict())})
"""


def rates(total: int) -> list[float]:
    """torch's own, step by step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total)
    found = [optimizer.param_groups[0]["lr"]]
    for _ in range(total):
        optimizer.step()
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_with_a_straggler_in_asp_every_worker_is_where_the_run_is(run):
    """Worker 0 makes far more steps than len(loader) says: counting them, OneCycleLR raised an error."""
    ran = run(SOURCE, workers=2, mode="asp", threads=1)
    assert ran.error is None, ran.error
    fast, slow = ran.results()[0], ran.results()[1]
    assert fast["len"] == 8 and "step" not in fast["state"]
    assert len(fast["found"]) + len(slow["found"]) == 45
    assert len(fast["found"]) > 24, "there was no straggler"
    curve = rates(24)
    for result in (fast, slow):
        for fraction, samples, updates, epoch, rate in result["found"]:
            assert samples == round(180 * fraction) and 1 <= updates <= 45
            assert epoch <= samples // 60 <= epoch + 1
            assert rate == curve[int(24 * samples / 180)]
    assert max(r[0] for r in (*fast["found"], *slow["found"])) == 1.0
    assert fast["found"][-1][4] < 0.01


REPLACED = """
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(96, 4)
loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=4)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
each_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
each_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
back = RUN_DIR / "back"
if RANK == 0 and (RUN_DIR / "killed").exists():
    back.touch()
found = []
for epoch in paceline.epochs(3):
    for x, y in loader:
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([paceline.progress().samples, epoch, optimizer.param_groups[0]["lr"]])
        each_step.step()
        if RANK == 0 and epoch == 1 and not (RUN_DIR / "killed").exists():
            (RUN_DIR / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while RANK == 1 and (RUN_DIR / "killed").exists() and not back.exists():
            os.sched_yield()
    each_epoch.step()
result(found)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_who_takes_a_dead_workers_place_goes_on_with_its_schedules(run, mode):
    """Worker 0 dies in epoch 1 of 3. In bsp its settings are the run's: they must not begin anew."""
    ran = run(REPLACED, workers=2, mode=mode, threads=1)
    assert ran.error is None, ran.error
    first, *_ = ran.results()[0]
    assert first[1] >= 1
    for samples, epoch, rate in ran.results()[0][1:]:
        # It was there before this step, whose samples are among them. A count may be ahead.
        places = [0.1 * 0.9**n * 0.5**epoch for n in range(samples // 8 - 4, samples // 8 + 3)]
        assert places[-1] * 0.99 < rate < places[0] * 1.01, (samples, epoch, rate)
