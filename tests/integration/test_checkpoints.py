"""A checkpoint holds the whole run: going on from one is as good as never having stopped."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from paceline.api.jobs import latest_checkpoint
from paceline.control import RunDirectory
from paceline.exceptions import CheckpointError
from paceline.storage import checkpoint as checkpoints
from tests.integration.conftest import PRELUDE
from tests.integration.test_equivalence import assert_same_bits, with_state
from tests.speed import first

# 44 samples, batches of 4: two workers make 6 rounds an epoch, the last one short; 4 epochs, 24 updates.
TRAIN = """
import random, time
import numpy

o = {"epochs": 4, "spin": 0.0, "schedule": "usual", "tell": None, "hang": None, "samples": 44, "width": 12,
     "optimizer": "momentum", "every": 0}
o |= json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
torch.set_num_threads(1)
torch.manual_seed(100)  # dropout and augmentation are every worker's own all the same
random.seed(1)
numpy.random.seed(2)

model = nn.Sequential(
    nn.Linear(6, o["width"]), nn.BatchNorm1d(o["width"]), nn.ReLU(), nn.Dropout(0.3), nn.Linear(o["width"], 4)
)
if o["optimizer"] == "momentum":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
else:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
lr = torch.optim.lr_scheduler
each_step = each_epoch = None
if o["schedule"] == "usual":
    each_step = lr.ExponentialLR(optimizer, 0.97)
    each_epoch = lr.MultiStepLR(optimizer, [1, 3], gamma=0.5)
elif o["schedule"] == "onecycle":  # moves the momentum too
    each_step = lr.OneCycleLR(optimizer, max_lr=0.2, total_steps=24)
elif o["schedule"] == "sequence":
    parts = [lr.LinearLR(optimizer, 0.2, total_iters=4), lr.MultiStepLR(optimizer, [4, 9], gamma=0.3)]
    each_step = lr.SequentialLR(optimizer, parts, milestones=[5])
schedulers = [s for s in (each_step, each_epoch) if s is not None]
x = torch.randn(o["samples"], 6, generator=torch.Generator().manual_seed(3))
data = TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long(), torch.arange(o["samples"]))
loader = DataLoader(data, batch_size=4, shuffle=True)
given = [] if o["schedule"] == "sequence" else schedulers  # they are known all the same
model, optimizer, loader, *_ = paceline.prepare(model, optimizer, loader, *given)

def written(version):
    events = RUN_DIR / "events.jsonl"
    return events.exists() and f'"kind": "checkpoint", "version": {version}}}' in events.read_text()


seen, losses = [], []
for epoch in range(o["epochs"]):
    for x, y, ids in loader:
        if o["every"] and RANK == 0 and losses and len(losses) % o["every"] == 0:
            # All checkpoints get written: none is skipped because the one before is not finished.
            while not written(len(losses)):
                os.sched_yield()
        if o["hang"] is not None and len(losses) == 5 and RANK == 1:
            os.open(o["hang"], os.O_RDONLY)  # a named pipe that nobody opens: for ever
        end = time.perf_counter() + o["spin"]
        while time.perf_counter() < end:
            pass
        # Three kinds of random augmentation, and dropout.
        x = x + 0.1 * torch.randn(x.shape) + 0.1 * random.random() + 0.1 * float(numpy.random.rand())
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if each_step is not None:
            each_step.step()
        seen.append([epoch, ids.tolist()])
        losses.append(loss.item())
        if o["tell"] is not None and RANK == 0 and len(losses) == 5:
            pathlib.Path(o["tell"]).write_text("5 steps")
    if each_epoch is not None:
        each_epoch.step()
result({"seen": seen, "losses": losses, "lr": optimizer.param_groups[0]["lr"]})
"""


@dataclass
class Dead:
    """A run directory as a run leaves it that died."""

    run: RunDirectory


def died_at(ran: Any, version: int, where: Path) -> Dead:
    """A copy of a run's directory as if it had died right after the checkpoint of that version."""
    shutil.copytree(ran.run.path, where)
    for path in (where / "checkpoints").iterdir():
        if int(path.name.removeprefix("version-")) > version:
            shutil.rmtree(path)
    for path in where.glob("result-*.json"):
        path.unlink()
    assert checkpoints.latest(where / "checkpoints").version == version
    return Dead(RunDirectory(where))


