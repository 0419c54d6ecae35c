"""Sandblaster: an epoch is one gradient of the whole data set, and a step of L-BFGS on the servers.

The problem is logistic regression on digits in float64. COMMON is also executed here, for the plain loop that
runs are compared with: torch.optim.LBFGS on the whole batch, one step an epoch.
"""

import csv
import functools
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from paceline.api.jobs import latest_checkpoint
from paceline.control import RunDirectory
from paceline.data.digits import digits
from paceline.exceptions import UsageError
from paceline.plan import Job, make_plan
from tests.integration.conftest import PRELUDE, Ran
from tests.speed import first

SAMPLES, EPOCHS = 130, 5

COMMON = """
class Logistic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(900, 10, dtype=torch.float64)
        with torch.no_grad():
            self.layer.weight.copy_(torch.linspace(-0.02, 0.02, 9000).view(10, 900))
            self.layer.bias.zero_()

    def loss(self, x, y):
        penalty = 1e-3 * (self.layer.weight ** 2).sum()
        return nn.functional.cross_entropy(self.layer(x), y) + penalty

def make_optimizer(model, name, settings):
    return getattr(torch.optim, name)(model.parameters(), **settings)
"""

SOURCE = (
    COMMON
    + """
from paceline.worker import current_session

o = {"optimizer": "LBFGS", "settings": {"lr": 0.5, "history_size": 4}, "epochs": 5, "batch": 9,
     "closure": True, "die": None, "slow": None, "hang": None, "nan": None, "decay": 1.0,
     "ahead": 0}
o |= json.loads(sys.argv[1])
torch.set_num_threads(1)
model = Logistic()
optimizer = make_optimizer(model, o["optimizer"], o["settings"])
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, o["decay"])
inputs, labels = torch.load(o["data"])
data = TensorDataset(inputs, labels, torch.arange(len(labels)))
loader = DataLoader(data, batch_size=o["batch"], shuffle=True, num_workers=o["ahead"])
model, optimizer, loader, scheduler = paceline.prepare(model, optimizer, loader, scheduler)

def once(name):
    try:
        os.close(os.open(RUN_DIR / name, os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False

read, losses, steps = [], [], 0
for epoch in range(o["epochs"]):
    with torch.no_grad():
        losses.append(model.loss(inputs, labels).item())
    for x, y, ids in loader:
        if o["die"] == steps and once("died"):
            os.kill(os.getpid(), signal.SIGKILL)
        while o["slow"] is not None and epoch == 1 and RANK and not (RUN_DIR / "holding").exists():
            os.sched_yield()
        if o["slow"] is not None and epoch == 1 and RANK == 0 and once("holding"):
            # The others are in the next epoch before this batch is done.
            os.close(os.open(o["slow"], os.O_RDONLY))
        if o["slow"] is not None and epoch == 2 and RANK and once("ahead"):
            os.close(os.open(o["slow"], os.O_WRONLY))
        if o["hang"] is not None and steps == o["hang"][1]:
            pathlib.Path(o["hang"][0]).write_text("here")
            os.open(o["hang"][0], os.O_RDONLY)  # nobody writes any more: for ever

        def closure():
            optimizer.zero_grad()
            loss = model.loss(x, y)
            if o["nan"] == [epoch, len(read)]:
                loss = loss * float("nan")
            loss.backward()
            return loss

        if o["closure"]:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        read.append([epoch, ids.tolist()])
        steps += 1
    scheduler.step()
client = current_session().client
result({"read": read, "losses": losses, "version": client.version, "over_memory": client.links.local,
        "lr": optimizer.param_groups[0]["lr"], "state": len(optimizer.state_dict()["state"])})
"""
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def data() -> tuple[Tensor, Tensor]:
    """Random features of digits, so many that the weights are two slices: both of two servers have one."""
    images, labels = digits(train=True).tensors
    g = torch.Generator().manual_seed(11)
    turn = torch.randn(64, 900, generator=g, dtype=torch.float64) / 4
    return torch.tanh(images[:SAMPLES].double().flatten(1) @ turn), labels[:SAMPLES].clone()


WHERE: dict[str, str] = {}


@pytest.fixture(scope="module", autouse=True)
def data_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What scripts load, so that they need not import sklearn."""
    WHERE["data"] = str(tmp_path_factory.mktemp("data") / "digits.pt")
    torch.save(data(), WHERE["data"])


def common() -> SimpleNamespace:
    space: dict[str, Any] = {"torch": torch, "nn": nn}
    exec(COMMON, space)
    return SimpleNamespace(**space)


def plain(epochs: int = EPOCHS, *, decay: float = 1.0, **settings: Any) -> dict[str, Tensor]:
    """torch's own, on the whole batch: one step an epoch."""
    space = common()
    model = space.Logistic()
    optimizer = space.make_optimizer(
        model, "LBFGS", {"lr": 0.5, "history_size": 4, **settings, "max_iter": 1}
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    x, y = data()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model.loss(x, y)
        loss.backward()
        return loss

    for _ in range(epochs):
        optimizer.step(closure)
        scheduler.step()
    return model.state_dict()


def loss_of(state: dict[str, Tensor]) -> float:
    model = common().Logistic()
    model.load_state_dict(state)
    with torch.no_grad():
        return float(model.loss(*data()))


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 1e-6) -> None:
    assert got.keys() == expected.keys()
    for name, value in got.items():
        assert (value - expected[name]).abs().max() <= bound, name


def assert_counted(ran: Any, epochs: int = EPOCHS, *, before: int = 0) -> None:
    """Every sample was applied once an epoch, and nothing was stale."""
    assert [a["applied"] for a in ran.status.leases[:epochs]] == [SAMPLES] * epochs
    assert ran.status.samples == SAMPLES * epochs
    assert ran.status.version == epochs
    assert set(ran.status.staleness) == {0}
    with (ran.run.path / "pushes.csv").open() as file:
        rows = list(csv.DictReader(file))
    for version in range(before + 1, epochs + 1):
        assert sum(int(row["samples"]) for row in rows if int(row["version"]) == version) == SAMPLES
    assert {int(row["version"]) - int(row["read_version"]) for row in rows} == {1}


def source_with(old: str, new: str) -> str:
    assert SOURCE.count(old) == 1
    return SOURCE.replace(old, new)


def go(
    run: Any, *, source: str = SOURCE, workers: int = 1, job: dict[str, Any] | None = None, **options: Any
) -> Any:
    settings = {"mode": "sandblaster", "servers": 2, "threads": 1, **(job or {})}
    return run(source, workers=workers, args=(json.dumps({**WHERE, **options}),), **settings)


# --- the same steps as torch's own ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "workers, servers, link",
    [(1, 1, "shm"), (3, 2, "shm"), (1, 2, "tcp"), (3, 1, "tcp")],
)
def test_a_run_takes_the_steps_of_torchs_lbfgs_on_the_whole_batch(run, workers, servers, link):
    ran = go(run, workers=workers, job={"servers": servers, "link": link})
    assert ran.error is None
    assert all(r["over_memory"] == (link == "shm") for r in ran.results().values())
    assert_close(ran.model, plain())
    assert_counted(ran)
    # Not because nothing happened, and every worker was where the run was.
    assert loss_of(ran.model) < 0.7 * ran.results()[0]["losses"][0]
    assert {r["version"] for r in ran.results().values()} == {EPOCHS}
    assert not any("lr 1" in message for message in ran.status.messages)


