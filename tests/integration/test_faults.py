"""Faults: who dies, hangs or runs out of room, when, and what the user sees of it.

Scripts kill themselves at a chosen point, once (a marker file in the run directory says that they did),
so every fault is proven to have fired and nothing depends on timing.
"""

import contextlib
import csv
import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from paceline.control import RunDirectory
from paceline.observe.analyse.facts import facts_of
from paceline.observe.analyse.run_data import RunData
from tests.integration.conftest import PRELUDE
from tests.speed import first

TOOLS = """
import itertools
import paceline.comm
from paceline.comm import Connection, Kind
from paceline.worker.session import current_session

def once(name):
    try:
        os.close(os.open(RUN_DIR / name, os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False

def die(name="died"):
    # Whoever is here first: a fault on one certain worker might never fire when the others are faster.
    if once(name):
        os.kill(os.getpid(), signal.SIGKILL)

def die_sending(kind, peer, *, when, nth=1, wait=None, name="died"):
    # The nth frame of this kind to this peer is our last: "before" it is sent, or "after".
    send, seen = Connection.send, itertools.count(1)
    def wrapped(self, k, body=None, *args, **kwargs):
        hit = k is kind and self.peer == peer and (wait is None or body.get("wait") == wait)
        hit = hit and next(seen) == nth
        if hit and when == "before":
            die(name)
        send(self, k, body, *args, **kwargs)
        if hit and when == "after":
            die(name)
    Connection.send = wrapped

def prepared(samples=48, batch_size=4, width=2):
    torch.manual_seed(RANK)
    model = nn.Linear(4, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, torch.arange(samples) % 2), batch_size=batch_size, shuffle=True)
    return paceline.prepare(model, optimizer, loader)

def train(objects, epochs=2, at_step=lambda step: None):
    model, optimizer, loader = objects
    steps = itertools.count(1)
    for epoch in range(epochs) if isinstance(epochs, int) else epochs:
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            at_step(next(steps))
            optimizer.step()
            optimizer.zero_grad()
"""

DIES_IN_THE_MIDDLE = (
    TOOLS
    + """
train(prepared(), at_step=lambda step: die() if step == 3 else None)
"""
)

ENDLESS = TOOLS + "\ntrain(prepared(), epochs=itertools.count())\n"


def assert_every_sample_once(ran, samples: int = 48, epochs: int = 2) -> None:
    """The books and the record of every push agree: each epoch was applied exactly once."""
    assert ran.error is None
    assert ran.status.state == "succeeded"
    assert ran.status.samples == samples * epochs
    accounts = ran.status.leases[:epochs]
    assert [(a["applied"], a["refused"], a["unused"]) for a in accounts] == [(samples, 0, 0)] * epochs
    with (ran.run.path / "pushes.csv").open() as file:
        pushes = list(csv.DictReader(file))
    ids = [(p["worker"], p["incarnation"], p["sequence"]) for p in pushes]
    assert len(ids) == len(set(ids))
    # An epoch turns when all of it is applied: each multiple of its size is in the running sum.
    sums = list(itertools.accumulate(int(p["samples"]) for p in pushes))
    assert {samples * (k + 1) for k in range(epochs)} <= set(sums)
    assert sums[-1] == samples * epochs


def assert_died(ran, *names: str, restarts: int = 1) -> None:
    for name in names or ("died",):
        assert (ran.run.path / name).exists(), f"the fault {name} never fired"
    assert ran.status.restarts == restarts


# --- workers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", first(1, ["shm", "tcp"]))
@pytest.mark.parametrize("mode", ["bsp", "backup:1", "ssp:1", "asp"])
def test_a_worker_killed_in_an_epoch_is_replaced_and_every_sample_is_applied_once(run, mode, link):
    ran = run(DIES_IN_THE_MIDDLE, workers=2, servers=2, mode=mode, link=link)
    assert_died(ran)
    assert_every_sample_once(ran)
    (who,) = [w.name for w in ran.status.workers.values() if w.restarts]
    message = f"{who} was killed by SIGKILL; replaced (restart 1 of at most 3)"
    assert any(m.startswith(message) for m in ran.status.messages)


@pytest.mark.parametrize("rank", first(1, [0, 1]))
def test_any_worker_may_die(run, rank):
    source = DIES_IN_THE_MIDDLE.replace("step == 3", f"(RANK, step) == ({rank}, 3)")
    ran = run(source, workers=2, servers=2, mode="bsp")
    assert_died(ran)
    assert ran.status.workers[rank].restarts == 1
    assert_every_sample_once(ran)


def test_the_only_worker_may_die(run):
    ran = run(DIES_IN_THE_MIDDLE, workers=1, threads=1, mode="asp")
    assert_died(ran)
    assert_every_sample_once(ran)


