"""Ending early: workers that agree to stop, limits, and scripts that just end."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.integration.conftest import PRELUDE
from tests.integration.test_faults import TOOLS
from tests.speed import first

# Each worker has buffers of its own, so each finds another loss: they disagree on when to stop.
EARLY_STOPPING = (
    TOOLS
    + """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(x, torch.arange(48) % 2), batch_size=4, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
x, y = torch.randn(64, 4, generator=torch.Generator().manual_seed(2)), torch.arange(64) % 2
losses, epochs = [], 0
for epoch in range(100):
    model.train()
    train((model, optimizer, loader), epochs=1)
    epochs += 1
    model.eval()
    with torch.no_grad():
        losses.append(nn.functional.cross_entropy(model(x), y).item())
    # Sure to come, and at another epoch on each worker.
    if paceline.should_stop(epoch >= 3 + 2 * RANK):
        break
result({"epochs": epochs, "losses": losses, "after": paceline.should_stop()})
"""
)


@pytest.mark.parametrize("mode", first(3, ["bsp", "local:4", "allreduce", "asp", "ssp:1"]))
def test_workers_that_disagree_on_when_to_stop_end_together(run, mode):
    ran = run(EARLY_STOPPING, workers=2, mode=mode)
    assert ran.error is None and ran.status.state == "succeeded"
    one, two = ran.results()[0], ran.results()[1]
    assert one["losses"] != two["losses"]  # the buffers differ
    assert one["after"] and two["after"]
    assert one["epochs"] == 4
    if mode in ("bsp", "local:4", "allreduce"):
        assert two["epochs"] == 4
    else:
        assert two["epochs"] <= 6
    assert ran.status.ended_early == "worker:0's condition in paceline.should_stop() was true"
    assert not any("ended its script" in message for message in ran.status.messages)
    assert ran.model


@pytest.mark.parametrize("mode", ["bsp", "hybrid:asp", "hogwild"])
def test_a_stop_on_worker_0s_word(run, mode):
    source = """
model, optimizer, loader = prepared()
for epoch in itertools.count():
    train((model, optimizer, loader), epochs=1)
    if paceline.should_stop(RANK != 0 or epoch == 2, who="main"):
        break
result(epoch)
"""
    ran = run(TOOLS + source, workers=2, mode=mode, **({"groups": 1} if "hybrid" in mode else {}))
    assert ran.error is None
    assert ran.results()[0] == 2
    if mode != "hogwild":
        assert ran.results()[1] == 2
    assert ran.model


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"mode": "backup:1", "workers": 3}, marks=pytest.mark.slow),
        pytest.param({"mode": "diloco:2"}, marks=pytest.mark.slow),
        pytest.param({"mode": "easgd:2"}, marks=pytest.mark.slow),
        pytest.param({"mode": "downpour:2,2"}, marks=pytest.mark.slow),
        {"mode": "dogwild"},
        {"mode": "sandblaster"},
        {"mode": "bsp", "overlap": True, "link": "tcp", "servers": 2},
        {"mode": "asp", "prefetch": 2, "link": "tcp"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_every_mode_and_link_has_an_end(run, settings):
    source = """
model, optimizer, loader = prepared()
for epoch in itertools.count():
    train((model, optimizer, loader), epochs=1)
    if paceline.should_stop(epoch >= 2 + RANK, who="all"):
        break
result(epoch)
"""
    ran = run(TOOLS + source, **{"workers": 2, **settings})
    assert ran.error is None
    assert ran.status.ended_early == "every worker's condition in paceline.should_stop() was true"
    ended = set(ran.results().values())
    if settings["mode"] in ("diloco:2", "sandblaster", "bsp"):
        assert ended == {3}
    assert ran.model


def test_streams_end_with_a_limit(run):
    source = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.randn(4) for _ in itertools.count())
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(Stream(), batch_size=4))
for x in loader:
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
result(paceline.should_stop())
"""
    ran = run(source, workers=2, mode="bsp", max_updates=7)
    assert ran.error is None and ran.status.version == 7
    assert ran.results() == {0: True, 1: True}


def test_a_vote_at_every_step_ends_the_inner_loop_and_then_the_script(run):
    source = """
model, optimizer, loader = prepared(samples=22)  # the last round has a batch for one worker only
steps = 0
for epoch in itertools.count():
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        result(steps)
        if paceline.should_stop(steps == 8):
            break
"""
    ran = run(TOOLS + source, workers=2, mode="bsp")
    assert ran.error is None
    assert ran.results() == {0: 8, 1: 8}


def test_the_example_of_early_stopping(run):
    source = (Path(__file__).parents[2] / "examples" / "early_stopping.py").read_text()
    ran = run(source, workers=2, mode="bsp", args=("--epochs", "40", "--patience", "1"))
    assert ran.error is None
    assert ran.status.ended_early is not None and ran.status.epoch < 40
    assert "best validation loss 0." in ran.log("worker", 0)


