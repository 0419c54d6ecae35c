"""The controller's parts, and its loop with an engine that starts nothing. No process, no sleep."""

import json
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paceline.causes import Cause
from paceline.comm import Address, Connection, Frame, Kind, Listener, Secret, connect
from paceline.comm.errors import error_body
from paceline.comm.messages import (
    FROM_CONTROLLER,
    ModeEntered,
    ServerAddresses,
    ServerListening,
    SwitchMode,
    UserNote,
)
from paceline.control import Controller, Requests, RunDirectory
from paceline.control.awaited_save import AwaitedSave
from paceline.control.beginning import new_run, taken_over
from paceline.control.journal import Journal
from paceline.control.mode_switches import GUARD, ModeSwitches
from paceline.control.role_links import Joined, RoleLinks, StopSignal
from paceline.control.run_record import RunRecord
from paceline.control.scaling import told_change
from paceline.core.modes import parse_mode
from paceline.engines import LOCAL_HOST, Exited, Handover, Left, RoleSpec
from paceline.exceptions import LinkError, RoleFailed, UsageError
from paceline.plan import Job, make_plan
from paceline.storage.checkpoint import CheckpointWriter, load
from paceline.testing import PaperEngine
from tests.hostile_files import GOLDEN
from tests.links import PATIENCE_S, SECRET

# --- the checkpoint that a run waits for ----------------------------------------------------------------


def test_progress_extends_the_deadline_of_a_checkpoint_and_silence_does_not() -> None:
    save = AwaitedSave(patience_s=60)
    assert not save.awaited and not save.overdue(1e9)
    save.ask(100.0, patience_s=30)
    assert save.awaited and not save.overdue(129) and save.overdue(131)
    assert save.progress(0, (10, 100), now=129) == (10, 100)
    assert not save.overdue(188) and save.overdue(190)
    assert save.progress(0, (10, 100), now=180) is None  # no news
    assert save.progress(1, (5, 50), now=180) == (15, 150)
    assert save.patience_s == 60 and not save.overdue(239)
    save.end()
    assert not save.awaited and save.progress(0, (99, 100), now=300) is None


# --- links ----------------------------------------------------------------------------------------------


def dialled(address: Address, secret: bytes, role: str, rank: int) -> Connection:
    connection = connect(address, secret, peer="controller")
    connection.sock.settimeout(PATIENCE_S)
    connection.send(Kind.HELLO, {"role": role, "rank": rank, "incarnation": 0, "pid": 7})
    return connection


class Links:
    """RoleLinks, and roles that dial them."""

    def __init__(self, *, replaced: bool = False) -> None:
        secret = Secret(SECRET, None)
        self.links = RoleLinks(
            Listener(tcp=False),
            secret,
            patience_s=5,
            clock_ns=0,
            replaced=lambda *_: replaced,
            known=lambda *_: True,
        )
        self.roles: list[Connection] = []

    def dial(self, role: str = "worker", rank: int = 0) -> Connection:
        with ThreadPoolExecutor(1) as pool:
            dialling = pool.submit(dialled, self.links.address, SECRET, role, rank)
            while not dialling.done():
                self.links.poll(0.05)
        self.roles.append(dialling.result())
        return self.roles[-1]

    def next(self) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for event in self.links.events():
                return event
            self.links.poll(0.1)
        pytest.fail("nothing happened")

    def close(self) -> None:
        self.links.close()
        for role in self.roles:
            role.close()


@pytest.fixture
def links():
    made = Links()
    yield made
    made.close()


def test_what_roles_say_waits_in_the_inbox_in_order(links: Links) -> None:
    role = links.dial()
    assert links.next() == Joined("worker", 0, 7)
    role.tell(UserNote("first"))
    role.tell(UserNote("second"))
    said = [links.next(), links.next()]
    assert [(each.name, each.message) for each in said] == [
        ("worker:0", UserNote("first")),
        ("worker:0", UserNote("second")),
    ]
    assert links.links.connected("worker") == ["worker:0"] and links.links.connected("server") == []


def test_a_message_that_is_not_valid_is_refused_and_ends_its_link_only(links: Links) -> None:
    bad, good = links.dial(rank=0), links.dial(rank=1)
    assert {links.next().rank, links.next().rank} == {0, 1}
    bad.send(Kind.NOTE, {"text": 1})
    good.tell(UserNote("fine"))
    assert links.next().message == UserNote("fine")
    answer = bad.receive()
    assert answer.kind is Kind.ERROR and "field 'text' of a NOTE is 1" in answer.body["message"]
    assert links.links.connected("worker") == ["worker:1"]