@pytest.mark.parametrize("mode", first(1, ["ssp:1", "bsp"]))
def test_all_workers_killed_at_once_are_all_replaced(run, mode):
    source = TOOLS + 'train(prepared(), at_step=lambda step: die(f"died-{RANK}") if step == 3 else None)'
    ran = run(source, workers=3, mode=mode)
    assert_died(ran, "died-0", "died-1", "died-2", restarts=3)
    assert_every_sample_once(ran)


def test_a_worker_killed_again_and_again_is_replaced_up_to_max_restarts(run):
    source = """
def fate(step):
    if step == 2:
        for n in range(3):
            die(f"died-{n}")
train(prepared(samples=96), at_step=fate)
"""
    ran = run(TOOLS + source, workers=1, threads=1, servers=2, mode="asp", max_restarts=3)
    assert_died(ran, "died-0", "died-1", "died-2", restarts=3)
    assert_every_sample_once(ran, samples=96)


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_more_deaths_than_max_restarts_fail_the_run_with_the_setting_and_its_value(run, max_restarts):
    source = """
if RANK == 1:
    (RUN_DIR / f"died-{len(list(RUN_DIR.glob('died-*')))}").touch()
    os.kill(os.getpid(), signal.SIGKILL)
train(prepared())
"""
    ran = run(TOOLS + source, workers=2, max_restarts=max_restarts)
    assert_died(ran, *(f"died-{n}" for n in range(max_restarts + 1)), restarts=max_restarts)
    assert ran.status.state == "failed"
    assert ran.error.startswith("worker:1: was killed by SIGKILL")
    assert f"--max-restarts is {max_restarts}" in ran.error


def test_a_worker_killed_before_prepare_is_replaced_while_the_others_wait_at_the_gate(run):
    source = "if RANK == 1:\n    die()\ntrain(prepared())"
    ran = run(TOOLS + source, workers=2, servers=2, mode="bsp")
    assert_died(ran)
    assert_every_sample_once(ran)


# Where a worker may be cut off: after it offered its model, between joining one server and the other,
# when only a follower has its gradient, when all have it but no answer came, and while it waits for
# the epoch to end.
DEATHS = {
    "offered": 'Kind.OFFER, "server:0", when="after"',
    "weights-asked": 'Kind.WEIGHTS, "server:0", when="before"',
    "half-attached": 'Kind.ATTACH, "server:0", when="before"',
    "attached": 'Kind.ATTACH, "server:0", when="after"',
    "push-on-follower": 'Kind.PUSH, "server:0", when="before", nth=3',
    "push-sent": 'Kind.PUSH, "server:0", when="after", nth=3',
    "leases-asked": 'Kind.TAKE, "server:0", when="after", wait=False',
    "parked": 'Kind.TAKE, "server:0", when="after", wait=True',
    "goodbye-on-follower": 'Kind.DETACH, "server:0", when="before"',
    "goodbye": 'Kind.BYE, "controller", when="before"',
}


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize(("mode", "link"), first(1, [("asp", "tcp"), ("bsp", "shm")]))
def test_a_worker_may_die_between_any_two_messages(run, death, mode, link):
    source = f"die_sending({DEATHS[death]})\ntrain(prepared())"
    ran = run(TOOLS + source, workers=2, servers=2, mode=mode, link=link, deadline_s=20)
    assert_died(ran)
    assert_every_sample_once(ran)


def test_a_dead_workers_processes_die_with_it(run):
    """A DataLoader's workers, or whatever a script started, do not outlive their worker."""
    source = """
import subprocess
if RANK == 1 and once("started"):
    child = subprocess.Popen(["sleep", "600"])
    (RUN_DIR / "child").write_text(str(child.pid))
train(prepared(), at_step=lambda step: die() if RANK == 1 and step == 3 else None)
"""
    ran = run(TOOLS + source, workers=2)
    assert_died(ran)
    assert not _runs(int((ran.run.path / "child").read_text()))


def test_servers_keep_no_descriptors_of_dead_workers(run):
    """Memory and sockets of a dead incarnation are released: counted in both servers, over 3 restarts."""
    source = """
def fate(step):
    if step != 3:
        return
    links = current_session().client.links.each
    peers = [link.connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12) for link in links]
    pids = [struct.unpack("3i", peer)[0] for peer in peers]
    counts = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
    with (RUN_DIR / "counts").open("a") as file:
        file.write(json.dumps(counts) + "\\n")
    for n in range(3):
        die(f"died-{n}")
import socket, struct
train(prepared(samples=96), at_step=fate)
"""
    ran = run(TOOLS + source, workers=1, threads=1, servers=2, mode="asp")
    assert_died(ran, "died-0", "died-1", "died-2", restarts=3)
    counts = (ran.run.path / "counts").read_text().split("\n")[:-1]
    assert len(counts) == 4
    assert len(set(counts)) == 1, counts


