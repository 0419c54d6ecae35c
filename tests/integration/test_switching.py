"""Switching a run to another mode while it goes on: no restart, no sample lost or repeated.

Runs go on until the test has done what it wants (a file `enough`), so nothing depends on how fast they are.
What mode a run really was in is read off its log: pushes.csv says how many pushes made an update and how
stale they were.
"""

import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.api.jobs import latest_checkpoint, resume_run
from paceline.control import Requests
from paceline.core.modes import parse_mode
from paceline.exceptions import PlanError
from paceline.observe import RunStatus
from paceline.storage import checkpoint as checkpoints
from tests.integration.test_equivalence import assert_same_bits, with_state
from tests.speed import first

SAMPLES = 49
"""Not a multiple of a round: at an epoch's end worker 0 makes a step more than the others."""

TOOLS = (
    f"SAMPLES = {SAMPLES}"
    + """
import time
from paceline.comm import Connection, Kind
from paceline.worker.session import current_session

ENOUGH = RUN_DIR / "enough"
torch.set_num_threads(1)

def once(name):
    try:
        os.close(os.open(RUN_DIR / name, os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False

def until(name):
    while not (RUN_DIR / name).exists():
        time.sleep(0.002)

def make_model():
    torch.manual_seed(RANK)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

def make_data(samples):
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x[:, 0] + x[:, 1] > 0).long())

def prepared(samples=SAMPLES, lr=0.05):
    # Two parameter groups, so that two servers both have something.
    model = make_model()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": lr / 2}]
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.5)
    loader = DataLoader(make_data(samples), batch_size=4, shuffle=True)
    return paceline.prepare(model, optimizer, loader)

def train(objects, at_step=lambda epoch, x: None, after_step=lambda: None):
    model, optimizer, loader = objects
    for epoch, batches in until_enough(loader):
        for x, y in batches:
            nn.functional.cross_entropy(model(x), y).backward()
            at_step(epoch, x)
            optimizer.step()
            optimizer.zero_grad()
            after_step()
"""
)

PLAIN = TOOLS + "train(prepared())\n"


