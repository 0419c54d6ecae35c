"""What every agent and every engine promises. Each test runs with every kind of both."""

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.causes import Cause
from paceline.engines import (
    LOCAL_HOST,
    Agent,
    AgentEvent,
    Engine,
    Exited,
    LocalEngine,
    RoleSpec,
    RoleUsage,
    Started,
)
from paceline.testing import KeptEngine, PaperEngine
from tests.joining import joined, listening

PATIENCE_S = 30.0


@dataclass
class Hosts:
    """An engine, the host to test, and how to make roles that run or fail there."""

    engine: Engine
    host: str
    silent: socket.socket
    """Listens and never answers: a role that dials it waits."""
    logs: Path
    fail: Callable[[RoleSpec], None] = lambda spec: None
    """Let a role end by itself with code 1, where roles are on paper."""

    @property
    def agent(self) -> Agent:
        return self.engine.agent(self.host)

    def spec(self, rank: int, *, fails: bool = False, incarnation: int = 0) -> RoleSpec:
        port = self.silent.getsockname()[1] if not fails else 1  # nothing listens on port 1
        return RoleSpec(
            role="server",
            rank=rank,
            incarnation=incarnation,
            log=str(self.logs / f"server-{rank}.log"),
            secret="00" * 32,
            controller={"unix": None, "host": "127.0.0.1", "port": port},
            config={"run_dir": str(self.logs.parent)},
        )

    def hear(self, done: Callable[[list[AgentEvent]], bool]) -> list[AgentEvent]:
        """What the agent reports until that is enough."""
        found: list[AgentEvent] = []
        deadline = time.monotonic() + PATIENCE_S
        while not done(found):
            assert time.monotonic() < deadline, found
            select.select([self.engine], [], [], 0.1)
            self.engine.events()
            found += [each for each in self.agent.poll() if not isinstance(each, RoleUsage)]
        return found


def exits(found: Sequence[AgentEvent]) -> list[Exited]:
    return [each for each in found if isinstance(each, Exited)]


class Borrowed:
    """The local agent of an engine that is used again."""

    def __init__(self, engine: KeptEngine) -> None:
        self._engine = engine
        self.start, self.end, self.poll = engine.local.start, engine.local.end, engine.local.poll
        self.fileno, self.close = engine.local.fileno, engine.close


@pytest.fixture(params=["local", "paper", "paper elsewhere", "another host"])
def hosts(request: pytest.FixtureRequest, engine: KeptEngine, tmp_path: Path) -> Iterator[Hosts]:
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        if request.param == "local":
            made = Hosts(engine, LOCAL_HOST, silent, tmp_path)
        elif request.param == "another host":
            (tmp_path / "run" / "logs").mkdir(parents=True)
            joining = stack.enter_context(listening(tmp_path / "run"))
            stack.enter_context(joined(joining, tmp_path, Borrowed(engine)))
            joining.gather(PATIENCE_S, lambda text: None)
            made = Hosts(joining, "host-1", silent, tmp_path / "run" / "logs")
        else:
            paper = PaperEngine(hosts=["b"])
            host = "b" if "elsewhere" in request.param else LOCAL_HOST
            made = Hosts(paper, host, silent, tmp_path)
            made.fail = lambda spec: (
                None
                if paper.agent(host).report(Exited.of(spec.role, spec.rank, spec.incarnation, 1, None))
                else pytest.fail("it does not run")
            )
        yield made
        made.engine.close()


def test_a_role_is_reported_to_run_and_then_to_have_ended_with_its_cause(hosts: Hosts) -> None:
    spec = hosts.spec(0, fails=True)
    hosts.agent.start(spec)
    found = hosts.hear(bool)
    assert isinstance(found[0], Started) and found[0][:3] == ("server", 0, 0) and found[0].pid > 1
    if not exits(found):
        hosts.fail(spec)
        found += hosts.hear(lambda more: bool(exits(more)))
    (ended,) = exits(found)
    assert ended[:3] == ("server", 0, 0) and (ended.cause, ended.code) == (Cause.EXITED, 1)
    assert ended.end.how == "exited with code 1"


def test_a_role_that_is_ended_ends_once_and_the_others_run_on(hosts: Hosts) -> None:
    for rank in (0, 1):
        hosts.agent.start(hosts.spec(rank))
    hosts.hear(lambda found: len(found) == 2)
    for _ in range(3):
        hosts.agent.end("server", 1)
    found = hosts.hear(lambda found: bool(exits(found)))
    assert [each[:2] for each in exits(found)] == [("server", 1)]
    assert exits(found)[0].cause is Cause.CRASHED and "SIGKILL" in exits(found)[0].how
    assert exits(found)[0].code is None
    assert not exits(hosts.agent.poll())


def test_a_role_that_is_ended_before_it_runs_is_still_reported(hosts: Hosts) -> None:
    hosts.agent.start(hosts.spec(0))
    hosts.agent.end("server", 0)
    found = hosts.hear(lambda found: bool(exits(found)))
    assert [type(each) for each in found] == [Started, Exited]


def test_to_end_what_does_not_run_is_nothing(hosts: Hosts) -> None:
    hosts.agent.end("worker", 7)
    hosts.agent.start(hosts.spec(0))
    hosts.agent.end("worker", 0)
    assert [type(each) for each in hosts.hear(bool)] == [Started]


def test_a_role_can_be_started_again_with_another_incarnation(hosts: Hosts) -> None:
    for incarnation in (0, 1):
        hosts.agent.start(hosts.spec(0, incarnation=incarnation))
        hosts.agent.end("server", 0)
        found = hosts.hear(lambda found: bool(exits(found)))
        assert {each.incarnation for each in found} == {incarnation}


def test_the_controllers_own_host_is_the_first(hosts: Hosts) -> None:
    known = hosts.engine.hosts()
    assert known[0].id == LOCAL_HOST and hosts.host in [each.id for each in known]
    assert all(each.cores > 0 and each.memory > 0 and each.name for each in known)


def test_an_agent_without_roles_has_no_news() -> None:
    """Whoever waits for it would else look again and again."""
    for engine in (LocalEngine(), PaperEngine()):
        engine.agent(LOCAL_HOST).poll()
        assert not select.select([engine], [], [], 0)[0]
        engine.close()


def test_closing_an_engine_ends_its_roles() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for engine in (LocalEngine(), PaperEngine()):
            spec = Hosts(engine, LOCAL_HOST, silent, Path(os.devnull)).spec(0)
            engine.agent(LOCAL_HOST).start(spec)
            engine.close()  # the leak check finds what is left