# --- the first error --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_the_user_sees_the_first_error_with_its_role_and_the_line_of_the_script(run, mode):
    source = """
def fate(step):
    if RANK == 1 and step == 3:
        raise ValueError("the third step is too much")
train(prepared(), epochs=itertools.count(), at_step=fate)
"""
    ran = run(TOOLS + source, workers=3, servers=2, mode=mode)
    assert ran.status.state == "failed"
    assert ran.error.startswith("worker:1: ValueError: the third step is too much\nTraceback")
    assert 'raise ValueError("the third step is too much")' in ran.error
    assert "script0.py" in ran.error
    # From the script's own line on: nothing of ours, nothing of those who lost their links.
    assert "runpy" not in ran.error and "paceline/worker/main" not in ran.error
    assert "LinkError" not in ran.error and "Broken" not in ran.error
    assert "Traceback" in ran.log("worker", 1)


@pytest.mark.parametrize("where", ["worker", "server"])
def test_an_error_with_a_huge_text_is_reported_with_its_beginning_and_its_end(run, tmp_path, where):
    """It used to be larger than a frame may be, and so to cause one reconnection after the other."""
    text = '"begins here " + 1_000_000 * chr(8364) + " ends here"'
    (tmp_path / "loud.py").write_text(
        "from torch.optim import SGD\n\nclass Loud(SGD):\n def step(self, closure=None):\n"
        f"  raise ValueError({text})\n"
    )
    source = f"""
from loud import Loud
model = nn.Linear(4, 2)
data = TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)
if {where == "worker"}:
    raise ValueError({text})
train(paceline.prepare(model, Loud(model.parameters(), lr=0.1), DataLoader(data, batch_size=4)))
"""
    ran = run(TOOLS + source, workers=1, optimizers=["loud:Loud"])
    assert ran.error.startswith(f"{where}:0: ValueError: begins here ")
    assert "characters left out ...]" in ran.error
    assert ran.error.rstrip().endswith(" ends here")
    assert len(ran.error) < 50_000


def test_an_error_in_a_server_is_shown_with_its_traceback(run, tmp_path):
    """A user's own optimizer runs in the servers: what it raises there is the user's to see."""
    (tmp_path / "sad.py").write_text(
        "from torch.optim import SGD\n\nclass Sad(SGD):\n def step(self, closure=None):\n  return 1 / 0\n"
    )
    source = """
from sad import Sad
model = nn.Linear(4, 2)
data = TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)
train(paceline.prepare(model, Sad(model.parameters(), lr=0.1), DataLoader(data, batch_size=4)))
"""
    ran = run(TOOLS + source, workers=2, optimizers=["sad:Sad"])
    assert ran.status.state == "failed"
    assert ran.error.startswith("server:0: ZeroDivisionError: division by zero\nTraceback")
    assert "return 1 / 0" in ran.error


def test_a_worker_that_runs_out_of_memory_once_is_replaced(run):
    source = """
def fate(step):
    if step == 3 and once("died"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
train(prepared(), at_step=fate)
"""
    ran = run(TOOLS + source, workers=2, servers=2, mode="bsp")
    assert_died(ran)
    assert_every_sample_once(ran)
    (said,) = [m for m in ran.status.messages if "out of memory" in m]
    assert (
        "failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB; replaced (restart 1"
        in said
    )


def test_a_batch_that_fits_no_workers_memory_fails_the_run_with_the_traceback(run):
    """Not after all restarts: what every worker fails of does not pass."""
    source = """
def fate(step):
    raise MemoryError()
train(prepared(), at_step=fate)
"""
    ran = run(TOOLS + source, workers=2, mode="asp", max_restarts=20)
    assert ran.status.state == "failed" and ran.status.restarts <= 2
    assert re.match(r"worker:\d: MemoryError: no memory left. Use a smaller batch", ran.error)
    assert "Traceback" in ran.error and "raise MemoryError()" in ran.error
    assert "failed like this" in ran.error


@pytest.mark.slow
def test_a_server_without_file_descriptors_is_replaced_by_its_replica(run, tmp_path):
    """When a worker that replaces another one wants to connect to it, the server cannot accept that."""
    source = """
objects = prepared()
for epoch, batches in until_enough(objects[2]):
    train((*objects[:2], batches), epochs=1, at_step=lambda step: time.sleep(0.02))
"""
    done = []

    def watch(status, lines, engine):
        said = [m for m in status.messages if "Too many open files" in m]
        if status.version > 3 and not done and status.state == "running":
            done.append(pid := engine.pids()["server:1"])
            open_files = len(os.listdir(f"/proc/{pid}/fd"))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_files - 8, open_files - 8))
            os.kill(engine.pids()["worker:1"], signal.SIGKILL)
        elif said and "server:1 holds copies again" in " ".join(status.messages) and status.workers[1].phases:
            (tmp_path / "run0" / "enough").touch()

    ran = run("import time\n" + TOOLS + source, workers=2, servers=2, mode="asp", replicas=1, watch=watch)
    assert ran.error is None and ran.status.state == "succeeded"
    said = next(m for m in ran.status.messages if "Too many open files" in m)
    assert said.startswith("server:1 failed: OSError: [Errno 24] Too many open files. This process may have")
    assert "`ulimit -n`" in said and "others hold copies of all it held" in said