class Asking:
    """Puts requests to a run from a thread, since the test's own thread runs the controller."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self.taken = 0
        """Requests that the controller has taken up: what they want is with the lead server."""

    def __call__(self, status: RunStatus, **body: Any) -> list[dict[str, Any]]:
        """Ask for something; the answer will be in the list."""
        answers: list[dict[str, Any]] = []
        requests = Requests(Path(status.run_dir))

        def ask() -> None:
            answers.append(requests.ask({"kind": "switch", **body}, alive=lambda: True, within_s=60))

        thread = threading.Thread(target=ask, name="asking")
        self._threads.append(thread)
        thread.start()
        return answers

    def join(self) -> None:
        for thread in self._threads:
            thread.join(timeout=65)
            assert not thread.is_alive()


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asking]:
    asking, pending = Asking(), Requests.pending

    def counted(self: Requests) -> dict[str, dict[str, Any]]:
        found = pending(self)
        asking.taken += len(found)
        return found

    monkeypatch.setattr(Requests, "pending", counted)
    yield asking
    asking.join()


class Switching:
    """A watch that switches a run through these modes, each for some updates, and then lets it end."""

    def __init__(self, ask: Asking, *modes: str, updates: int = 12) -> None:
        self._ask = ask
        self._due = updates
        self._updates = updates
        self._modes = list(modes)
        self._answers: list[dict[str, Any]] | None = None
        self.done: list[tuple[int, str]] = []
        """From which update on in which mode."""

    def __call__(self, status: RunStatus, lines: list[str], engine: Any) -> None:
        if self._answers:
            (answer,) = self._answers
            self.done.append((answer["version"], answer["mode"]))
            self._answers, self._due = None, answer["version"] + self._updates
        elif self._answers is None and status.version >= self._due:
            if self._modes:
                self._answers = self._ask(status, mode=self._modes.pop(0))
            else:
                enough(status)


def enough(status: RunStatus) -> None:
    (Path(status.run_dir) / "enough").touch()


# --- what is true after every run -------------------------------------------------------------------


def rows_of(ran: Any) -> list[dict[str, int]]:
    with (ran.run.path / "pushes.csv").open() as file:
        return [{k: int(v) for k, v in row.items()} for row in csv.DictReader(file)]


def assert_every_sample_once(
    ran: Any, samples: int = SAMPLES, rows: list[dict[str, int]] | None = None
) -> None:
    """And the loss went down, and the run succeeded."""
    assert ran.error is None
    status = ran.status
    assert status.state == "succeeded"
    assert status.refused == 0
    assert status.epoch >= 1
    assert status.samples == samples * status.epoch
    *finished, rest = status.leases
    assert [(a["applied"], a["refused"], a["unused"]) for a in finished] == [(samples, 0, 0)] * len(finished)
    assert (rest["applied"], rest["refused"], rest["unused"]) == (0, 0, 0)
    rows = rows_of(ran) if rows is None else rows
    ids = [(r["worker"], r["incarnation"], r["sequence"]) for r in rows]
    assert len(ids) == len(set(ids))
    # An epoch turns when all of it is applied: each multiple of its size is in the running sum.
    sums = set(itertools.accumulate(r["samples"] for r in rows))
    assert {samples * (k + 1) for k in range(status.epoch)} <= sums
    assert max(sums) == samples * status.epoch
    assert_learnt(ran, samples)


def assert_learnt(ran: Any, samples: int) -> None:
    space: dict[str, Any] = {"torch": torch, "nn": nn, "RANK": 0}
    space["TensorDataset"] = torch.utils.data.TensorDataset
    source = TOOLS[TOOLS.index("def make_model") : TOOLS.index("def prepared")]
    exec(source, space)
    model, (x, y) = space["make_model"](), space["make_data"](samples).tensors
    before = nn.functional.cross_entropy(model(x), y)
    model.load_state_dict(ran.model)
    assert nn.functional.cross_entropy(model(x), y) < 0.9 * before


def assert_modes_in_log(
    rows: list[dict[str, int]], start: str, switched: list[tuple[int, str]], workers: int = 3
) -> None:
    """Every update was made as the mode that the run was in says."""
    turns = [(0, start), *switched]
    updates = {v: list(group) for v, group in itertools.groupby(rows, key=lambda row: row["version"])}
    assert list(updates) == list(range(1, len(updates) + 1))
    for (after, text), (until, _) in itertools.pairwise([*turns, (len(updates), "")]):
        mode = parse_mode(text)
        within = [updates[version] for version in range(after + 1, until + 1)]
        sizes = {len(rows) for rows in within}
        stale = {row["staleness"] for rows in within for row in rows}
        assert within, f"no update in {text}"
        if mode.spare is None:
            assert sizes == {1}, text
        else:
            assert stale == {0}, text
            assert max(sizes) == workers - mode.spare, text  # fewer while others rest


def assert_told(ran: Any, switched: list[tuple[int, str]]) -> None:
    told = [m for m in ran.status.messages if m.startswith("from update ")]
    assert told == [f"from update {version} on in mode {mode}" for version, mode in switched]
    assert ran.status.mode == switched[-1][1]
    assert ran.run.read_job().mode == switched[-1][1]


# --- by request -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("servers", "replicas", "resumes"), [(1, 0, False), (2, 1, False), (2, 0, True)], ids=str
)
def test_a_switch_before_the_script_reaches_prepare(
    run: Callable[..., Any], ask: Asking, servers: int, replicas: int, resumes: bool
) -> None:
    """The lead has no model yet, and its workers have not joined."""
    answers: list[list[dict[str, Any]]] = []

    def watch(status: RunStatus, lines: list[str], engine: Any) -> None:
        if status.state == "running" and not answers:
            answers.append(ask(status, mode="ssp:2"))
        elif ask.taken:
            (Path(status.run_dir) / "go").touch()
            if status.version > 20:
                enough(status)

    settings = {"workers": 3, "servers": servers, "replicas": replicas, "threads": 1}
    before = None
    if resumes:
        before = run(TOOLS + "train(prepared())", mode="bsp", max_updates=8, **settings)
        assert before.error is None, before.error
    source = TOOLS + 'until("go")\ntrain(prepared())\n'
    ran = run(source, mode="bsp", watch=watch, resume=before, **settings)
    assert ran.error is None, ran.error
    version = 0 if before is None else before.status.version
    assert answers == [[{"mode": "ssp:2", "version": version}]]
    rows = [row for row in rows_of(ran) if row["version"] > version]
    assert len(rows) == ran.status.version - version > 12
    assert max(row["staleness"] for row in rows) > 0, "one push makes an update"
    if not resumes:
        assert_every_sample_once(ran)


@pytest.mark.slow
@pytest.mark.parametrize("servers", first(1, [2, 1]))
@pytest.mark.parametrize("link", first(1, ["shm", "tcp"]))
def test_a_run_goes_through_all_modes_without_losing_or_repeating_a_sample(run, ask, link, servers):
    watch = Switching(ask, "asp", "ssp:1", "backup:1", "bsp", "ssp:0", "bsp", "backup:1", "asp", "bsp")
    ran = run(PLAIN, workers=3, servers=servers, link=link, threads=1, mode="bsp", watch=watch)
    assert len(watch.done) == 9
    assert_every_sample_once(ran)
    assert_told(ran, watch.done)
    assert_modes_in_log(rows_of(ran), "bsp", watch.done)


@pytest.mark.parametrize("link", first(0, ["shm", "tcp"]))
def test_switching_between_dampings_and_quorums(run, ask, link):
    """Pushes that servers hold for a quorum are applied, whatever comes next."""
    modes = (
        "asp+damping=dc",
        "bsp",
        "asp+quorum=2",
        "bsp",
        "ssp:1+quorum=3",
        "backup:1",
        "asp+damping=gap",
        "ssp:2+quorum=2+damping=dynsgd",
        "asp+quorum=3",
        "asp",
    )
    watch = Switching(ask, *modes)
    ran = run(PLAIN, workers=3, servers=2, link=link, threads=1, mode="asp", watch=watch)
    assert [mode for _, mode in watch.done] == list(modes)
    assert_every_sample_once(ran)
    assert_told(ran, watch.done)


def command(*args: str, run_dir: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", "switch", run_dir, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "300"},
    )


class Commanding:
    """A watch that calls `paceline switch` with one mode after the other."""

    def __init__(self, *modes: str) -> None:
        self._modes = list(modes)
        self._running: subprocess.Popen[str] | None = None
        self.done: list[tuple[int, str, str]] = []
        """Exit code, stdout, stderr."""

    def __call__(self, status: RunStatus, lines: list[str], engine: Any) -> None:
        if self._running is not None:
            if self._running.poll() is not None:
                out, err = self._running.communicate()
                self.done.append((self._running.returncode, out, err))
                self._running = None
        elif status.version >= 3:
            if self._modes:
                self._running = command(self._modes.pop(0), run_dir=status.run_dir)
            else:
                enough(status)


@pytest.mark.slow
def test_the_command_switches_or_says_why_not_and_the_run_goes_on(run):
    modes = ["asp", "local:4", "backup:3", "asp+quorum=4", "fast", "asp", "ssp:1"]
    watch = Commanding(*modes)
    ran = run(PLAIN, workers=3, servers=2, threads=1, mode="bsp", watch=watch)
    assert [code for code, _, _ in watch.done] == [0, 2, 2, 2, 2, 0, 0]
    (_, asp, _), (_, _, local), (_, _, backup), (_, _, quorum), (_, _, fast), (_, again, _), (_, ssp, _) = (
        watch.done
    )
    id_ = ran.run.id
    assert asp.startswith(f"Run {id_} goes on in asp from update ")
    assert again.startswith(f"Run {id_} goes on in asp from update ")
    assert ssp.startswith(f"Run {id_} goes on in ssp:1 from update ")
    refused = f"error: run {id_} was not switched and goes on as it was: "
    assert local.startswith(refused + "workers of local:4 hold their own optimizer")
    assert backup.startswith(refused + "mode backup:3 goes on without the slowest 3, so it needs at least 4")
    assert quorum.startswith(refused + "mode asp+quorum=4 makes an update of 4 contributions")
    assert fast.startswith("error: mode 'fast': there is no such mode")
    for text in (local, backup, quorum, fast):
        assert len(text.strip().splitlines()) == 1
    assert_every_sample_once(ran)
    told = [m.rpartition(" ")[2] for m in ran.status.messages if m.startswith("from update ")]
    assert told == ["asp", "ssp:1"]
    assert not list((ran.run.path / "requests").iterdir())


def test_an_ended_run_is_not_switched(run):
    source = TOOLS + "ENOUGH.touch()\ntrain(prepared())"
    ran = run(source, workers=2, threads=1)
    assert ran.error is None
    process = command("asp", run_dir=str(ran.run.path))
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert error.startswith(f"error: run {ran.run.id} is succeeded, so there is nothing to switch")
    assert f"paceline resume {ran.run.id} --mode asp" in error
    assert ran.run.read_job().mode == "bsp"


def test_with_clip_norm_only_bsp_is_possible(run, ask):
    answers: list[Any] = []

    def watch(status: RunStatus, lines: list[str], engine: Any) -> None:
        if not answers and status.version > 3:
            answers.append(ask(status, mode="asp"))
            answers.append(ask(status, mode="bsp"))
        elif answers and all(answers):
            enough(status)

    ran = run(PLAIN, workers=3, servers=2, threads=1, clip_norm=1.0, watch=watch)
    ((asp,), (bsp,)) = answers
    assert asp == {"refused": "clip_norm=1 clips the average gradient, which only bsp has"}
    assert bsp["mode"] == "bsp"
    assert_every_sample_once(ran)
    assert ran.status.mode == "bsp"


NO_LOADER = (
    TOOLS
    + """
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = paceline.prepare(model, optimizer)
while not ENOUGH.exists():
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)