def test_a_server_without_parameters_a_schedule_and_a_step_without_closure(run):
    """Three servers, two slices. The learning rate is the script's, also when a scheduler changes it, and the
    mode's number is the history."""
    ran = go(
        run,
        workers=2,
        job={"servers": 3, "mode": "sandblaster:2"},
        closure=False,
        decay=0.8,
        settings={"lr": 0.5, "history_size": 50},
    )
    assert ran.error is None
    assert_close(ran.model, plain(decay=0.8, history_size=2))
    assert ran.results()[0]["lr"] == pytest.approx(0.5 * 0.8**EPOCHS)
    assert ran.results()[0]["state"] == 0


def test_batches_read_ahead_by_a_loaders_own_workers_are_counted_once(run):
    ran = go(run, workers=2, epochs=2, ahead=1)
    assert ran.error is None
    assert_counted(ran, 2)


# --- any other optimizer --------------------------------------------------------------------------------


def test_with_another_optimizer_steps_are_searched_and_the_user_is_told(run):
    """12 epochs come as near to the minimum as torch's own with a line search in 30 evaluations."""
    ran = go(run, workers=2, optimizer="Adam", settings={"lr": 123.0, "weight_decay": 5.0}, epochs=12)
    assert ran.error is None
    (note,) = [message for message in ran.status.messages if "L-BFGS" in message]
    assert "lr 1;" in note and "Adam" in note
    best = plain(30, lr=1.0, history_size=10, line_search_fn="strong_wolfe")
    assert loss_of(ran.model) < loss_of(best) + 0.02
    # A point that is worse is not kept: the next one is better again.
    losses = ran.results()[0]["losses"]
    assert losses[-1] == pytest.approx(min(losses), rel=0.05)