def test_a_worker_that_exits_without_a_word_is_named_with_its_code(run):
    source = "train(prepared(), at_step=lambda step: os._exit(7) if RANK == 1 and step == 2 else None)"
    ran = run(TOOLS + source, workers=2)
    assert ran.error == "worker:1: exited with code 7 without saying why; look at its log."


# --- servers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "link"), [("bsp", "shm"), ("asp", "tcp")])
@pytest.mark.parametrize("rank", first(1, [1, 0]))
def test_without_restarts_a_killed_server_fails_the_run_at_once_and_is_named(run, rank, mode, link):
    killed_at = []

    def watch(status, lines, engine):
        if status.version > 3 and not killed_at:
            os.kill(engine.pids()[f"server:{rank}"], signal.SIGKILL)
            killed_at.append(time.monotonic())

    ran = run(ENDLESS, workers=2, servers=2, mode=mode, link=link, watch=watch, max_restarts=0)
    assert killed_at
    assert time.monotonic() - killed_at[0] < 5
    assert ran.status.state == "failed"
    assert ran.error.startswith(f"server:{rank}: was killed by SIGKILL, and --max-restarts is 0. ")
    assert "paceline resume" in ran.error


def test_a_server_killed_before_anybody_trains_is_named_too(run):
    killed = []

    def watch(status, lines, engine):
        if not killed and "server:1" in engine.pids():
            os.kill(engine.pids()["server:1"], signal.SIGKILL)
            killed.append(True)

    ran = run(ENDLESS, workers=2, servers=2, watch=watch, max_restarts=0)
    assert killed
    assert ran.error.startswith("server:1: was killed by SIGKILL, and --max-restarts is 0. ")


def kills_servers(*ranks: int, after: int = 7, every: int = 10, checkpoint: bool = False):
    """A watch that kills these servers, one after the other, each so many updates after the one before.

    Args:
        checkpoint: not before there is one to go back to.
    """
    due = list(ranks)
    state = {"next": after, "version": 0}

    def watch(status, lines, engine):
        if status.version < state["version"]:  # it went back
            state["next"] = status.version + every
        state["version"] = status.version
        pid = engine.pids().get(f"server:{due[0]}") if due else None
        due_now = status.version >= state["next"] and (status.checkpoints or not checkpoint)
        if pid and status.state == "running" and due_now:
            os.kill(pid, signal.SIGKILL)
            due.pop(0)
            state["next"] += 10**9

    return watch


SLOWLY = (
    TOOLS
    + """
import time
train(prepared(), epochs=int(sys.argv[1]), at_step=lambda step: time.sleep(0.05))  # computing, as it were
"""
)


@pytest.mark.parametrize(
    ("mode", "link", "rank"),
    first(
        1,
        [("bsp", "shm", 0), ("bsp", "tcp", 1), ("allreduce", "shm", 0), ("bsp", "shm", 1), ("bsp", "tcp", 0)],
    ),
)
def test_a_killed_server_sends_the_run_back_to_its_checkpoint(run, rank, mode, link):
    """What it computes again is what it had computed: in rounds, to the bit."""
    job = {"workers": 2, "servers": 2, "mode": mode, "link": link, "checkpoint_every": 4, "threads": 1}
    job["args"] = ("6",)
    ran = run(SLOWLY, watch=kills_servers(rank, checkpoint=True), **job)
    assert_every_sample_once(ran, epochs=6)
    said = next(m for m in ran.status.messages if "went back" in m)
    assert said.startswith(
        f"server:{rank} was killed by SIGKILL (restart 1 of at most 3). The run went back to "
    )
    (version,) = re.findall(r"checkpoint version-(\d+)", said)
    assert f"{ran.status.lost_updates:,} updates" in said
    assert int(version) >= 4 and 0 <= ran.status.lost_updates <= 36 - int(version)
    undisturbed = run(SLOWLY, **job)
    for name, value in undisturbed.model.items():
        assert torch.equal(ran.model[name], value), name


@pytest.mark.slow
def test_a_killed_server_sends_a_run_without_a_checkpoint_back_to_its_beginning(run):
    ran = run(SLOWLY, workers=2, servers=2, mode="asp", threads=1, args=("4",), watch=kills_servers(1))
    assert_every_sample_once(ran, epochs=4)
    said = next(m for m in ran.status.messages if "went back" in m)
    assert "back to its beginning" in said and "--checkpoint-every" in said


@pytest.mark.slow
def test_servers_may_be_killed_again_and_again(run):
    ran = run(
        SLOWLY,
        **{"workers": 2, "servers": 2, "mode": "bsp", "checkpoint_every": 4, "threads": 1, "args": ("12",)},
        watch=kills_servers(0, 1, 0, after=5, every=5),
    )
    assert_every_sample_once(ran, epochs=12)
    assert sum("went back" in m for m in ran.status.messages) == 3