def test_without_a_loader_nothing_can_be_dealt_by_speed(run, ask):
    answers: list[Any] = []

    def watch(status: RunStatus, lines: list[str], engine: Any) -> None:
        if not answers and status.version > 3:
            answers.append(ask(status, mode="ssp:2+batches=speed"))
        elif answers and answers[0]:
            enough(status)

    ran = run(NO_LOADER, workers=1, threads=1, mode="ssp:2", watch=watch)
    assert ran.error is None
    (answer,) = answers[0]
    assert answer["refused"].startswith("mode ssp:2+batches=speed deals batches by speed, and this run")
    assert ran.status.mode == "ssp:2"


def test_a_schedule_that_deals_by_speed_is_refused_at_the_start(run):
    ran = run(NO_LOADER, workers=1, threads=1, mode="bsp", schedule=("50=ssp:2+batches=speed",))
    assert "mode ssp:2+batches=speed deals batches by speed" in ran.error


GARBAGE = {
    "empty": b"",
    "no-json": b"\x00\xff{]",
    "a-list": b"[1, 2]",
    "nested": b"[" * 200_000,
    "another-kind": b'{"kind": "explode"}',
    "no-kind": b'{"mode": "asp"}',
    "no-mode": b'{"kind": "switch"}',
    "odd-mode": b'{"kind": "switch", "mode": {"a": [1]}}',
    "surrogate": b'{"kind": "switch", "mode": "\\ud800"}',
    "number": b'{"kind": "switch", "mode": 1e999}',
}