# --- limits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", first(3, ["bsp", "asp", "allreduce", "hybrid:bsp"]))
def test_a_limit_on_updates_ends_a_script_that_never_asks(run, mode):
    groups = {"groups": 2} if "hybrid" in mode else {}
    source = """
model, optimizer, loader = prepared()
for epoch in itertools.count():
    train((model, optimizer, loader), epochs=1)
    result(epoch)
"""
    ran = run(TOOLS + source, workers=2, mode=mode, max_updates=15, **groups)
    assert ran.error is None and ran.status.state == "succeeded"
    assert ran.status.ended_early == "it made 15 updates (--max-updates)"
    exact = {"bsp": 15, "allreduce": 16, "hybrid:bsp": 16}  # a group hears of it at its next step
    assert ran.status.version == exact.get(mode, ran.status.version)
    assert 15 <= ran.status.version <= 20
    # The code behind the loop that ended was run.
    assert ran.results()
    assert ran.model


@pytest.mark.parametrize("asks", [True, False])
def test_without_a_loader_a_limit_ends_the_script_behind_a_step_or_at_its_question(run, asks):
    source = f"""
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = paceline.prepare(model, optimizer)
for step in itertools.count():
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if {asks} and step % 10 == 9 and paceline.should_stop():
        break
result(step)
"""
    ran = run(source, workers=2, mode="bsp", max_updates=25)
    assert ran.error is None
    assert ran.results() == ({0: 29, 1: 29} if asks else {})
    assert ran.status.version == (30 if asks else 25)
    assert ran.model


def test_a_resumed_run_goes_on_beyond_the_stop_that_it_ended_with(run):
    source = TOOLS + "train(prepared(), epochs=4)"
    ran = run(source, workers=2, mode="bsp", max_updates=10)
    assert ran.status.version == 10
    more = run(source, workers=2, mode="bsp", resume=ran)
    assert more.error is None and more.status.ended_early is None
    assert more.status.version == 24
    assert [account["applied"] for account in more.status.leases[:4]] == [48] * 4


@pytest.mark.parametrize("mode", first(1, ["asp", "bsp"]))
def test_the_time_limit_ends_loops_in_the_middle_of_an_epoch(run, mode):
    source = """
model, optimizer, loader = prepared(samples=1_000_000)
train((model, optimizer, loader), epochs=1)
result(paceline.should_stop())
"""
    ran = run(TOOLS + source, workers=2, mode=mode, max_time_s=2.0)
    assert ran.error is None
    assert ran.status.ended_early == "its time was up (2 s, --max-time)"
    assert ran.results() == {0: True, 1: True}
    assert ran.model


@pytest.mark.slow
def test_the_time_limit_on_the_command_line_ends_the_run_in_order(tmp_path):
    script = tmp_path / "train.py"
    source = """
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(48, 4), torch.arange(48) % 2), batch_size=4)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    while True:
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if paceline.should_stop():
            break
    print("worker", RANK, "is behind its loop")
    """
    header = f"import os; os.environ['TEST_RUN_DIR'] = {str(tmp_path)!r}\n"
    script.write_text(header + PRELUDE + textwrap.dedent(source))
    env = {**os.environ, "PACELINE_RUNS": str(tmp_path / "runs"), "COLUMNS": "200"}

    def command(*words: str) -> "subprocess.CompletedProcess[str]":
        call = [sys.executable, "-m", "paceline", *words]
        return subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, timeout=100, env=env)

    done = command("run", "--workers", "2", "--mode", "bsp", "--max-time", "0.05m", "train.py")
    assert done.returncode == 0, done.stderr
    assert "It ended early: its time was up (3 s, --max-time)." in done.stderr
    assert "worker 0 is behind its loop" in done.stdout
    assert command("export", "last", "model.safetensors").returncode == 0


# --- scripts that just end ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "ending"),
    [("bsp", "sys.exit(0)"), ("local:2", "pass"), ("ssp:1", "pass"), ("asp", "sys.exit(0)")],
)
def test_when_one_script_ends_the_others_train_on_with_all_samples(run, mode, ending):
    source = f"""
objects = prepared()
if RANK == 1:
    train(objects, epochs=1)
    {ending}
else:
    train(objects, epochs=4)
"""
    ran = run(TOOLS + source, workers=3, mode=mode, deadline_s=20)
    assert ran.error is None and ran.status.state == "succeeded"
    assert [account["applied"] for account in ran.status.leases[:4]] == [48] * 4
    (said,) = [message for message in ran.status.messages if "ended its script" in message]
    assert said.startswith("worker:1 ended its script after ") and ", in epoch 1, while worker:" in said
    assert "goes on with epoch " in said and "paceline.should_stop(condition)" in said  # 2 or later
    assert ran.status.workers[1].state == "finished"