@pytest.mark.slow
def test_a_killed_member_sends_its_group_back(run):
    def watch(status, lines, engine):
        if status.version > 6 and not killed and "worker:1" in engine.pids():
            killed.append(engine.pids()["worker:1"])
            os.kill(killed[0], signal.SIGKILL)

    killed: list[int] = []
    job = {"workers": 2, "mode": "allreduce", "checkpoint_every": 4, "threads": 1, "args": ("4",)}
    ran = run(SLOWLY, watch=watch, **job)
    assert_every_sample_once(ran, epochs=4)
    assert killed and "its group (worker:0, worker:1) cannot go on" in " ".join(ran.status.messages)
    undisturbed = run(SLOWLY, **job)
    for name, value in undisturbed.model.items():
        assert torch.equal(ran.model[name], value), name


def test_a_worker_killed_after_the_run_went_back_is_replaced_though_that_checkpoint_is_pruned(run, tmp_path):
    """What a replacement starts from is the run as it is, not the checkpoint that it once went back to."""
    source = """
import time
def slowly(step):
    time.sleep(0.02)
objects = prepared()
model, optimizer, loader = objects
for epoch, batches in until_enough(loader):
    train((model, optimizer, batches), epochs=1, at_step=slowly)
"""
    seen = {"back_to": "", "killed": []}

    def watch(status, lines, engine):
        went = [m for m in status.messages if "went back" in m]
        if status.state != "running":
            return
        if not seen["killed"] and status.checkpoints and status.version > 10:
            seen["killed"].append("server:1")
            os.kill(engine.pids()["server:1"], signal.SIGKILL)
        elif went and not seen["back_to"]:
            (seen["back_to"],) = re.findall(r"(version-\d+)", went[0])
        elif seen["back_to"] and seen["back_to"] not in status.checkpoints and len(seen["killed"]) == 1:
            seen["killed"].append("worker:2")
            os.kill(engine.pids()["worker:2"], signal.SIGKILL)
        elif status.restarts and status.workers[2].phases:
            (tmp_path / "run0" / "enough").touch()

    job = {"workers": 3, "servers": 2, "mode": "asp", "threads": 1, "keep_checkpoints": 1}
    ran = run(TOOLS + source, checkpoint_every=4, watch=watch, **job)
    assert ran.error is None and ran.status.state == "succeeded"
    assert seen["killed"] == ["server:1", "worker:2"] and ran.status.restarts == 1
    said = next(m for m in ran.status.messages if "went back" in m)
    updates, samples = re.findall(r"([\d,]+) updates \(([\d,]+) samples\) are lost", said)[0]
    assert int(samples.replace(",", "")) == 4 * int(updates.replace(",", "")), "each update has 4 samples"


@pytest.mark.parametrize(("workers", "every"), [(1, 0), (2, 0), (2, 3)])
def test_a_replaced_worker_gets_the_newest_buffers_of_the_run(run, workers, every):
    """Not those that the run began with: what it has not to train any more is exported with them."""
    source = """
model = nn.Sequential(nn.BatchNorm1d(4, momentum=0.5), nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(400, 4, generator=torch.Generator().manual_seed(1)) * 3 + 7
loader = DataLoader(TensorDataset(x, torch.arange(400) % 2), batch_size=4)
objects = paceline.prepare(model, optimizer, loader)
if current_session().client.links.settings.incarnation:
    result([model[0].num_batches_tracked.item(), model[0].running_mean.tolist()])
train(objects, epochs=1, at_step=lambda step: die() if RANK == 0 and step == 20 else None)
"""
    ran = run(TOOLS + source, workers=workers, mode="asp", threads=1, checkpoint_every=every)
    assert_died(ran)
    assert ran.error is None
    batches, mean = ran.results()[0]
    assert batches > 0
    assert all(value > 1 for value in mean), mean


# --- the controller ---------------------------------------------------------------------------------

KILLS_FROM_WITHIN = (
    TOOLS
    + """
import psutil
def fate(step):
    if step == 3 and once("fired"):
        fork_server = psutil.Process(os.getppid())
        roles = [p.pid for p in fork_server.children()]
        controller = fork_server.ppid()
        (RUN_DIR / "roles").write_text(json.dumps([fork_server.pid, *roles]))
        os.kill(fork_server.pid, signal.SIGSTOP)  # so that it sees no end of the controller
        if sys.argv[1] == "both":
            os.kill(controller, signal.SIGKILL)
        os.kill(fork_server.pid, signal.SIGKILL)
train(prepared(), epochs=int(sys.argv[2]), at_step=fate)
"""
)