def test_garbage_in_the_requests_directory_is_refused_with_the_reason(run, ask):
    """Whatever somebody puts there, the controller goes on, and answers what it can."""
    answers: list[Any] = []

    def watch(status: RunStatus, lines: list[str], engine: Any) -> None:
        requests = Path(status.run_dir) / "requests"
        if not answers and status.version > 3:
            requests.mkdir(exist_ok=True)
            for name, content in GARBAGE.items():
                (requests / f"{name}.json").write_bytes(content)
            (requests / "directory.json").mkdir()
            (requests / "directory.json" / "inside").touch()
            (requests / "dangling.json").symlink_to("/nowhere")
            (requests / "readme.txt").write_text("not a request")
            os.mkfifo(requests / "pipe.json")
            answers.append(ask(status, mode="asp"))
        elif answers and answers[0]:
            enough(status)

    ran = run(PLAIN, workers=2, threads=1, mode="bsp", watch=watch)
    assert answers[0][0]["mode"] == "asp"
    assert_every_sample_once(ran)
    requests = ran.run.path / "requests"
    left = {p.name for p in requests.iterdir() if p.suffix != ".answer"}
    assert left == {"directory.json", "dangling.json", "pipe.json", "readme.txt"}
    for name in GARBAGE:
        answer = json.loads((requests / f"{name}.answer").read_text())
        assert isinstance(answer["refused"], str) and answer["refused"]