def train(
    run: Any, *, resume: Any = None, source: str = TRAIN, job: dict[str, Any] | None = None, **o: Any
) -> Any:
    settings = {
        "workers": 2,
        "servers": 2,
        "mode": "bsp",
        "threads": 1,
        "keep_checkpoints": 50,
        **(job or {}),
    }
    if resume is None and settings.get("checkpoint_every"):
        o["every"] = settings["checkpoint_every"]
    return run(source, resume=resume, args=(json.dumps(o),), **settings)


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    """Uninterrupted runs by their options: many tests go on from one of them."""
    return {}


@pytest.fixture
def uninterrupted(run: Any, kept: dict[str, Any]) -> Any:
    """Makes runs to the end, with checkpoints 3, 6 (the end of an epoch), …, 24. Copy, don't touch."""

    def make(**o: Any) -> Any:
        key = json.dumps(o)
        if key not in kept:
            ran = train(run, job={"checkpoint_every": 3}, **o)
            assert ran.error is None
            assert ran.status.checkpoints == [f"version-{v:012d}" for v in range(3, 25, 3)]
            kept[key] = ran
        return kept[key]

    return make


def everything(ran: Any) -> dict[str, torch.Tensor]:
    """All that the last checkpoint holds, as named tensors."""
    found = checkpoints.latest(ran.run.path / "checkpoints")
    parts = {f"{name}/{key}": value for name in found.files for key, value in found.tensors(name).items()}
    servers = {key: value for key, value in parts.items() if not key.startswith("server-")}
    return {**servers, **with_state(ran)}


# --- going on -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["usual", "onecycle", "sequence"])
def test_resuming_equals_not_having_stopped_to_the_bit(run, uninterrupted, tmp_path, schedule):
    """In the middle of an epoch and at its end: parameters, momentum, BatchNorm's buffers, dropout and three
    kinds of random numbers, schedulers that step every batch and every epoch."""
    whole = uninterrupted(schedule=schedule)
    for version in (3, 6, 15):
        dead = died_at(whole, version, tmp_path / f"dead{version}")
        ran = train(run, resume=dead, schedule=schedule)
        assert ran.error is None and ran.status.version == 24
        for rank in range(2):
            mine, theirs = ran.results()[rank], whole.results()[rank]
            assert mine["losses"] == theirs["losses"][version:]
            assert mine["seen"] == theirs["seen"][version:]
            assert mine["lr"] == theirs["lr"]
        assert_same_bits(everything(ran), everything(whole))
        assert ran.status.samples == 4 * 44
        assert [a["applied"] for a in ran.status.leases[:4]] == [44] * 4


def test_the_final_checkpoint_waits_for_what_workers_say_last(run, uninterrupted, tmp_path):
    """The lead finds the last frames of all workers and the controller's wish for the final checkpoint at
    once, and serves one frame of each in turn."""
    end = """
    from paceline.comm import Kind
    from paceline.worker.session import current_session

    (RUN_DIR.parent / f"end-{RANK}").touch()
    while not (written(24) and all((RUN_DIR.parent / f"end-{rank}").exists() for rank in range(2))):
        os.sched_yield()
    lead = int((RUN_DIR.parent / "lead").read_text())
    os.kill(lead, signal.SIGSTOP)
    while pathlib.Path(f"/proc/{lead}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        os.sched_yield()
    lead = current_session().client.links.lead.connection
    lead.send(Kind.SENDS, {"slices": []})  # changes nothing, and comes before this worker's part
    """
    lead = 0

    def watch(status: Any, lines: list[str], engine: Any) -> None:
        nonlocal lead
        if not lead and "server:0" in engine.pids():
            lead = engine.pids()["server:0"]
            (tmp_path / "lead").write_text(str(lead))
        elif status.state == "finishing":
            os.kill(lead, signal.SIGCONT)

    source = TRAIN + textwrap.dedent(end)
    ran = train(run, source=source, job={"checkpoint_every": 3, "watch": watch})
    assert ran.error is None
    assert_same_bits(everything(ran), everything(uninterrupted()))


