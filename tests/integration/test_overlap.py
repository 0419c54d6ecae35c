"""Hiding communication: gradients that leave during backward, parameters that arrive during forward, replies
that are awaited later. What is computed stays what it was, whoever looks at what, and whoever dies."""

import csv
import os
import signal
import time
from typing import Any

import pytest
import torch

from paceline.exceptions import UsageError
from paceline.plan import Job, make_plan
from tests.integration.test_checkpoints import TRAIN as CHECKPOINTED
from tests.integration.test_checkpoints import died_at, everything
from tests.integration.test_checkpoints import train as checkpointed
from tests.integration.test_equivalence import assert_same_bits
from tests.integration.test_faults import ENDLESS, TOOLS, assert_died, assert_every_sample_once
from tests.speed import first

# Four layers of more than 64 KB: with overlap each is a slice or more of its own.
MODEL = """
import collections, itertools, threading
import paceline.comm
from paceline.comm import Connection, Kind
from paceline.worker import session
from paceline.worker.session import current_session

sent = collections.Counter()
real_send = Connection.send
def counting(self, kind, *args, **kwargs):
    sent[kind.name] += 1
    real_send(self, kind, *args, **kwargs)
Connection.send = counting

torch.set_num_threads(1)
torch.manual_seed(RANK)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(20, 1000), nn.Linear(1000, 30)
        self.third, self.unused = nn.Linear(30, 1000), nn.Linear(20, 1000)
        self.scale = nn.Parameter(torch.ones(2))  # used by the net itself, not by a module of its own

    def forward(self, x, wide=False):
        x = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        if wide:
            x = x + self.unused(torch.ones(20))
        # A weight that is used where its own module is not called.
        return (torch.tanh(x) @ self.first.weight[:, :2]) * self.scale

def prepared(samples=24, **more):
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(samples, 20, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, torch.arange(samples) % 2), batch_size=4, shuffle=True)
    return paceline.prepare(model, optimizer, loader)

loss_of = nn.functional.cross_entropy
"""

TRAIN = (
    MODEL
    + """
model, optimizer, loader = prepared()
for epoch in range(3):
    for x, y in loader:
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
result(sent)
"""
)


@pytest.mark.parametrize(("servers", "link"), [(1, "auto"), (2, "tcp")])
def test_in_bsp_overlap_gives_the_same_bits_and_slices_do_leave_during_backward(run, servers, link):
    plain, hidden = (
        run(TRAIN, workers=2, servers=servers, mode="bsp", link=link, overlap=overlap)
        for overlap in (False, True)
    )
    assert plain.error is None and hidden.error is None
    assert_same_bits(hidden.model, plain.model)
    assert hidden.status.samples == plain.status.samples == 72
    assert all("SLICE" not in r for r in plain.results().values())
    # 9 steps; the unused layer's slices, and those it shares with others, leave at the step.
    assert all(r["SLICE"] >= 9 * 2 for r in hidden.results().values())
    # What left early was not sent again.
    size = sum(p.nbytes for p in hidden.model.values())
    assert all(w.bytes_out < 9 * size * 1.01 + 100_000 for w in hidden.status.workers.values())