def test_a_run_directory_that_cannot_be_written_is_named(run):
    errors = []

    def watch(status: RunStatus, lines: list[str], engine: Any) -> None:
        requests = Path(status.run_dir) / "requests"
        if status.version and not errors:
            requests.touch()  # where a directory should be
            with pytest.raises(PlanError) as refused:
                Requests(Path(status.run_dir)).ask({}, alive=lambda: True, within_s=1)
            errors.append(str(refused.value))
            enough(status)

    ran = run(PLAIN, workers=1, threads=1, watch=watch)
    assert ran.error is None
    assert errors[0].startswith(f"{ran.run.path / 'requests'} cannot be written: ")
    assert "ask as the user whose run it is" in errors[0]


def test_who_asks_twice_gets_two_answers(run, ask):
    """In bsp a switch waits for the round's end: a later one takes its place, and both are answered."""
    answers: list[Any] = []
    held = (
        TOOLS
        + """
def at_step(epoch, x):
    if RANK == 0 and epoch == 1 and once("held"):
        until("go")
train(prepared(), at_step=at_step)
"""
    )

    def watch(status: RunStatus, lines: list[str], engine: Any) -> None:
        here = Path(status.run_dir)
        if not (here / "held").exists() or ask.taken < len(answers):
            return
        if len(answers) < 3:
            answers.append(ask(status, mode=["asp", "ssp:1", "asp"][len(answers)]))
        elif answers[0] and answers[1]:
            (here / "go").touch()
            enough(status)

    ran = run(held, workers=2, threads=1, mode="bsp", deadline_s=40, watch=watch)
    (first,), (second,), (third,) = answers
    assert third["mode"] == "asp"
    assert "ssp:1" in first["refused"] and "asp" in second["refused"]
    assert_every_sample_once(ran)
    assert ran.status.mode == "asp"


def test_a_switch_taken_back_before_it_took_effect(run, ask):
    answers: list[Any] = []
    held = (
        TOOLS
        + """
def at_step(epoch, x):
    if RANK == 0 and epoch == 1 and once("held"):
        until("go")
train(prepared(), at_step=at_step)
"""
    )

    def watch(status: RunStatus, lines: list[str], engine: Any) -> None:
        here = Path(status.run_dir)
        if (here / "held").exists() and ask.taken == len(answers):
            if len(answers) < 2:
                answers.append(ask(status, mode=["asp", "bsp"][len(answers)]))
            elif all(answers):
                (here / "go").touch()
                enough(status)

    ran = run(held, workers=2, threads=1, mode="bsp", deadline_s=40, watch=watch)
    (first,), (second,) = answers
    assert second["mode"] == "bsp"
    assert "bsp" in first["refused"]
    assert_every_sample_once(ran)
    assert ran.status.mode == "bsp"
    assert {row["staleness"] for row in rows_of(ran)} == {0}


# --- at awkward moments -----------------------------------------------------------------------------