def test_resuming_on_other_numbers_of_servers_gives_the_same_bits(run, uninterrupted, tmp_path):
    """Two servers, then three, then one."""
    # Wide enough to be cut into pieces for three servers.
    options = {"width": 4000, "optimizer": "adam"}
    two = uninterrupted(**options)
    three = train(
        run,
        resume=died_at(two, 9, tmp_path / "dead9"),
        job={"servers": 3, "checkpoint_every": 3},
        **options,
    )
    assert three.error is None
    assert {f"server-{k}.safetensors" for k in range(3)} <= set(latest_checkpoint(three.run).files)
    assert_same_bits(everything(three), everything(two))
    middle = max(v for v in (int(n[-12:]) for n in three.status.checkpoints) if 9 < v < 24)
    one = train(run, resume=died_at(three, middle, tmp_path / "dead"), job={"servers": 1}, **options)
    assert one.error is None
    assert "server-1.safetensors" not in latest_checkpoint(one.run).files
    assert_same_bits(everything(one), everything(two))


@pytest.mark.parametrize(
    "workers, mode", [(1, "bsp"), (1, "asp"), (3, "bsp"), (3, "asp"), (3, "ssp:1"), (3, "backup:1")]
)
def test_resuming_with_other_workers_applies_every_sample_exactly_once(
    run, uninterrupted, tmp_path, workers, mode
):
    """The epoch that was cut in two: what was applied before and what is applied after make it whole."""
    whole = uninterrupted()
    ran = train(run, resume=died_at(whole, 9, tmp_path / "dead"), job={"workers": workers, "mode": mode})
    assert ran.error is None
    assert [a["applied"] for a in ran.status.leases[:4]] == [44] * 4
    assert ran.status.samples == 4 * 44
    before = [i for rank in range(2) for epoch, ids in whole.results()[rank]["seen"][6:9] for i in ids]
    assert len(before) == 24
    for epoch in range(1, 4):
        after = [
            i for rank in range(workers) for e, ids in ran.results()[rank]["seen"] for i in ids if e == epoch
        ]
        expected = set(range(44)) - (set(before) if epoch == 1 else set())
        assert set(after) == expected
        # Elsewhere a push that comes late is dropped and its samples are read again (backup), or a slow
        # worker's last ones are read by another one, too (asp, ssp): applied they are once.
        if mode == "bsp" or workers == 1:
            assert len(after) == len(expected)


def test_a_finished_run_is_resumed_to_the_same_end(run, uninterrupted, tmp_path):
    """Nothing is left to do: the run succeeds at once, and its checkpoint stays what it was."""
    whole = uninterrupted()
    before = everything(whole)
    ran = train(run, resume=died_at(whole, 24, tmp_path / "ended"))
    assert ran.error is None and ran.status.state == "succeeded"
    assert all(r["losses"] == [] for r in ran.results().values())
    assert ran.status.version == 24 and ran.status.samples == 4 * 44
    assert_same_bits(everything(ran), before)


def test_a_finished_run_is_resumed_for_more_epochs(run):
    """A script that now asks for 6 epochs goes on from the end of the fourth, as if it had never ended."""
    whole = train(run, epochs=6)
    ran = train(run, resume=train(run, epochs=4), epochs=6)
    assert ran.error is None
    assert ran.results()[1]["losses"] == whole.results()[1]["losses"][24:]
    assert_same_bits(everything(ran), everything(whole))


# --- what is in it --------------------------------------------------------------------------------------


def test_a_checkpoint_holds_optimizer_state_clocks_leases_random_state_and_schedulers(
    uninterrupted, tmp_path
):
    whole = uninterrupted()
    found = checkpoints.latest(died_at(whole, 9, tmp_path / "dead").run.checkpoints_path)
    lead = found.meta["lead"]
    assert lead["machine"]["version"] == 9 and lead["machine"]["clocks"] == {"0": 9, "1": 9}
    assert lead["samples"] == 44 + 24 and lead["mode"] == "bsp"
    # Epoch 1 is in its middle: 24 of 44 samples are applied, and the pool has the others.
    assert [a["applied"] for a in lead["leases"]["accounts"]] == [44, 24]
    assert lead["leases"]["pool"] == [[24, 44]]
    servers = {k for name in found.files if name.startswith("server-") for k in found.tensors(name)}
    for name, kind in (("0.weight", ""), ("0.weight", "momentum_buffer"), ("4.bias", "momentum_buffer")):
        assert any(key.startswith(f"{name}|{kind}|") for key in servers)
    for rank in range(2):
        part = found.tensors(f"worker-{rank}.safetensors")
        assert {"rng:torch", "rng:numpy", "rng:python", "user:scheduler:0", "user:scheduler:1"} <= set(part)
        assert part["buffer:1.num_batches_tracked"].item() == 9
        scheduler = json.loads(bytes(part["user:scheduler:0"].tolist()))
        assert scheduler["last_epoch"] == 9  # the scheduler's step after the 9th update is in it
    states = [found.tensors(f"worker-{rank}.safetensors")["rng:torch"] for rank in range(2)]
    assert not torch.equal(*states)