# Everything that changes a gradient between backward and step, and everybody who looks at parameters.
EVERYTHING = (
    MODEL
    + """
import copy
from torch.optim.swa_utils import AveragedModel
model, optimizer, loader = prepared(samples=80)
average = AveragedModel(model)
seen = []
for step, (x, y) in enumerate(loader):
    way = step % 10
    loss = loss_of(model(x, wide=way == 0), y)
    if way == 9:  # a look at parameters that no forward has asked for
        loss = loss + 1e-3 * sum(p.square().sum() for p in model.parameters())
    loss.backward()
    if way == 1:  # a second backward
        loss_of(model(x), y).backward()
    elif way == 2:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    elif way == 3:  # behind the back of every counter; and of every sum
        model.third.weight.grad.data.neg_()
    elif way == 4:
        model.second.weight.grad = torch.ones_like(model.second.weight)
    elif way == 5:
        model.first.bias.grad = None
    elif way == 6:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
    optimizer.step()
    if way == 7:
        average.update_parameters(model)
    elif way == 8:
        seen.append([float(v.double().sum()) for v in copy.deepcopy(model).state_dict().values()])
    optimizer.zero_grad(set_to_none=way % 2 == 0)
    if way == 0:
        seen.append([float(v.double().sum()) for v in model.state_dict().values()])
    elif way == 2:
        seen.append(float(model.second.weight.detach().double().sum()))
    elif way == 4:
        model.eval()
        with torch.no_grad():
            seen.append(float(model(x).double().sum()))
        model.train()
    elif way == 6:
        with torch.no_grad():
            model.unused.bias.fill_(step)
        paceline.assign()
seen.append([float(v.double().sum()) for v in average.state_dict().values()])
seen.append([float(v["exp_avg"].double().sum()) for v in optimizer.state_dict()["state"].values()])
result(seen)
"""
)


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_whatever_a_script_does_with_gradients_and_parameters_overlap_changes_nothing(run, mode):
    """A slice that was changed after it had left goes again, and nobody sees a parameter too early."""
    plain, hidden = (
        run(EVERYTHING, workers=1, servers=2, mode=mode, threads=1, overlap=overlap)
        for overlap in (False, True)
    )
    assert plain.error is None, plain.error
    assert hidden.error is None, hidden.error
    assert hidden.results() == plain.results()
    assert_same_bits(hidden.model, plain.model)


def test_slices_that_left_too_early_make_the_next_ones_wait(run):
    """Accumulation: without learning, every step would send its gradient twice."""
    source = """
model, optimizer, loader = prepared(samples=96)
for step, (x, y) in enumerate(loader):
    loss_of(model(x), y).backward()
    if step % 2:
        optimizer.step()
        optimizer.zero_grad()
result(sent)
"""
    ran = run(MODEL + source, workers=1, threads=1, mode="asp", overlap=True)
    assert ran.error is None
    sent = ran.results()[0]
    assert sent["PUSH"] == 12
    # The first backward of the first step only.
    assert 0 < sent["SLICE"] < 12


def test_a_module_waits_for_its_own_parameters_only(run):
    """The last slice of a reply is held back until the first layer has computed with the first."""
    source = """
model, optimizer, loader = prepared(samples=12)
begun, kept = [threading.Event() for _ in range(9)], []
forwards, replies = itertools.count(), itertools.count()
real = Connection.read_each
def holding(self, views):
    for position in real(self, views):
        if position == len(views) - 1 and threading.current_thread().name.startswith("link"):
            kept.append(begun[next(replies) + 1].wait(30))
        yield position
Connection.read_each = holding
model.first.register_forward_hook(lambda *_: begun[next(forwards)].set())
for step, (x, y) in enumerate(loader):
    loss_of(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2:
        begun[3].set()
Connection.read_each = real
result(kept)
"""
    ran = run(MODEL + source, workers=1, threads=1, overlap=True)
    assert ran.error is None
    assert ran.results()[0] == [True, True, True]


def test_waiting_in_forward_counts_as_idleness(run):
    source = """
model, optimizer, loader = prepared(samples=8)
real = Connection.read_each
def late(self, views):
    for position in real(self, views):
        if position == len(views) - 1 and threading.current_thread().name.startswith("link"):
            threading.Event().wait(0.4)
        yield position
x, y = torch.ones(4, 20), torch.zeros(4, dtype=torch.long)
loss_of(model(x), y).backward()
before = current_session().client.wait_s
Connection.read_each = late
optimizer.step()
stepped = current_session().client.wait_s
model(x)
model.state_dict()
Connection.read_each = real
result([stepped - before, current_session().client.wait_s - stepped])
"""
    ran = run(MODEL + source, workers=1, threads=1, mode="asp", overlap=True)
    assert ran.error is None
    in_step, after = ran.results()[0]
    assert in_step < 0.2 < 0.3 < after


# --- prefetch ---------------------------------------------------------------------------------------