def test_a_minimum_is_said_once_and_kept(run):
    settings = {"lr": 1.0, "line_search_fn": "strong_wolfe", "tolerance_grad": 0.05}
    ran = go(run, settings=settings, epochs=12)
    assert ran.error is None
    assert sum("converged" in message for message in ran.status.messages) == 1
    assert ran.results()[0]["losses"][-1] == ran.results()[0]["losses"][-2]


# --- faults ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", first(1, ["shm", "tcp"]))
def test_a_killed_worker_changes_neither_count_nor_result(run, link):
    ran = go(run, workers=3, job={"link": link}, die=7)
    assert ran.error is None and (ran.run.path / "died").exists()
    assert ran.status.restarts == 1
    assert_counted(ran)
    assert_close(ran.model, plain())


@pytest.mark.parametrize("link", first(1, ["shm", "tcp"]))
def test_nobody_waits_for_a_slow_workers_last_batch(run, tmp_path, link):
    """Worker 0 holds a batch of the second epoch until another one is in the third: without a duplicate of
    that batch nobody would get there. Its own comes late and is dropped."""
    pipe = tmp_path / "slow"
    os.mkfifo(pipe)
    ran = go(run, workers=3, job={"link": link}, slow=str(pipe))
    assert ran.error is None and (ran.run.path / "ahead").exists()
    assert ran.status.dropped >= 1
    assert_counted(ran)
    assert_close(ran.model, plain())
    for epoch in range(EPOCHS):
        read = [i for r in ran.results().values() for e, ids in r["read"] if e == epoch for i in ids]
        assert set(read) == set(range(SAMPLES))


def test_a_point_whose_gradient_is_not_finite_is_left_by_a_shorter_step(run):
    """NaN in a batch of the second epoch: its samples are refused; the third point is nearer the start."""
    ran = go(run, nan=[1, 18], settings={"lr": 0.5, "line_search_fn": "strong_wolfe"}, epochs=3)
    assert ran.error is None
    assert ran.status.refused == 1
    assert [a["applied"] for a in ran.status.leases[:3]] == [SAMPLES, SAMPLES - 9, SAMPLES]
    assert [a["refused"] for a in ran.status.leases[:3]] == [0, 9, 0]
    start, torchs = common().Logistic().state_dict(), plain(1)
    along = {name: torchs[name] - start[name] for name in start}
    # With a line search the first trial has length lr; torch's goes in the same direction.
    length = math.sqrt(sum(float((step**2).sum()) for step in along.values()))
    nearer = {name: start[name] + 0.1 * 0.5 / length * along[name] for name in start}
    assert ran.results()[0]["losses"][2] == pytest.approx(loss_of(nearer), abs=1e-9)


# --- going on -------------------------------------------------------------------------------------------