def test_old_checkpoints_are_pruned(run):
    ran = train(run, job={"checkpoint_every": 3, "keep_checkpoints": 2})
    assert ran.error is None
    kept = sorted(p.name for p in (ran.run.path / "checkpoints").iterdir())
    assert kept == ["version-000000000021", "version-000000000024"]
    assert ran.status.checkpoints == kept


# --- what is refused ------------------------------------------------------------------------------------


class Lines:
    """Stands in for the progress display."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def print_line(self, text: str) -> None:
        self.lines.append(text)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, alter])
@pytest.mark.parametrize("file", ["server-1.safetensors", "worker-0.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_it_is_chosen(
    uninterrupted, tmp_path, damage, file
):
    dead = died_at(uninterrupted(), 9, tmp_path / "dead")
    damage(dead.run.checkpoints_path / "version-000000000009" / file)
    said = Lines()
    assert latest_checkpoint(dead.run, said).version == 6
    assert len(said.lines) == 1
    for word in ("refused", "version-000000000009", file, "the one before it is used"):
        assert word in said.lines[0]


def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(run, uninterrupted, tmp_path):
    whole = uninterrupted()
    dead = died_at(whole, 9, tmp_path / "dead")
    truncate(dead.run.checkpoints_path / "version-000000000009" / "server-0.safetensors")
    ran = train(run, resume=dead)
    assert ran.error is None
    assert ran.results()[0]["losses"] == whole.results()[0]["losses"][6:]
    assert_same_bits(everything(ran), everything(whole))


def test_without_a_good_checkpoint_there_is_nothing_to_go_on_from(uninterrupted, tmp_path):
    """All are named with what is wrong with them."""
    dead = died_at(uninterrupted(), 6, tmp_path / "dead")
    for path in dead.run.checkpoints_path.iterdir():
        truncate(path / "server-0.safetensors")
    with pytest.raises(CheckpointError, match="no checkpoint to go on from") as refused:
        latest_checkpoint(dead.run)
    for word in ("version-000000000003", "version-000000000006", "truncated"):
        assert word in str(refused.value)


@pytest.mark.parametrize(
    "change, says",
    [
        (('nn.Linear(o["width"], 4)', 'nn.Linear(o["width"], 5)'), ["'4.weight'", "[4, 12]", "[5, 12]"]),
        (('nn.Linear(6, o["width"])', 'nn.Linear(6, o["width"], bias=False)'), ["'0.bias'", "missing"]),
        (("nn.Dropout(0.3)", "nn.PReLU()"), ["no parameter '3.weight'"]),
        (("torch.optim.SGD(", "torch.optim.NAdam(momentum_decay=0.1, params="), ["SGD", "NAdam"]),
        (('"samples": 44', '"samples": 45'), ["45 samples", "44"]),
    ],
    ids=["shape", "missing", "new", "optimizer", "data"],
)
def test_a_checkpoint_of_another_model_is_refused_with_the_first_difference(
    run, uninterrupted, tmp_path, change, says
):
    dead = died_at(uninterrupted(), 6, tmp_path / "dead")
    source = TRAIN.replace(*change)
    if "NAdam" in change[1]:
        source = source.replace("lr=0.1, momentum=0.9, weight_decay=1e-3", "lr=0.1")
    assert source != TRAIN
    ran = train(run, resume=dead, source=source)
    assert ran.status.state == "failed"
    for word in says:
        assert word in ran.error, ran.error
    assert "Traceback" not in ran.error
    assert [p.name for p in dead.run.checkpoints_path.iterdir() if p.name.endswith("9")] == []


# --- stopping -----------------------------------------------------------------------------------------


def start_and_signal(
    tmp_path: Path,
    number: int,
    *,
    everybody: bool = False,
    again: str | None = None,
    faults: str = "",
    **o: Any,
) -> tuple[Path, int, float, str]:
    """`paceline run`, and a signal to its controller after 5 steps. Returns the run directory, the exit code,
    how long it took until every process was gone, and what it printed.

    Args:
        everybody: the signal goes to all processes of the run at once, as systemd and SLURM send it.
        again: a second signal is sent once this has been printed.
        faults: PACELINE_FAULTS.
    """
    directory, pipe = tmp_path / "stopped", tmp_path / "tell"
    script = tmp_path / "train.py"
    header = f"import os; os.environ['TEST_RUN_DIR'] = {str(directory)!r}\n"
    script.write_text(header + PRELUDE + textwrap.dedent(TRAIN))
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--servers", "2", "--threads", "1"]
    command += ["--run-dir", str(directory), str(script), json.dumps({**o, "tell": str(pipe)})]
    env = {**os.environ, "PACELINE_RUNS": str(tmp_path / "runs"), "PACELINE_FAULTS": faults}
    controller = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )
    assert pipe.read_text() == "5 steps"  # blocks until worker 0 is there
    family = psutil.Process(controller.pid).children(recursive=True)
    assert len(family) >= 5  # the fork server, two servers, two workers
    started = time.monotonic()
    for pid in [*(process.pid for process in family), controller.pid] if everybody else [controller.pid]:
        os.kill(pid, number)
    printed = ""
    if again is not None:
        assert controller.stdout is not None
        while again not in printed:
            printed += controller.stdout.readline()
        controller.send_signal(number)
    output = printed + controller.communicate(timeout=60)[0]
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    return directory, controller.returncode, time.monotonic() - started, output


def test_ctrl_c_leaves_a_checkpoint_that_resumes_to_the_same_bits(run, tmp_path):
    """Everything is gone within seconds; the checkpoint lies between two rounds, so a resume is bitwise."""
    directory, code, took, output = start_and_signal(tmp_path, signal.SIGINT, spin=0.05)
    assert took < 30.0  # on a machine that has other things to do
    assert code != 0
    assert "paceline resume" in output
    stopped = Dead(RunDirectory(directory))
    assert stopped.run.state() == "stopped"
    version = latest_checkpoint(stopped.run).version
    assert 5 <= version < 24
    whole = train(run)
    ran = train(run, resume=stopped)
    assert ran.error is None
    assert ran.results()[1]["losses"] == whole.results()[1]["losses"][version:]
    assert_same_bits(everything(ran), everything(whole))


@pytest.mark.slow
@pytest.mark.parametrize("number", first(1, [signal.SIGTERM, signal.SIGHUP]))
def test_a_signal_leaves_a_checkpoint_even_if_a_worker_hangs(run, tmp_path, number):
    """Worker 1 is stuck in its sixth step: the checkpoint has the five before, and all is gone in seconds."""
    never = tmp_path / "never"
    os.mkfifo(never)
    directory, code, took, _ = start_and_signal(tmp_path, number, hang=str(never))
    assert took < 30.0  # on a machine that has other things to do
    assert code != 0
    stopped = Dead(RunDirectory(directory))
    assert latest_checkpoint(stopped.run).version == 5
    ran = train(run, resume=stopped)
    assert ran.error is None
    assert [a["applied"] for a in ran.status.leases[:4]] == [44] * 4


@pytest.mark.parametrize("repeated", first(1, [False, True], ["once", "twice"]))
def test_sigterm_to_all_processes_at_once_leaves_a_checkpoint(run, tmp_path, repeated):
    """What systemd and SLURM do to a control group. A second one right behind it is the same request."""
    again = "stopping" if repeated else None
    faults = "slowdisk server:*@1:100ms" if repeated else ""
    directory, code, _, output = start_and_signal(
        tmp_path, signal.SIGTERM, everybody=True, again=again, faults=faults, spin=0.05
    )
    assert code == 128 + signal.SIGTERM, output
    assert "no checkpoint" not in output and "without waiting" not in output
    stopped = Dead(RunDirectory(directory))
    assert stopped.run.state() == "stopped"
    version = latest_checkpoint(stopped.run).version
    assert 5 <= version < 24
    if not repeated:
        ran = train(run, resume=stopped)
        assert ran.error is None
        assert_same_bits(everything(ran), everything(train(run)))


SLOW_DISK = "slowdisk server:*@1:600ms"
"""Each of the two servers makes six writes or more of a model of this width."""
WIDE = 120_000


@pytest.mark.slow
def test_a_checkpoint_that_takes_long_is_finished_before_a_stopped_run_ends(run, tmp_path):
    """With its progress shown; and what workers would compute meanwhile is not computed in vain."""
    directory, code, took, output = start_and_signal(
        tmp_path, signal.SIGINT, faults=SLOW_DISK, spin=0.05, width=WIDE
    )
    assert code == 130
    assert took > 3.0, "the disk was not slow"
    assert "stopping: a checkpoint is written first (Ctrl-C again to stop without it)" in output
    assert re.search(r"stopping · checkpoint \d+ % of \d[\d.]* MB", output), output
    stopped = Dead(RunDirectory(directory))
    found = latest_checkpoint(stopped.run)
    assert 5 <= found.version < 24
    assert stopped.run.read_status()["version"] <= found.version + 10
    assert not list(stopped.run.checkpoints_path.glob(".*"))


@pytest.mark.slow
def test_a_second_ctrl_c_gives_up_the_checkpoint_and_leaves_nothing_of_it(tmp_path):
    directory, code, _, output = start_and_signal(
        tmp_path, signal.SIGINT, faults="slowdisk server:*@1:20s", again="stopping", spin=0.05, width=WIDE
    )
    assert code == 130
    assert "stopped without waiting for the checkpoint" in output
    assert list((directory / "checkpoints").iterdir()) == []


def test_what_a_killed_run_left_of_a_checkpoint_is_removed_when_it_is_resumed(run):
    ran = train(run, epochs=1)
    left = ran.run.checkpoints_path / ".version-000000000003.tmp-0badcafe"
    left.mkdir()
    (left / "server-0.safetensors").write_bytes(b"half of it")
    again = train(run, resume=ran)
    assert again.error is None
    assert not left.exists()


# --- export ---------------------------------------------------------------------------------------------

EXPORT = """
from safetensors.torch import save_file

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.embed = nn.Linear(4, 8, bias=False)
        self.out = nn.Linear(8, 4)
        self.back = nn.Linear(4, 8, bias=False)
        self.back.weight = self.embed.weight  # tied
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.calls += 1
        h = self.norm(self.convolution(x)).mean((2, 3))
        return self.out(self.embed(h) + self.back(h)) * self.scale + self.frozen.sum()