def pushes_of(ran: Any) -> list[dict[str, int]]:
    with (ran.run.path / "pushes.csv").open() as file:
        return [{k: int(v) for k, v in row.items()} for row in csv.DictReader(file)]


def test_a_step_goes_on_without_its_reply_and_says_what_it_was_computed_from(run):
    """Replies are held back until two steps have returned; the third needs the first one's."""
    source = """
two_steps, kept, versions = threading.Event(), [], []
real = Connection.receive
def holding(self):
    frame = real(self)
    if frame.kind is Kind.ADMIT:
        kept.append(two_steps.wait(30))
    return frame
Connection.receive = holding
model, optimizer, loader = prepared(samples=40)
client = current_session().client
for step, (x, y) in enumerate(loader):
    versions.append(client.version)
    loss_of(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 1:
        answered = client.pipeline.answered
        two_steps.set()
result([kept[0], answered, versions, client.version])
"""
    ran = run(MODEL + source, workers=1, threads=1, mode="asp", prefetch=2)
    assert ran.error is None
    held, answered, versions, last = ran.results()[0]
    assert held, "a step waited for its reply"
    assert answered == 0
    assert versions[:2] == [0, 0]
    pushes = pushes_of(ran)
    assert [p["read_version"] for p in pushes] == versions
    assert [p["staleness"] for p in pushes[:2]] == [0, 1]
    assert max(p["staleness"] for p in pushes) <= 2
    assert last == 10, "at the end of an epoch all replies are awaited"


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("asp", {"overlap": True}),
        ("asp", {"compress": "topk:0.1"}),
        ("ssp:1", {"link": "tcp"}),
        ("downpour:1,3", {}),
        ("downpour:2,2", {"compress": "qsgd:8", "compress_replies": True}),
        ("asp+quorum=2", {"overlap": True}),
    ],
)
def test_prefetching_runs_apply_every_sample_once(run, mode, settings):
    ran = run(TRAIN, workers=2, servers=2, mode=mode, prefetch=3, **settings)
    assert ran.error is None
    assert ran.status.samples == 72
    assert [a["applied"] for a in ran.status.leases[:3]] == [24, 24, 24]


def test_one_prefetched_reply_is_what_computing_one_step_behind_means(run):
    """prefetch=1 with one worker: w[t+1] = w[t] - lr * gradient at w[t-1]."""
    source = """
torch.manual_seed(3)
model = nn.Linear(3, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = paceline.prepare(model, optimizer)
client = current_session().client
x = torch.tensor([[1.0, 2.0, 3.0]])
for step in range(6):
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    client.pipeline.await_replies()  # they are there; the next step takes them over
"""
    ran = run(MODEL + source, workers=1, threads=1, mode="asp+damping=none", prefetch=1)
    assert ran.error is None
    torch.manual_seed(3)
    weight = torch.nn.Linear(3, 1, bias=False).weight.detach()
    x = torch.tensor([[1.0, 2.0, 3.0]])
    read = [weight, weight]  # step t computes from what had come when step t - 1 was made
    for _ in range(6):
        gradient = 2 * (x @ read[-2].T) * x
        weight = weight - 0.1 * gradient
        read.append(weight)
    torch.testing.assert_close(ran.model["weight"], weight)


def test_leases_asked_for_ahead_go_back_when_the_loop_is_left(run):
    source = """
model, optimizer, loader = prepared(samples=120)
steps = 0
for epoch in range(3):
    for step, (x, y) in enumerate(loader):
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if step == 2:
            break
result(steps)
"""
    ran = run(MODEL + source, workers=2, mode="asp", prefetch=2)
    assert ran.error is None
    assert set(ran.results().values()) == {9}
    assert [(a["applied"], a["unused"]) for a in ran.status.leases[:2]] == [(24, 96), (24, 96)]