RESTS = """
send = Connection.send
def noted(self, kind, body=None, *args, **kwargs):
    send(self, kind, body, *args, **kwargs)
    if kind is Kind.TAKE and body["wait"]:
        (RUN_DIR / f"rests-{RANK}-{body['epoch']}").touch()
Connection.send = noted

def at_step(epoch, x):
    # In bsp only worker 0 has the last sample of an epoch; in asp it keeps any batch until the others rest.
    # (There the others may have done all of the second epoch before it had one.)
    last = len(x) == 1 if sys.argv[1] == "bsp" else True
    if RANK == 0 and epoch >= 1 and last and once("held"):
        until(f"rests-1-{epoch}")
        until(f"rests-2-{epoch}")
        (RUN_DIR / "now").touch()
        until("go")
train(prepared(), at_step=at_step)
"""


@pytest.mark.parametrize("link", first(1, ["tcp", "shm"]))
@pytest.mark.parametrize(("start", "to"), [("bsp", "asp"), ("asp", "bsp"), ("asp", "backup:1")])
def test_a_switch_while_workers_rest_at_an_epochs_end(run, ask, start, to, link):
    answers: list[Any] = []

    def watch(status: RunStatus, lines: list[str], engine: Any) -> None:
        here = Path(status.run_dir)
        if not answers and (here / "now").exists():
            answers.append(ask(status, mode=to))
        elif answers and ask.taken:
            # It is with the lead server. Out of bsp it waits there for the one who does not rest.
            if start == "bsp" or answers[0]:
                (here / "go").touch()
            if answers[0] and status.version > answers[0][0]["version"] + 12:
                enough(status)

    settings = {"workers": 3, "servers": 2, "threads": 1, "link": link, "mode": start}
    ran = run(TOOLS + RESTS, args=(start,), watch=watch, **settings)
    ((answer,),) = answers
    assert answer["mode"] == to
    assert_every_sample_once(ran)
    switched = [(answer["version"], to)]
    assert_told(ran, switched)
    assert_modes_in_log(rows_of(ran), start, switched)


@pytest.mark.parametrize("to", ["bsp", "backup:1", "ssp:1"])
def test_a_switch_while_a_checkpoint_is_being_written(run, ask, to):
    """It is cut at version 20 and waits for worker 1's part; what it holds is of the mode before."""
    source = """
def at_step(epoch, x):
    if RANK == 1 and once("held"):
        until("go")
train(prepared(samples=200), at_step=at_step)
"""
    answers: list[Any] = []

    def watch(status: RunStatus, lines: list[str], engine: Any) -> None:
        here = Path(status.run_dir)
        if not answers and status.version >= 22:
            assert not status.checkpoints
            answers.append(ask(status, mode=to))
        elif answers and answers[0]:
            (here / "go").touch()
            if status.version > 80:
                enough(status)

    settings = {"checkpoint_every": 20, "keep_checkpoints": 1000, "mode": "asp"}
    ran = run(TOOLS + source, workers=3, servers=2, threads=1, watch=watch, **settings)
    ((answer,),) = answers
    assert_every_sample_once(ran, samples=200)
    assert_told(ran, [(answer["version"], to)])
    first = checkpoints.load(ran.run.checkpoints_path / ran.status.checkpoints[0])
    assert first.version == 20
    assert first.meta["lead"]["mode"] == "asp"
    last = checkpoints.load(ran.run.checkpoints_path / ran.status.checkpoints[-1])
    assert last.meta["lead"]["mode"] == to


@pytest.mark.parametrize("link", first(1, ["tcp", "shm"]))
@pytest.mark.parametrize(("start", "to"), [("bsp", "asp"), ("asp", "bsp"), ("ssp:1", "backup:1")])
def test_a_worker_killed_right_after_a_switch_is_replaced_in_the_new_mode(run, ask, start, to, link):
    source = """
objects = prepared()
session = current_session()
if session.client.links.settings.incarnation:
    (RUN_DIR / "joined in").write_text(str(session.mode))

def after_step():
    if RANK == 1 and str(session.mode) == sys.argv[1] and once("died"):
        os.kill(os.getpid(), signal.SIGKILL)
train(objects, after_step=after_step)
"""
    answers: list[Any] = []

    def watch(status: RunStatus, lines: list[str], engine: Any) -> None:
        if not answers and status.version > 10:
            answers.append(ask(status, mode=to))
        elif status.restarts and (Path(status.run_dir) / "joined in").exists():
            enough(status)

    settings = {"workers": 3, "servers": 2, "threads": 1, "link": link, "mode": start}
    ran = run(TOOLS + source, args=(to,), watch=watch, **settings)
    ((answer,),) = answers
    assert (ran.run.path / "died").exists()
    assert ran.status.workers[1].restarts == 1
    assert (ran.run.path / "joined in").read_text() == to
    assert_every_sample_once(ran)
    assert_told(ran, [(answer["version"], to)])


