"""Messages to the controller from a role that breaks the protocol: refused, or without harm. No process."""

import os
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest

from paceline.comm import Connection, Frame, Kind
from paceline.comm.frames import decode_body, encode
from paceline.comm.message_codec import Json, body_of
from paceline.comm.messages import LeadReport, RoleError, ServerListening, ToController, WorkerReport
from paceline.control import Controller, RunDirectory
from paceline.exceptions import FrameError, PacelineError
from paceline.plan import Job, make_plan
from tests.links import KEYS, sockets
from tests.mutations import mutated
from tests.unit.test_controller import PaperEngine

KEY = b"k" * 32
CLASSES = get_args(ToController)
FAST = 2000


def example(annotation: Any) -> Any:
    """A valid value of a field."""
    if annotation == Json:
        return {"unix": "x", "host": "127.0.0.1", "port": 1, "samples": 4}
    if annotation in (int, float, bool, str):
        return {int: 1, float: 1.5, bool: True, str: "0"}[annotation]
    inner = [each for each in get_args(annotation) if each not in (type(None), ...)]
    origin = getattr(annotation, "__origin__", None)
    if origin is dict:
        return {example(inner[0]): example(inner[1])}
    if origin is tuple and ... in get_args(annotation):
        return (example(inner[0]), example(inner[0]))
    if origin is tuple:
        return tuple(map(example, inner))
    return example(inner[0])


class Attacked:
    """A controller whose roles a test plays."""

    def __init__(self, directory: Path) -> None:
        script = directory / "train.py"
        script.touch()
        job = Job(script=str(script), workers=2, mode="asp", threads=1, spans=False, max_restarts=10**6)
        run = RunDirectory.create(job, plan=make_plan(job))
        self.engine = PaperEngine()
        self.controller = Controller(make_plan(run.read_job()), self.engine, run)
        parts = vars(self.controller)
        self.links = parts["_links"]
        self.machine = parts["_machine"]
        self.handle = type(self.controller).__dict__["_handle"]
        self.machine.begin()
        self.roles: dict[str, Connection] = {}

    def role(self, name: str) -> Connection:
        """A role's connection; another one if it was refused."""
        known = self.roles.get(name)
        if known is not None and known.sock.fileno() >= 0:
            return known
        if known is not None:
            known.close()
            self.roles[f"{name} far"].close()
        near, far = sockets("unix")
        connection = self.roles[name] = Connection(near, KEYS)
        connection.sock.settimeout(5)
        connection.send_aside(8 << 20)
        connection.peer = name
        self.roles[f"{name} far"] = Connection(far, KEYS)
        kind, _, rank = name.partition(":")
        numbers = self.machine.server_incarnations if kind == "server" else self.machine.incarnations
        hello = {"role": kind, "rank": int(rank), "incarnation": numbers[int(rank)], "pid": os.getpid()}
        self.links.on_hello(connection, hello)
        return connection

    def say(self, name: str, kind: Kind, body: Any) -> bool:
        """A role says this. Returns whether it was refused."""
        link = self.role(name)
        try:
            body = decode_body(encode(kind, body, sequence=0, payload_bytes=0, key=KEY)[40:])
            self.links.on_frame(link, Frame(kind, body, 0, []))
        except (PacelineError, ValueError, RecursionError):
            return True
        for event in self.links.events():
            self.handle(self.controller, event)
        far = self.roles[f"{name} far"]
        refused = False
        with suppress(PacelineError, OSError):
            while far.wait(0) and far.sock.recv(1 << 16):
                refused = True
        return refused

    def close(self) -> None:
        for each in self.roles.values():
            each.close(linger=False)
        self.links.close()
        self.engine.close()
        vars(self.controller)["_publisher"].close()
        vars(self.controller)["_processes"].close()


@pytest.fixture
def attacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attacked]:
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    made = Attacked(tmp_path)
    yield made
    made.close()


def test_2000_hostile_reports_harm_nobody(attacked: Attacked) -> None:
    seed = int(os.environ.get("PACELINE_SEED", "1"))
    randoms, refused = random.Random(seed), 0
    # The errors of roles have the run go back or end, which is another matter.
    classes = [cls for cls in CLASSES if cls is not RoleError]
    for number in range(FAST):
        cls = randoms.choice(classes)
        valid = cls(*(example(hint) for hint in get_type_hints(cls).values()))
        kind, body = body_of(valid)
        body = mutated(body, randoms) if randoms.random() < 0.9 else body
        name = randoms.choice(("worker:0", "worker:1", "server:0"))
        try:
            refused += attacked.say(name, kind, body)
        except Exception as error:
            pytest.fail(f"PACELINE_SEED={seed}, case {number}: {name}: {kind.name} {body!r:.500}: {error!r}")
    assert refused > FAST / 4
    status = attacked.controller.status
    vars(attacked.controller)["_publisher"].publish(attacked.machine.state)
    assert set(status.workers) <= {0, 1} and set(status.servers) <= {0}


@pytest.mark.parametrize("name", ["worker:99", "server:7", "worker:0"])
def test_a_process_that_was_never_started_is_refused(attacked: Attacked, name: str) -> None:
    role, _, rank = name.partition(":")
    connection: Any = SimpleNamespace(peer=name, sock=None)
    hello = {"role": role, "rank": int(rank), "incarnation": 5, "pid": 1}
    with pytest.raises(FrameError, match=f"{name}, incarnation 5, is no process of this run"):
        attacked.links.on_hello(connection, hello)


def test_a_role_says_what_is_its_to_say(attacked: Attacked) -> None:
    report = WorkerReport(1, 0.0, 0.0, (), {})
    address = ServerListening({"unix": None, "host": "127.0.0.1", "port": 1})
    lead = LeadReport(*(example(hint) for hint in get_type_hints(LeadReport).values()))
    for name, said in (("server:0", report), ("worker:0", address), ("worker:1", lead)):
        kind, body = body_of(said)
        with pytest.raises(FrameError, match=f"does not send {kind.name} to the controller"):
            attacked.links.on_frame(attacked.role(name), Frame(kind, body, 0, []))