def stopped_after(steps: int, tmp_path: Path, servers: int, **options: Any) -> Ran:
    """`paceline run` with one worker, stopped by a signal when that has made so many steps."""
    directory, pipe, script = tmp_path / "stopped", tmp_path / "tell", tmp_path / "train.py"
    header = f"import os; os.environ['TEST_RUN_DIR'] = {str(directory)!r}\n"
    script.write_text(header + PRELUDE + textwrap.dedent(SOURCE))
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "paceline", "run", "--workers", "1", "--servers", str(servers)]
    command += ["--mode", "sandblaster:3", "--threads", "1", "--checkpoint-every", "1"]
    options |= {**WHERE, "hang": [str(pipe), steps]}
    command += ["--run-dir", str(directory), str(script), json.dumps(options)]
    controller = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PACELINE_RUNS": str(tmp_path / "runs")},
    )
    try:
        assert pipe.read_text() == "here"
        family = psutil.Process(controller.pid).children(recursive=True)
        controller.send_signal(signal.SIGTERM)
        controller.communicate(timeout=30)
        assert psutil.wait_procs(family, timeout=10)[1] == []
    finally:
        controller.kill()
    return Ran(SimpleNamespace(), RunDirectory(directory), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps, servers", first(0, [(52, 2), (45, 1)], ["middle of an epoch", "its start"]))
def test_a_run_stopped_within_an_epoch_goes_on_as_if_it_had_not(run, tmp_path, steps, servers):
    """With a line search and a history of 3; 15 batches an epoch. Resumed on two servers, whatever it had."""
    options: dict[str, Any] = {"optimizer": "SGD", "settings": {"lr": 1.0}, "epochs": 7}
    stopped = stopped_after(steps, tmp_path, servers, **options)
    found = latest_checkpoint(stopped.run)
    assert found.meta["lead"]["descent"]["samples"] == 9 * (steps % 15)
    assert found.version == 3
    whole = go(run, job={"mode": "sandblaster:3"}, **options)
    ran = go(run, job={"mode": "sandblaster:3", "resume": stopped}, **options)
    assert ran.error is None
    assert_counted(whole, 7)
    assert_counted(ran, 7, before=3)
    assert_close(ran.model, whole.model, 1e-10)
    read = ran.results()[0]["read"]
    assert read == whole.results()[0]["read"][steps:]


def test_going_on_with_another_mode_leaves_lbfgs_behind(run):
    """A run in bsp with SGD goes on where sandblaster ended, without its vectors; and the other way round."""
    settings = {"optimizer": "SGD", "settings": {"lr": 1e-3}}
    ended = go(run, epochs=3, **settings)
    before = loss_of(ended.model)
    ran = go(run, job={"mode": "bsp", "resume": ended}, epochs=5, **settings)
    assert ran.error is None and loss_of(ran.model) < before
    assert not any("lbfgs" in key for key in latest_checkpoint(ran.run).tensors("server-0.safetensors"))
    again = go(run, job={"resume": ran}, epochs=6, **settings)
    assert again.error is None and again.status.version == ran.status.version + 1


def test_parameters_that_the_script_sets_begin_anew(run):
    """load_state_dict in the middle of a run: the history belongs to another place."""
    loop = "    for x, y, ids in loader:\n"
    source = source_with(
        loop, f"    if epoch == 3:\n        model.load_state_dict(Logistic().state_dict())\n{loop}"
    )
    ran = go(run, source=source, workers=2, epochs=6)
    assert ran.error is None
    assert [a["applied"] for a in ran.status.leases[:6]] == [SAMPLES] * 6
    assert_close(ran.model, plain(3))


# --- what it does not take -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting, says",
    [
        ({"clip_norm": 1.0}, "only bsp has"),
        ({"compress": "fp16"}, "L-BFGS compares exact gradients"),
        ({"overlap": True}, "when the batch is evaluated"),
        ({"prefetch": 2}, "fetches nothing"),
        ({"guard": True}, "cannot be switched"),
        ({"schedule": ("10=asp",)}, "L-BFGS"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_with_it_are_refused(setting, says):
    with pytest.raises(UsageError, match=says):
        make_plan(Job(mode="sandblaster", **setting))


STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(data)

loader = DataLoader(Stream(), batch_size=4)
model, optimizer,"""


@pytest.mark.slow
def test_a_stream_is_refused(run):
    source = source_with("\nmodel, optimizer,", STREAM)
    ran = go(run, source=source)
    assert (
        "mode sandblaster makes one step of the gradient of a whole epoch, and an IterableDataset"
        in ran.error
    )


def test_a_script_without_a_loader_is_refused(run):
    source = source_with(
        "loader, scheduler = paceline.prepare(model, optimizer, loader, scheduler)",
        "scheduler = paceline.prepare(model, optimizer, scheduler)",
    )
    ran = go(run, source=source)
    assert "prepare() got no DataLoader" in ran.error


def test_batches_without_a_step_are_refused_at_the_end_of_their_epoch(run):
    """Accumulation over two of 15 batches leaves one."""
    step = """        if o["closure"]:\n"""
    source = source_with(
        step, "        if len(read) % 2 == 0:\n            closure()\n" + step.replace("if", "elif")
    )
    ran = go(run, source=source)
    assert "worker:0 read 1 batches at the end of epoch 1" in ran.error


def test_a_loop_that_is_left_early_gives_its_last_batch_to_others(run):
    """Worker 1 leaves every other epoch with a batch that it did not step for: worker 0 computes it."""
    first = """        if o["die"] == steps"""
    # After its first one: a loop without any step is a peek, and uses up no epoch.
    leaves = """        if RANK == 1 and epoch % 2 and not once(f"began {epoch}"):\n            break\n"""
    source = source_with(first, leaves + first)
    ran = go(run, source=source, workers=2)
    assert ran.error is None
    assert_counted(ran)
    assert_close(ran.model, plain())