# --- by schedule ------------------------------------------------------------------------------------


def ends_after(version: int) -> Callable[..., None]:
    def watch(status: RunStatus, lines: list[str], engine: Any) -> None:
        if status.version > version:
            enough(status)

    return watch


@pytest.mark.parametrize("link", first(1, ["shm", "tcp"]))
def test_a_schedule_turns_at_its_updates(run, link):
    schedule = ("20=ssp:2", "60=asp", "90=backup:1", "120=bsp")
    settings = {"workers": 3, "servers": 2, "threads": 1, "link": link, "schedule": schedule}
    ran = run(PLAIN, watch=ends_after(140), **settings)
    assert_every_sample_once(ran)
    turns = [(20, "ssp:2"), (60, "asp"), (90, "backup:1"), (120, "bsp")]
    assert_told(ran, turns)
    assert_modes_in_log(rows_of(ran), "bsp", turns)


FIXED = (
    TOOLS
    + """
model, optimizer, loader = prepared()
for epoch in range(4):
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
)


@pytest.mark.parametrize("link", first(1, ["tcp", "shm"]))
def test_a_schedule_from_bsp_to_bsp_changes_no_bit(run, link):
    settings = {"workers": 3, "servers": 2, "threads": 1, "link": link}
    plain, scheduled = (run(FIXED, schedule=turns, **settings) for turns in ((), ("7=bsp", "9=bsp")))
    assert plain.error is None and scheduled.error is None
    assert not any(m.startswith("from update") for m in scheduled.status.messages)
    assert_same_bits(with_state(scheduled), with_state(plain))


@pytest.mark.parametrize("link", first(1, ["shm", "tcp"]))
def test_with_one_worker_a_schedule_through_all_modes_changes_no_bit(run, link):
    """It waits for nobody in any of them: only the memory that it reads changes."""
    settings = {"workers": 1, "servers": 2, "threads": 1, "link": link}
    turns = ("5=asp", "9=bsp", "14=ssp:1", "15=asp+damping=dc", "20=bsp", "33=asp")
    plain, scheduled = (run(FIXED, schedule=schedule, **settings) for schedule in ((), turns))
    assert plain.error is None and scheduled.error is None
    assert len([m for m in scheduled.status.messages if m.startswith("from update")]) == 6
    assert_same_bits(with_state(scheduled), with_state(plain))


# --- and a resume -----------------------------------------------------------------------------------


def stops_after(version: int, watch: Callable[..., None] = lambda *_: None) -> Callable[..., None]:
    """Ctrl-C, in order."""
    stopped = []

    def watching(status: RunStatus, lines: list[str], engine: Any) -> None:
        watch(status, lines, engine)
        if status.version > version and not stopped and status.state == "running":
            stopped.append(signal.raise_signal(signal.SIGINT))

    return watching


@pytest.mark.slow
def test_a_resume_after_a_switch_goes_on_in_the_switched_mode(run, ask):
    answers: list[Any] = []

    def switches(status: RunStatus, lines: list[str], engine: Any) -> None:
        if not answers and status.version > 10:
            answers.append(ask(status, mode="ssp:1"))

    def stops(status: RunStatus, lines: list[str], engine: Any) -> None:
        if answers and answers[0] and status.version > answers[0][0]["version"] + 20:
            stop(status, lines, engine)

    stop = stops_after(0)

    def watch(*what: Any) -> None:
        switches(*what)
        stops(*what)

    ran = run(PLAIN, workers=3, servers=2, threads=1, mode="bsp", watch=watch)
    assert ran.status.state == "stopped"
    enough(ran.status)
    rows = resumed(ran)
    assert ran.status.mode == "ssp:1"
    assert not any("on in mode" in m for m in ran.status.messages)
    assert_every_sample_once(ran, rows=rows)
    assert_modes_in_log(rows, "bsp", [(answers[0][0]["version"], "ssp:1")])


def resumed(ran: Any) -> list[dict[str, int]]:
    """Resume the run to its end; returns the log, which is without what was applied after the checkpoint."""
    cut = latest_checkpoint(ran.run).version
    before = [row for row in rows_of(ran) if row["version"] <= cut]
    ran.status = resume_run(ran.run, {})
    ran.error = ran.status.error
    rows = rows_of(ran)
    assert rows[: len(before)] == before
    # Its workers count anew.
    after = [{**row, "incarnation": row["incarnation"] + 100} for row in rows[len(before) :]]
    assert after
    return [*before, *after]


@pytest.mark.slow
def test_a_resume_between_two_turns_of_a_schedule_goes_on_with_the_second(run):
    schedule = ("20=asp", "400=bsp")
    settings = {"workers": 3, "servers": 2, "threads": 1, "schedule": schedule}
    slow = "train(prepared(), at_step=lambda epoch, x: time.sleep(0.02))"
    ran = run(TOOLS + slow, watch=stops_after(40), **settings)
    assert ran.status.state == "stopped"
    assert ran.status.mode == "asp"
    assert 40 < ran.status.version < 400, "too fast: it was to stop between the turns"
    # From here on it hurries, and ends by itself some epochs after the second turn.
    hurries = "train(prepared(), at_step=lambda epoch, x: ENOUGH.touch() if epoch > 40 else None)"
    script = Path(ran.run.read_job().script)
    script.write_text(script.read_text().replace(slow, hurries))
    rows = resumed(ran)
    assert_every_sample_once(ran, rows=rows)
    assert [m for m in ran.status.messages if "on in mode" in m] == ["from update 400 on in mode bsp"]
    assert_modes_in_log(rows, "bsp", [(20, "asp"), (400, "bsp")])


# --- the guard --------------------------------------------------------------------------------------

LOGS = """
import math
import paceline.worker.reporter
paceline.worker.reporter.LOG_S = -1.0  # every loss is heard of
heard = itertools.count()

def after_step():
    paceline.log(loss=loss_at(next(heard)))
train(prepared(), after_step=after_step)
"""


def test_the_guard_falls_back_to_a_tighter_mode_when_the_loss_diverges(run):
    def watch(status: RunStatus, lines: list[str], engine: Any) -> None:
        if status.mode != "asp" or status.version > 20_000:
            enough(status)

    source = (
        TOOLS + "def loss_at(n):\n    return 2 / (1 + n / 20) if n < 150 else 0.3 + (n - 150) / 50\n" + LOGS
    )
    ran = run(source, workers=3, threads=1, mode="asp", guard=True, watch=watch)
    assert_every_sample_once(ran)
    said, switched = [m for m in ran.status.messages if "guard" in m or "on in mode" in m][:2]
    assert said.startswith("guard: the loss rose from ")
    assert said.endswith("ssp:4 allows less of it than asp")
    assert switched.startswith("from update ") and switched.endswith(" on in mode ssp:4")


@pytest.mark.slow
def test_the_guard_leaves_a_healthy_run_alone(run):
    def watch(status: RunStatus, lines: list[str], engine: Any) -> None:
        if status.version > 2000:
            enough(status)

    noisy = "def loss_at(n):\n    return 2 / (1 + n / 50) + 0.3 + 0.2 * math.sin(7.1 * n) * math.cos(n)\n"
    ran = run(TOOLS + noisy + LOGS, workers=3, threads=1, mode="asp", guard=True, watch=watch)
    assert_every_sample_once(ran)
    assert ran.status.mode == "asp"
    assert not [m for m in ran.status.messages if "guard" in m]