"""

EXPORTING = (
    EXPORT
    + """
torch.manual_seed(RANK)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x = torch.randn(24, 2, 5, 5, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, torch.arange(24) % 4)
loader = DataLoader(data, batch_size=4)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for epoch in range(2):
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
for x, _ in DataLoader(data, batch_size=4):  # after the last update: BatchNorm's statistics move on
    model(x)
if RANK == 0:
    save_file({k: v.contiguous().clone() for k, v in model.state_dict().items()}, RUN_DIR / "own.safetensors")
"""
)


@pytest.mark.parametrize("every", [0, 3], ids=["final-only", "last-update-was-saved-too"])
@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_the_exported_model_is_the_workers_and_loads_strictly_in_plain_pytorch(run, mode, every):
    """Tied weights, buffers, a frozen parameter, a scalar, channels_last."""
    ran = run(EXPORTING, workers=2, servers=2, mode=mode, checkpoint_every=every)
    assert ran.error is None
    exported = ran.model
    own = load_file(ran.run.path / "own.safetensors")
    if mode == "asp":  # worker 1 may go on after worker 0 looked: what is exported is the end
        own = {k: v if "norm" in k or k in ("calls", "frozen") else exported[k] for k, v in own.items()}
    assert_same_bits(exported, own)
    space: dict[str, Any] = {"nn": nn, "torch": torch}
    exec(EXPORT, space)
    model = space["Net"]()
    model.load_state_dict(exported, strict=True)
    assert model.back.weight is model.embed.weight
    assert_same_bits({k: v.contiguous() for k, v in model.state_dict().items()}, exported)


def test_parameters_assigned_after_the_last_update_are_in_the_final_checkpoint(run):
    """Also when that update's checkpoint was written already."""
    source = """
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(8, 3)), batch_size=2)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    for (x,) in loader:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0, 3.0]]))
    paceline.assign()
    """
    ran = run(source, workers=2, servers=1, mode="bsp", checkpoint_every=1)
    assert ran.error is None
    assert ran.model["weight"].tolist() == [[1.0, 2.0, 3.0]]