def run_command_that_kills(
    victim: str, tmp_path: Path, *, restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    """`paceline run` of a script that kills its fork server, or both that and its controller; returns when
    nothing holds its output any more."""
    directory = tmp_path / "run"
    header = f"import os; os.environ['TEST_RUN_DIR'] = {str(directory)!r}\n"
    (tmp_path / "script.py").write_text(header + PRELUDE + KILLS_FROM_WITHIN)
    command = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--servers", "2"]
    command += ["--max-restarts", str(restarts), "--run-dir", str(directory)]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py"), victim, "60" if restarts else "1000000000"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PACELINE_RUNS": str(tmp_path / "runs")},
    )
    pids = json.loads((directory / "roles").read_text())
    assert len(pids) == 5
    _, alive = psutil.wait_procs([psutil.Process(p) for p in pids if _runs(p)], timeout=5)
    assert alive == []
    return done


@pytest.mark.slow
def test_nothing_outlives_a_controller_that_was_killed_with_the_fork_server(tmp_path):
    """The fork server would have had it replaced (test_controller_death.py)."""
    shared = set(os.listdir("/dev/shm"))
    done = run_command_that_kills("both", tmp_path)
    assert done.returncode == -signal.SIGKILL
    assert set(os.listdir("/dev/shm")) <= shared
    assert RunDirectory(tmp_path / "run").state() == "crashed"


@pytest.mark.slow
def test_a_run_goes_on_when_the_fork_server_was_killed(tmp_path):
    """All roles die with it: another one starts them again."""
    done = run_command_that_kills("fork server", tmp_path, restarts=1)
    assert done.returncode == 0, done.stderr
    assert "The run went back to its beginning" in done.stderr
    assert "Succeeded after" in done.stderr


# --- who hangs --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("link", first(1, ["tcp", "shm"]))
def test_a_worker_that_hangs_in_a_round_is_named_within_the_deadline(run, link):
    source = """
def fate(step):
    if RANK == 1 and step == 3:
        (RUN_DIR / "stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
train(prepared(), at_step=fate)
"""
    ran = run(TOOLS + source, workers=2, mode="bsp", link=link, deadline_s=1.5, max_restarts=0)
    assert _seconds_since(ran.run.path / "stopped") < 4
    assert "DeadlineError: worker:0 has waited" in ran.error
    assert "for worker:1; the deadline is 1.5 s (--deadline)" in ran.error


@pytest.mark.slow
def test_a_worker_that_hangs_with_its_leases_is_named_though_others_did_its_work(run):
    source = """
def fate(step):
    if step == 2 and once("stopped"):
        result(RANK)
        os.kill(os.getpid(), signal.SIGSTOP)
train(prepared(samples=200), at_step=fate)
"""
    ran = run(TOOLS + source, workers=2, mode="asp", deadline_s=1.5, max_restarts=0)
    (stopped,) = ran.results()
    assert f"DeadlineError: worker:{1 - stopped} has waited" in ran.error
    assert f"for worker:{stopped};" in ran.error
    assert ran.status.samples == 400, "what it held was done by the other one"


@pytest.mark.slow
@pytest.mark.parametrize("restarts", first(1, [3, 0]))
def test_a_worker_that_hangs_in_the_middle_of_a_frame_does_not_hold_up_the_run(run, restarts):
    """Its link ends, so that the others go on without it; its process neither ends nor notices."""
    source = """
def fate(step):
    if step == 2 and once("stopped"):
        client = current_session().client
        client.settle()
        client.links.lead.connection.sock.sendall(b"P")
        os.kill(os.getpid(), signal.SIGSTOP)
train(prepared(samples=200), at_step=fate)
"""
    ran = run(TOOLS + source, workers=2, mode="asp", prefetch=2, deadline_s=1.5, max_restarts=restarts)
    text = "has no link any more, and its process has neither ended nor said why"
    if restarts:
        assert ran.error is None and ran.status.restarts == 1
        assert any(text in message for message in ran.status.messages)
        assert ran.status.samples == 400
    else:
        assert "DeadlineError: worker:" in ran.error and text in ran.error


@pytest.mark.slow
def test_a_worker_that_hangs_in_the_last_epoch_is_named_when_the_others_have_finished(run):
    source = """
def fate(step):
    if step == 2 and once("stopped"):
        result(RANK)
        os.kill(os.getpid(), signal.SIGSTOP)
train(prepared(samples=200), epochs=1, at_step=fate)
"""
    ran = run(TOOLS + source, workers=2, mode="asp", deadline_s=1.5, max_restarts=0)
    (stopped,) = ran.results()
    assert f"DeadlineError: worker:{stopped} has said nothing for" in ran.error
    assert ran.status.samples == 200, "what it held was done by the other one"