def test_a_process_that_was_replaced_is_refused_except_for_its_last_words() -> None:
    made = Links(replaced=True)
    try:
        role = made.dial()
        made.links.poll(0.2)
        made.links.poll(0.2)
        assert role.receive().body["message"] == "worker:0 was replaced"
        with pytest.raises(LinkError):
            role.receive()
        made.links.admits_replaced = True
        made.dial()
        assert made.next() == Joined("worker", 0, 7)
    finally:
        made.close()


def test_workers_that_connect_later_are_told_where_the_servers_are(links: Links) -> None:
    early = links.dial("worker", 0)
    links.next()
    links.links.announce(0)  # nobody knows yet where the lead is
    links.links.locate(0, {"unix": "a"})
    links.links.introduce_newcomer("worker:0", 0)
    frame = early.receive()
    assert FROM_CONTROLLER.read(frame.kind, frame.body) == ServerAddresses({"0": {"unix": "a"}}, 0)


def test_going_back_drops_what_roles_said_and_keeps_the_users_wish_to_stop(links: Links) -> None:
    links.dial()
    links.next()
    link = links.links.get("worker:0")
    assert link is not None
    links.links.on_frame(link, Frame(Kind.NOTE, {"text": "of a role that is killed"}, 0, []))
    links.links.post(StopSignal())
    links.links.poll(PATIENCE_S)
    links.links.drop_all()
    assert [*links.links.events()] == [StopSignal()]
    assert links.links.connected("worker") == []


def test_a_server_that_sends_nothing_is_named_until_it_is_given_up(links: Links) -> None:
    links.links.expect_reports([0, 1])
    now = time.monotonic()
    assert links.links.silent(now, 5.0) == []
    assert [rank for rank, _ in links.links.silent(now + 10, 5.0)] == [0, 1]
    links.links.stop_watching(0)
    assert [rank for rank, _ in links.links.silent(now + 10, 5.0)] == [1]


# --- switches -------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    script = tmp_path / "train.py"
    script.touch()
    job = Job(script=str(script), workers=2, mode="asp", threads=1, spans=False)
    return RunDirectory.create(job, plan=make_plan(job))


@pytest.fixture
def plan(run: RunDirectory):
    return make_plan(run.read_job())


def test_a_switch_is_answered_when_the_lead_enters_the_mode(run: RunDirectory, plan: Any) -> None:
    answers: dict[str, Any] = {}

    class Answers(Requests):
        def answer(self, name: str, body: dict[str, Any]) -> None:
            answers[name] = body

    begin = new_run(plan, run, None)
    begin.listener.close()
    switches = ModeSwitches(plan, RunRecord(run, begin.status), Answers(run.path), num_workers=lambda: 2)
    switches.show(parse_mode("asp"))
    assert switches.ask("a", parse_mode("ssp:2")) == SwitchMode("ssp:2", "a")
    assert switches.ask("b", parse_mode("bsp")) == SwitchMode("bsp", "b")
    assert switches.ask(GUARD, parse_mode("bsp")) == SwitchMode("bsp", GUARD)
    assert switches.pending == ["a", "b", GUARD]
    switches.entered(ModeEntered("bsp", 9, "a"))
    assert answers["a"] == {"refused": "its schedule turned to bsp at update 9"}
    switches.entered(ModeEntered("bsp", 9, "b"))
    assert answers["b"] == {"mode": "bsp", "version": 9}
    switches.refuse_all("no")
    assert switches.pending == [] and GUARD not in answers
    assert switches.ask("c", parse_mode("bsp")) is None and answers["c"] == {"mode": "bsp", "version": 0}
    assert begin.status.messages == ["from update 9 on in mode bsp"]


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ({0}, {0}, None),
        ({0}, {0, 1}, "from 1 to 2 workers: worker:1 joins"),
        ({0, 1, 2}, {0}, "from 3 to 1 workers: worker:1, worker:2 leave"),
    ],
)
def test_the_user_is_told_who_joins_and_leaves(before: set[int], after: set[int], text: str | None) -> None:
    assert told_change("worker", before, after) == text


# --- the loop -------------------------------------------------------------------------------------------