# --- checkpoints --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_resuming_an_overlapped_run_equals_not_having_stopped(run, tmp_path):
    """BatchNorm, dropout, random augmentation and schedulers: the worker's part is of the very round."""
    job = {"overlap": True}
    whole = checkpointed(run, job={**job, "checkpoint_every": 3})
    assert whole.error is None
    for version in (3, 6):
        ran = checkpointed(run, resume=died_at(whole, version, tmp_path / f"dead{version}"), job=job)
        assert ran.error is None and ran.status.version == 24
        for rank in range(2):
            assert ran.results()[rank]["losses"] == whole.results()[rank]["losses"][version:]
        assert_same_bits(everything(ran), everything(whole))
    plain = checkpointed(run)
    assert_same_bits(everything(whole), everything(plain))


def test_a_prefetching_run_is_checkpointed_and_resumed(run, tmp_path):
    job = {"workers": 2, "servers": 2, "mode": "asp", "prefetch": 2, "compress": "topk:0.2"}
    whole = run(CHECKPOINTED, checkpoint_every=5, keep_checkpoints=50, **job)
    assert whole.error is None
    version = int(whole.status.checkpoints[0][-12:])
    ran = run(CHECKPOINTED, resume=died_at(whole, version, tmp_path / "dead"), **job)
    assert ran.error is None
    assert [a["applied"] for a in ran.status.leases[:4]] == [44] * 4


# --- torch's other ways ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_bits(run):
    source = TRAIN.replace("for epoch", 'model = torch.compile(model, backend="eager")\nfor epoch')
    plain, hidden = (
        run(source, workers=1, threads=1, mode="asp", overlap=overlap) for overlap in (False, True)
    )
    assert plain.error is None and hidden.error is None
    assert_same_bits(hidden.model, plain.model)
    assert hidden.results()[0]["SLICE"] > 0
    assert "recompile_limit" not in hidden.log("worker", 0)


# --- faults -------------------------------------------------------------------------------------------

HIDDEN = [
    pytest.param({"mode": "bsp", "overlap": True}, id="bsp-overlap"),
    pytest.param({"mode": "asp", "prefetch": 3, "overlap": True}, id="asp-prefetch-overlap"),
    pytest.param({"mode": "ssp:1", "prefetch": 2, "link": "tcp"}, id="ssp-prefetch-tcp"),
    pytest.param({"mode": "asp", "prefetch": 2, "compress": "topk:0.2"}, id="asp-prefetch-topk"),
]

# As wide as it takes for slices to leave early.
PREPARED = "prepared(width=20_000)"


@pytest.mark.parametrize("settings", first(2, HIDDEN))
def test_a_worker_killed_in_the_middle_is_replaced_and_every_sample_is_applied_once(run, settings):
    source = f"train({PREPARED}, at_step=lambda step: die() if step == 4 else None)"
    ran = run(TOOLS + source, workers=2, servers=2, **settings)
    assert_died(ran)
    assert_every_sample_once(ran)
    assert ran.status.lost == 0


DEATHS = {
    "slice-sent": 'Kind.SLICE, "server:1", when="after", nth=2',
    "push-on-follower": 'Kind.PUSH, "server:0", when="before", nth=3',
    "push-sent": 'Kind.PUSH, "server:0", when="after", nth=3',
    "leases-ahead": 'Kind.TAKE, "server:0", when="after", nth=2, wait=False',
    "parked": 'Kind.TAKE, "server:0", when="after", wait=True',
}


@pytest.mark.parametrize("death", first(3, DEATHS))
@pytest.mark.parametrize("settings", first(1, HIDDEN[:2]))
def test_it_may_die_between_any_two_messages(run, death, settings):
    source = f"die_sending({DEATHS[death]})\ntrain({PREPARED})"
    ran = run(TOOLS + source, workers=2, servers=2, deadline_s=20, **settings)
    assert_died(ran)
    assert_every_sample_once(ran)


@pytest.mark.parametrize("settings", first(1, HIDDEN[:3]))
def test_a_killed_server_is_named_at_once(run, settings):
    killed_at = []

    def watch(status, lines, engine):
        if status.version > 3 and not killed_at:
            os.kill(engine.pids()["server:1"], signal.SIGKILL)
            killed_at.append(time.monotonic())

    ran = run(ENDLESS, workers=2, servers=2, max_restarts=0, watch=watch, **settings)
    assert killed_at and time.monotonic() - killed_at[0] < 5
    assert ran.error.startswith("server:1: was killed by SIGKILL, ")