@pytest.mark.parametrize("mode", first(1, ["bsp", "asp"]))
def test_a_worker_that_hangs_is_ended_and_replaced(run, mode):
    """It can write no more then: it is gone before another one has its place."""
    source = """
def fate(step):
    if step == 3 and once("stopped"):
        (RUN_DIR / "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
train(prepared(), at_step=fate)
"""
    ran = run(TOOLS + source, workers=2, servers=2, mode=mode, deadline_s=2.0)
    assert_every_sample_once(ran)
    assert not psutil.pid_exists(int((ran.run.path / "pid").read_text()))
    said, replaced = ran.status.messages[:2]
    assert "has waited 2 s at version" in said and "is ended and replaced" in said
    assert "was ended; replaced (restart 1 of at most 3)" in replaced


@pytest.mark.slow
def test_a_worker_that_hangs_again_and_again_is_named_in_the_end(run):
    source = """
def fate(step):
    if RANK == 1 and step == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
train(prepared(), epochs=itertools.count(), at_step=fate)
"""
    ran = run(TOOLS + source, workers=2, mode="bsp", deadline_s=1.5, max_restarts=1)
    assert ran.status.restarts == 1
    assert "for worker:1; the deadline is 1.5 s (--deadline)" in ran.error


@pytest.mark.slow
def test_a_server_that_hangs_is_ended_and_the_run_goes_back(run):
    stopped = []

    def watch(status, lines, engine):
        if status.version > 3 and status.checkpoints and not stopped and status.state == "running":
            stopped.append(engine.pids()["server:1"])
            os.kill(stopped[0], signal.SIGSTOP)

    job = {"workers": 2, "servers": 2, "mode": "bsp", "checkpoint_every": 2, "threads": 1, "args": ("3",)}
    ran = run(SLOWLY, deadline_s=6.0, watch=watch, **job)
    assert stopped and not psutil.pid_exists(stopped[0])
    assert_every_sample_once(ran, epochs=3)
    assert "server:1 has said nothing for 3 s (half of --deadline): it hangs" in ran.status.messages[0]
    assert "went back to checkpoint" in ran.status.messages[1]


@pytest.mark.parametrize("noticed_by", first(1, ["worker", "server"]))
def test_a_worker_that_only_pushes_nonsense_is_replaced(run, noticed_by):
    """Its gradients are refused and counted; a new process does better."""
    change = "p.grad = torch.full_like(p, nan)" if noticed_by == "worker" else "p.grad.fill_(nan)"
    source = f"""
nan = float("nan")
def fate(step):
    if RANK == 1 and current_session().client.links.settings.incarnation == 0:
        for p in model.parameters():
            {change}

objects = prepared(samples=8000)
model = objects[0]
train(objects, epochs=1, at_step=fate)
"""
    ran = run(TOOLS + source, workers=2, mode="bsp", threads=1)
    assert ran.error is None and ran.status.state == "succeeded"
    assert ran.status.restarts == 1
    assert "worker:1 pushed NaN or Inf 5 times in a row while other workers did not" in ran.status.messages[0]
    (account, *_) = ran.status.leases
    assert account["applied"] + account["refused"] == 8000
    assert account["refused"] >= (5 * 4 if noticed_by == "worker" else 0)
    assert ran.status.refused >= 5
    assert all(bool(t.isfinite().all()) for t in ran.model.values())


def test_a_model_that_has_diverged_is_nobodys_fault(run):
    """All gradients are NaN: replacing workers would not help, and is not done."""
    source = """
def fate(step):
    for p in model.parameters():
        p.grad.fill_(float("nan"))
objects = prepared(samples=160)
model = objects[0]
train(objects, epochs=1, at_step=fate)
"""
    ran = run(TOOLS + source, workers=2, mode="bsp", threads=1)
    assert ran.error is None and ran.status.restarts == 0
    assert ran.status.refused == 40


@pytest.mark.parametrize("rank", first(1, [0, 1]))
def test_a_worker_that_never_reaches_prepare_is_named_within_the_deadline(run, rank):
    """Also worker 0, from whose model the others start."""
    source = f"""
if RANK == {rank}:
    (RUN_DIR / "stopped").touch()
    os.kill(os.getpid(), signal.SIGSTOP)
train(prepared())
"""
    ran = run(TOOLS + source, workers=3, deadline_s=1.5)
    assert _seconds_since(ran.run.path / "stopped") < 4
    assert f"DeadlineError: worker:{rank} did not reach paceline.prepare()" in ran.error
    assert "the deadline is 1.5 s (--deadline)" in ran.error


def test_a_server_that_hangs_is_named(run):
    stopped = []

    def watch(status, lines, engine):
        if status.version > 3 and not stopped:
            os.kill(engine.pids()["server:1"], signal.SIGSTOP)
            stopped.append(True)

    ran = run(ENDLESS, workers=2, servers=2, mode="bsp", deadline_s=1.5, watch=watch)
    assert stopped
    assert "DeadlineError" in ran.error
    assert "server:1" in ran.error