def checkpoint_at(run: RunDirectory, machine: dict[str, Any], samples: int) -> Path:
    """A checkpoint of a run whose mode's machine was in this state."""
    golden = load(GOLDEN)
    writer = CheckpointWriter(run.checkpoints_path, machine["version"])
    for name in golden.files:
        writer.write_part(name, golden.tensors(name))
    lead = golden.meta["lead"]
    lead = {**lead, "machine": {**lead["machine"], **machine}, "samples": samples}
    return writer.commit({**golden.meta, "lead": lead})


def ask_to_stop(run: RunDirectory, **more: Any) -> None:
    (run.path / "requests").mkdir()
    (run.path / "requests" / "a.json").write_text(json.dumps({"kind": "stop", **more}))


def test_a_worker_that_crashes_is_started_again_until_no_restart_is_left(
    run: RunDirectory, plan: Any
) -> None:
    limit = plan.job.max_restarts
    crashes = [Exited.of("worker", 1, number, None, signal.SIGSEGV) for number in range(limit + 1)]
    engine = PaperEngine(crashes)
    controller = Controller(plan, engine, run)
    with pytest.raises(RoleFailed, match="worker:1: was killed by SIGSEGV after 3 restarts"):
        controller.run()
    started = [(spec.role, spec.rank, spec.incarnation) for spec in engine.started]
    assert started[: len(plan.roles)] == [("server", 0, 0), ("worker", 0, 0), ("worker", 1, 0)]
    assert started[len(plan.roles) :] == [("worker", 1, number + 1) for number in range(limit)]
    assert controller.status.state == "failed" and engine.closed
    assert run.read_status()["restarts"] == limit


def test_a_run_that_is_asked_to_stop_before_it_runs_stops(run: RunDirectory, plan: Any) -> None:
    engine = PaperEngine(first=lambda spec: ask_to_stop(run))
    status = Controller(plan, engine, run).run()
    assert status.state == "stopped" and status.stopped_by == signal.SIGTERM
    assert json.loads((run.path / "requests" / "a.answer").read_text()) == {"state": "stopped"}


def test_a_successor_is_built_from_the_journal(run: RunDirectory, plan: Any) -> None:
    """The first controller has replaced worker 1 once; its successor starts what is missing, and no more."""

    class Died(BaseException):
        """Stands for SIGKILL."""

    def die(status: Any, pieces: Any) -> None:
        if status.restarts:
            raise Died

    engine = PaperEngine([Exited.of("worker", 1, 0, None, signal.SIGSEGV)])
    first = Controller(plan, engine, run, watch=die, heir="package:function")
    with pytest.raises(Died):
        first.run()
    (succession,) = engine.guarded
    assert succession is not None and succession.call == "package:function"
    known = Journal(run.path).read()
    assert known.machine["incarnations"] == {"0": 0, "1": 1} and known.going_back is None

    here, there = socket.socketpair()
    roles = (Left("server", 0, 0, 11, None), Left("worker", 0, 0, 12, None), Left("worker", 1, 0, 13, 11))
    handover = Handover(succession, there, roles, time.time())
    begin = taken_over(plan, run, handover, Listener(tcp=False))
    assert begin.machine.restarts == {0: 0, 1: 1} and begin.started == known.started
    assert begin.predecessor is not None and begin.predecessor.pid == known.pid
    crash = [Exited.of("server", 0, 0, 1, None)]
    second = PaperEngine(crash, running=[("server", 0, 0), ("worker", 0, 0)])
    controller = Controller(plan, second, run, heir="package:function", beginning=begin)
    with pytest.raises(RoleFailed, match="server:0"):
        controller.run()
    assert [(spec.role, spec.rank, spec.incarnation) for spec in second.started] == [("worker", 1, 1)]
    assert second.started[0].secret == succession.secret
    assert controller.status.takeovers == 1
    assert any("took over after" in text for text in controller.status.messages)
    here.close()
    there.close()