@pytest.mark.slow
@pytest.mark.parametrize("settings", first(1, HIDDEN[:2]))
def test_a_server_that_hangs_is_named(run, settings):
    stopped = []
    # An epoch that does not end: who waits at its end for another worker names that one.
    source = TOOLS + "train(prepared(samples=1_000_000))"

    def watch(status, lines, engine):
        if status.version > 3 and not stopped:
            os.kill(engine.pids()["server:1"], signal.SIGSTOP)
            stopped.append(True)

    ran = run(source, workers=2, servers=2, deadline_s=1.5, watch=watch, **settings)
    assert stopped
    assert "DeadlineError" in ran.error and "server:1" in ran.error


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", first(1, [{"mode": "bsp", "overlap": True}, {"mode": "ssp:0", "prefetch": 2}])
)
def test_a_worker_that_hangs_is_named_by_those_who_wait_for_it(run, settings):
    source = """
def fate(step):
    if RANK == 1 and step == 3:
        (RUN_DIR / "stopped").touch()
        current_session().client.settle()  # not in the middle of a frame, where its link would end
        os.kill(os.getpid(), signal.SIGSTOP)
train(prepared(), at_step=fate)
"""
    ran = run(TOOLS + source, workers=2, deadline_s=1.5, max_restarts=0, **settings)
    assert (ran.run.path / "stopped").exists()
    assert "DeadlineError: worker:0 has waited" in ran.error
    assert "for worker:1; the deadline is 1.5 s (--deadline)" in ran.error


def test_no_thread_outlives_the_links(run):
    source = """
model, optimizer, loader = prepared()
before = {t.name for t in threading.enumerate()}
for x, y in loader:
    loss_of(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
current_session().finish()
result([sorted(before), sorted(t.name for t in threading.enumerate())])
os._exit(0)
"""
    ran = run(MODEL + source, workers=1, threads=1, servers=2, mode="asp", prefetch=2, overlap=True)
    before, after = ran.results()[0]
    assert {"sender", "link server:0", "link server:1"} <= set(before)
    assert after == ["MainThread"]


# --- what makes no sense ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prefetch": 1}, "prefetch=1 in mode bsp: it goes in rounds"),
        ({"prefetch": 1, "mode": "backup:1"}, "it goes in rounds"),
        ({"prefetch": 1, "mode": "local:4"}, "it goes in rounds"),
        ({"prefetch": 1, "mode": "easgd:4"}, "go on from what they exchanged"),
        ({"prefetch": 1, "mode": "dogwild"}, "go on from what they exchanged"),
        ({"prefetch": 1, "mode": "hogwild"}, "go on from what they exchanged"),
        ({"prefetch": 1, "mode": "asp+damping=dc"}, "use damping=staleness or dynsgd"),
        ({"prefetch": 1, "mode": "asp", "schedule": ("9=bsp",)}, "prefetch=1 in mode bsp"),
        ({"prefetch": -1, "mode": "asp"}, "prefetch=-1 is too small: give at least 0"),
        ({"prefetch": True, "mode": "asp"}, "prefetch=True is not a whole number"),
        ({"overlap": True, "mode": "downpour:2,2"}, "nothing that is ready during backward"),
        ({"overlap": True, "mode": "easgd:2"}, "nothing that is ready during backward"),
        ({"overlap": True, "mode": "hogwild"}, "nothing that is ready during backward"),
        ({"overlap": True, "link": "shm"}, "link=shm shares memory"),
        ({"overlap": "yes"}, "overlap='yes' is neither True nor False"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(settings, words):
    with pytest.raises(UsageError, match=".") as caught:
        make_plan(Job(workers=2, **settings))
    assert words in str(caught.value)


def test_a_run_that_hides_communication_does_not_share_memory():
    assert make_plan(Job()).shares_memory
    assert not make_plan(Job(overlap=True)).shares_memory
    assert not make_plan(Job(mode="asp", prefetch=1)).shares_memory
    assert not make_plan(Job(compress="bf16")).shares_memory