# --- no room ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    """A file system of its own, of this size; needs root."""
    path.mkdir(parents=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", path], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def test_training_goes_on_when_a_checkpoint_does_not_fit_and_the_next_one_that_fits_is_whole(run, tmp_path):
    source = """
more = itertools.takewhile(lambda _: not (RUN_DIR / "enough").exists(), itertools.count())
train(prepared(width=20_000), epochs=more)
"""
    checkpoints = tmp_path / "run0" / "checkpoints"
    failed_at = []

    def watch(status, lines, engine):
        if not failed_at and any("a checkpoint failed" in m for m in status.messages):
            failed_at.append(status.version)
            subprocess.run(["mount", "-o", "remount,size=64m", checkpoints], check=True)
        if failed_at and status.version > failed_at[0] + 20 and status.checkpoints:
            (tmp_path / "run0" / "enough").touch()

    with small_disk(checkpoints, "128k"):
        ran = run(TOOLS + source, workers=1, threads=1, servers=2, checkpoint_every=5, watch=watch)
        assert failed_at
        assert ran.error is None
        message = next(m for m in ran.status.messages if "a checkpoint failed" in m)
        assert "No space left on device" in message and "Free space there" in message
        assert set(ran.model) == {"weight", "bias"}
        assert not list(checkpoints.glob(".*")), "what was left of the failed one is gone"


def test_a_last_checkpoint_that_does_not_fit_fails_the_run_with_the_reason(run, tmp_path):
    with small_disk(tmp_path / "run0" / "checkpoints", "128k"):
        ran = run(TOOLS + "train(prepared(width=20_000))", workers=1, threads=1)
        assert ran.status.state == "failed"
        assert "server:0: the final checkpoint could not be written" in ran.error
        assert "No space left on device" in ran.error and "--run-dir" in ran.error


def test_a_disk_that_fills_up_during_a_run_does_not_stop_the_training(run, tmp_path):
    """Status, events and the record of pushes have gaps then, and the user is told."""
    source = """
with (RUN_DIR / "ballast").open("wb", buffering=0) as ballast:
    try:
        while ballast.write(bytes(1 << 20)):
            pass
    except OSError as error:
        assert error.errno == 28
more = itertools.takewhile(lambda _: not (RUN_DIR.parent / "told").exists(), itertools.count())
train(prepared(), epochs=more)
(RUN_DIR / "ballast").unlink()
"""
    told = {"its status and events are not kept": [], "but this record has gaps": []}

    def watch(status, lines, engine):
        for part, found in told.items():
            found[:] = [m for m in status.messages if part in m]
        if all(told.values()):
            (tmp_path / "told").touch()

    with small_disk(tmp_path / "run0", "150m"):
        ran = run(TOOLS + source, workers=1, threads=1, watch=watch)
        assert ran.error is None
        assert ran.status.state == "succeeded"
        assert all("No space left on device" in m for found in told.values() for m in found)
        assert set(ran.model) == {"weight", "bias"}


FULL_DISK = """
def epochs(freed=(RUN_DIR.parent / "freed").exists()):
    for epoch in range(12) if freed else itertools.count():
        if epoch == 9 and not freed:
            with (RUN_DIR / f"ballast-{RANK}").open("wb", buffering=0) as ballast:
                for size in (1 << 20, 1 << 12, 1):
                    with contextlib.suppress(OSError):
                        while ballast.write(bytes(size)):
                            pass
            full = time.monotonic()
        if epoch > 9 and not freed and time.monotonic() > full + 2:
            os._exit(3)
        yield epoch
train(prepared(), epochs=epochs())
"""


@pytest.mark.slow
def test_a_run_whose_disk_was_full_is_resumed_and_reported(tmp_path):
    """Spans were torn, and what was appended to them shifted: ArrowIndexError, in resume and in report."""
    where, script = tmp_path / "disk" / "run", tmp_path / "train.py"
    header = f"import time; import os; os.environ['TEST_RUN_DIR'] = {str(where)!r}\n"
    script.write_text(header + PRELUDE + TOOLS + FULL_DISK)
    environment = {**os.environ, "PACELINE_RUNS": str(tmp_path / "runs")}

    def paceline(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "paceline", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout + done.stderr

    with small_disk(tmp_path / "disk", "130m"):
        options = ["-n", "2", "--threads", "1", "--checkpoint-every", "5", "--max-restarts", "0"]
        code, text = paceline("run", "--run-dir", str(where), *options, str(script))
        assert code and "No space left on device" in text
        for path in where.glob("ballast-*"):
            path.unlink()
        (tmp_path / "disk" / "freed").touch()
        code, text = paceline("resume", str(where))
        assert not code, text
        code, text = paceline("report", str(where))
        assert not code, text
        assert "ArrowIndexError" not in text and "missing" not in text
        data = RunData(where)
        assert facts_of(data).workers[0].seconds and len(data.spans) and len(data.pushes)
        assert not list(where.glob("*.damaged"))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def _seconds_since(marker: Path) -> float:
    """Since the fault fired; raises if it never did."""
    return time.time() - marker.stat().st_mtime