def test_workers_that_a_successor_starts_count_their_steps_from_the_checkpoint(
    run: RunDirectory, plan: Any
) -> None:
    """The controller of a resumed run dies before it has started a worker."""

    class Died(BaseException):
        """Stands for SIGKILL."""

    def die(spec: RoleSpec) -> None:
        raise Died

    machine = {"version": 12, "floor": 6, "clocks": {"0": 7}}
    made = checkpoint_at(run, machine, samples=96)
    engine = PaperEngine(first=die)
    with pytest.raises(Died):
        Controller(plan, engine, run, resume=made, heir="package:function").run()
    shutil.rmtree(made)  # pruned since then, as a later controller may find it
    succession = engine.guarded[0]
    assert succession is not None

    here, there = socket.socketpair()
    begin = taken_over(plan, run, Handover(succession, there, (), time.time()), Listener(tcp=False))
    assert (begin.origin.checkpoint, begin.origin.version, begin.origin.samples) == (made, 12, 96)
    second = PaperEngine([Exited.of("server", 0, 0, 1, None)])
    with pytest.raises(RoleFailed, match="server:0"):
        Controller(plan, second, run, heir="package:function", beginning=begin).run()
    began = {spec.rank: spec.config["steps_before"] for spec in second.started if spec.role == "worker"}
    assert began == {0: 7, 1: 6}
    here.close()
    there.close()


def test_a_run_goes_back_when_roles_that_were_about_to_start_are_gone(run: RunDirectory, plan: Any) -> None:
    """Else there are two processes of one role for a while, with the same log and the same files."""
    exits = [Exited.of("server", 0, 0, None, signal.SIGSEGV), Exited.of("server", 0, 1, 1, None)]
    engine = PaperEngine(exits, turns=3)
    with pytest.raises(RoleFailed, match="server:0"):
        Controller(plan, engine, run).run()
    assert {"worker:0", "worker:1"} <= set(engine.killed)
    assert [spec.incarnation for spec in engine.started] == [0, 0, 0, 1, 1, 1]
    log = engine.agent(LOCAL_HOST).log
    again = log.index(("asked", "server:0", 1))
    assert {entry[1] for entry in log[:again] if entry[0] == "ended"} == {"server:0", "worker:0", "worker:1"}


@pytest.mark.parametrize("tells", [False, True], ids=["dies", "tells"])
def test_a_run_that_cannot_read_its_checkpoints_fails_when_it_goes_back(
    run: RunDirectory, plan: Any, tells: bool
) -> None:
    """Whatever the event was that let it go back: it is not the fault of the role that told it."""
    roles: list[Connection] = []

    def fail(spec: RoleSpec) -> None:
        run.checkpoints_path.rmdir()
        run.checkpoints_path.touch()  # cannot be listed
        if tells:
            roles.append(dialled(Address.from_json(spec.controller), bytes.fromhex(spec.secret), "server", 0))
            body = error_body(MemoryError("no memory is left"), "", cause=Cause.OUT_OF_MEMORY.value)
            roles[0].send(Kind.ERROR, body)

    with ThreadPoolExecutor(1) as pool:
        exits = [] if tells else [Exited.of("server", 0, 0, None, signal.SIGSEGV)]
        engine = PaperEngine(exits, first=(lambda spec: pool.submit(fail, spec)) if tells else fail)
        controller = Controller(plan, engine, run)
        with pytest.raises(RoleFailed, match="run: server:0 .*cannot go back .*cannot list"):
            controller.run()
    assert controller.status.state == "failed" and "cannot list" in run.read_status()["error"]
    assert engine.closed
    for link in roles:
        link.close()


def test_a_journal_that_cannot_be_read_is_named(run: RunDirectory) -> None:
    (run.path / "control.json").write_text('{"pid": 1}')
    with pytest.raises(UsageError, match=r"control\.json cannot be read"):
        Journal(run.path).read()


def test_a_server_that_listens_is_announced(run: RunDirectory, plan: Any) -> None:
    """The whole way of one message: from a role's link to a decision that is carried out."""
    seen: list[Any] = []
    roles: list[Connection] = []

    def be_roles(spec: RoleSpec) -> None:
        address, secret = Address.from_json(spec.controller), bytes.fromhex(spec.secret)
        roles.extend(dialled(address, secret, role, 0) for role in ("server", "worker"))
        roles[0].tell(ServerListening({"unix": "here"}))
        frame = roles[1].receive()
        seen.append(FROM_CONTROLLER.read(frame.kind, frame.body))
        ask_to_stop(run, now=True)

    with ThreadPoolExecutor(1) as pool:
        engine = PaperEngine(first=lambda spec: pool.submit(be_roles, spec))
        status = Controller(plan, engine, run).run()
    assert seen == [ServerAddresses({"0": {"unix": "here"}}, 0)]
    assert status.state == "stopped" and status.workers[0].pid == 7
    for link in roles:
        link.close()