@pytest.mark.parametrize("mode", ["allreduce", "hybrid:asp"])
@pytest.mark.parametrize("rank", first(1, [0, 1]))
def test_when_a_members_script_ends_its_group_ends_in_order(run, mode, rank):
    source = f"""
import contextlib
model, optimizer, loader = prepared()
steps = 0
with contextlib.suppress(KeyboardInterrupt):
    for epoch in range(4):
        for x, y in loader:
            if RANK == {rank} and epoch == 1:
                raise KeyboardInterrupt
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
"""
    groups = {"groups": 2, "workers": 4} if "hybrid" in mode else {"workers": 2}
    ran = run(TOOLS + source, mode=mode, deadline_s=20, **groups)
    assert ran.error is None and ran.status.state == "succeeded"
    (said,) = [m for m in ran.status.messages if "cannot go on without it" in m]
    assert f"worker:{rank} ended its script while worker:{1 - rank} calls optimizer.step()" in said
    assert "paceline.should_stop(condition)" in said
    applied = [account["applied"] for account in ran.status.leases]
    assert applied[0] == 48
    if mode == "allreduce":
        assert ran.status.version == 6
    else:
        assert applied[:4] == [48] * 4  # the other group did the rest
    assert ran.model


# --- with faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", first(1, ["bsp", "asp"]))
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_worker_killed_at_its_vote_is_replaced_and_all_end(run, mode, when):
    source = f"""
import time
back = RUN_DIR / "back"
if RANK == 1:
    die_sending(Kind.VOTE, "server:0", when={when!r}, nth=2)
model, optimizer, loader = prepared()
if RANK == 1 and (RUN_DIR / "died").exists():
    back.touch()
for epoch in itertools.count():
    while RANK == 0 and epoch == 3 and not back.exists():
        time.sleep(0.01)
    train((model, optimizer, loader), epochs=1)
    if paceline.should_stop(epoch == 4):
        break
result(epoch)
"""
    ran = run(TOOLS + source, workers=2, mode=mode)
    assert ran.error is None and ran.status.restarts == 1
    assert (ran.run.path / "died").exists()
    one, two = ran.results()[0], ran.results()[1]
    assert one == two == 4 if mode == "bsp" else min(one, two) <= 4


@pytest.mark.parametrize("mode", first(1, ["bsp", "asp"]))
@pytest.mark.parametrize("when", ["heard", "answered"])
def test_a_lead_killed_at_a_vote_changes_no_answer(run, mode, when):
    """It dies when it has heard the first vote, or has sent the first verdict."""
    source = f"""
model, optimizer, loader = prepared()
from paceline.comm.worker_messages import VoteMessage
from paceline.worker.exchange.direct_exchange import DirectExchange

votes, vote = itertools.count(1), DirectExchange.ask_lead
def ask(self, question, answer):
    mine = isinstance(question, VoteMessage) and next(votes) == 2
    if mine and {when!r} == "heard" and once("died"):
        self.links.send(self.links.lead, question)  # heard twice, too
        kill()
    reply = vote(self, question, answer)
    if mine and {when!r} == "answered" and once("died"):
        kill()
    return reply
def kill():
    pid = json.loads((RUN_DIR / "status.json").read_text())["servers"]["0"]["pid"]
    os.kill(pid, signal.SIGKILL)
DirectExchange.ask_lead = ask
answers = []
for epoch in itertools.count():
    train((model, optimizer, loader), epochs=1)
    answers.append(paceline.should_stop(epoch == 3))
    if answers[-1]:
        break
result(answers)
"""
    ran = run(TOOLS + source, workers=2, servers=2, replicas=1, mode=mode)
    assert ran.error is None and ran.status.restarts == 0
    assert (ran.run.path / "died").exists()
    assert any("led by server:1" in message for message in ran.status.messages)
    one, two = ran.results()[0], ran.results()[1]
    assert one == [False, False, False, True]
    if mode != "asp":
        assert two == one
    assert [account["applied"] for account in ran.status.leases[:3]] == [48] * 3


@pytest.mark.slow
def test_a_worker_that_hangs_while_others_wait_for_its_vote_is_replaced(run):
    source = """
model, optimizer, loader = prepared()
os.mkfifo(RUN_DIR / f"never-{os.getpid()}")
for epoch in itertools.count():
    train((model, optimizer, loader), epochs=1)
    if RANK == 1 and epoch == 1 and once("hung"):
        os.open(RUN_DIR / f"never-{os.getpid()}", os.O_RDONLY)
    if paceline.should_stop(RANK == 0 and epoch == 3):
        break
result(epoch)
"""
    ran = run(TOOLS + source, workers=2, mode="bsp", deadline_s=2.0)
    assert ran.error is None and ran.status.restarts == 1
    assert any("worker:0 has waited" in m and "for worker:1" in m for m in ran.status.messages)
    assert ran.results()[0] == 3
