"""The local agent's side of its talk with the fork server."""

import contextlib
import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from paceline.causes import Cause
from paceline.engines import Exited, Handover, LocalAgent, RoleSpec, Started, Succession
from paceline.engines import outbox as outbox_module
from paceline.engines.forkserver import ForkServer
from paceline.engines.outbox import Outbox

SUCCESSION = Succession(call="a:b", run="", log="", secret="", listener=-1, lock=-1)


def spec_of(rank: int, log: str = os.devnull) -> RoleSpec:
    return RoleSpec(
        role="worker", rank=rank, incarnation=0, log=log, secret="", controller={}, config={"x": "y" * 1000}
    )


@pytest.fixture
def agent_and_far_end():
    """An agent whose fork server is this test: it reads and says what the test wants."""
    near, far = socket.socketpair()
    agent = LocalAgent(handover=Handover(SUCCESSION, near, (), 0.0))
    yield agent, far
    far.close()
    agent.close()


def test_nobody_waits_for_a_fork_server_that_does_not_read(agent_and_far_end, monkeypatch) -> None:
    agent, _far = agent_and_far_end
    started = time.monotonic()
    for rank in range(2_000):
        agent.start(spec_of(rank))
    assert agent.poll() == []
    assert time.monotonic() - started < 30
    monkeypatch.setattr(outbox_module, "STALLED_S", 0.0)
    ended = agent.poll()  # it hangs: so it, and all of its roles, are given up
    assert len(ended) == 2_000 and {each.how for each in ended} == {"was killed by SIGKILL"}


def test_closing_does_not_wait_for_a_fork_server_that_does_not_read(agent_and_far_end, monkeypatch) -> None:
    agent, _far = agent_and_far_end
    monkeypatch.setattr("paceline.engines.local_agent._CLOSE_S", 0.2)
    for rank in range(2_000):
        agent.start(spec_of(rank))
    started = time.monotonic()
    agent.close()
    assert time.monotonic() - started < 30


def test_a_fork_server_that_says_much_before_it_reads_is_heard(agent_and_far_end) -> None:
    """Both used to wait until the other one would read."""
    agent, far = agent_and_far_end
    count = 1_500
    far.setblocking(False)
    heard, said, ended = b"", 0, 0
    for rank in range(count):
        agent.start(spec_of(rank))
    deadline = time.monotonic() + 60
    outgoing = b"".join(
        json.dumps({"started": f"worker:{rank}", "pid": rank + 1}).encode() + b"\n" for rank in range(count)
    )
    while (len(agent.pids()) < count or heard.count(b"\n") < count) and time.monotonic() < deadline:
        ended += sum(isinstance(each, Exited) for each in agent.poll())
        with contextlib.suppress(BlockingIOError):
            said += far.send(outgoing[said:])
        with contextlib.suppress(BlockingIOError):
            heard += far.recv(1 << 16)
    assert ended == 0 and len(agent.pids()) == count
    assert [json.loads(line)["start"]["rank"] for line in heard.splitlines()] == list(range(count))


def test_a_role_that_is_killed_before_it_is_forked_is_killed_as_soon_as_it_is(agent_and_far_end) -> None:
    agent, far = agent_and_far_end
    for rank in (0, 1):
        agent.start(spec_of(rank))
    assert agent.starting() == [("worker", 0), ("worker", 1)]
    for _ in range(3):
        agent.end("worker", 1)
    far.recv(1 << 16)
    far.sendall(b'{"started": "worker:0", "pid": 7}\n{"started": "worker:1", "pid": 8}\n')
    assert agent.poll() == [Started("worker", 0, 0, 7), Started("worker", 1, 0, 8)]
    assert agent.starting() == [] and agent.pids() == {"worker:0": 7, "worker:1": 8}
    far.settimeout(30)
    assert [json.loads(line) for line in far.recv(1 << 16).splitlines()] == [{"kill": 8, "signal": 9}]


def test_a_message_of_which_a_part_has_left_is_finished_and_others_can_be_dropped() -> None:
    near, far = socket.socketpair()
    with near, far:
        box = Outbox(near)
        for number in range(3):
            box.put({"n": number, "x": "y" * 1_000_000})
        box.drop()
        box.put({"close": True})
        assert not box.finish(0.05)
        found = b""
        far.setblocking(False)
        while not found.endswith(b'{"close": true}\n'):
            with contextlib.suppress(BlockingIOError):
                found += far.recv(1 << 20)
            box.flush()
        first, last = map(json.loads, found.splitlines())
        assert first["n"] == 0 and last == {"close": True}
        assert not box.stalled


def test_descriptors_go_with_their_message_also_when_it_has_to_wait() -> None:
    near, far = socket.socketpair()
    with near, far, open(os.devnull) as file:
        box = Outbox(near)
        box.put({"x": "y" * 1_000_000})
        box.put({"guard": 1}, [file.fileno()])
        found, descriptors = b"", []
        while not found.endswith(b'{"guard": 1}\n'):
            data, fds, _, _ = socket.recv_fds(far, 1 << 16, 2)
            found += data
            descriptors += fds
            box.flush()
        assert len(descriptors) == 1
        os.close(descriptors[0])


def test_a_role_that_cannot_be_forked_counts_as_ended_and_its_log_says_why(tmp_path: Path, monkeypatch):
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    near, far = socket.socketpair()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGINT)}
    server = ForkServer(far)
    agent = LocalAgent(handover=Handover(SUCCESSION, near, (), 0.0))
    try:
        monkeypatch.setattr(os, "fork", refuse)
        for rank in range(2):
            agent.start(spec_of(rank, str(tmp_path / f"worker-{rank}.log")))
        assert server.receive()
        ended = [each for each in agent.poll() if isinstance(each, Exited)]
        assert [(each.rank, each.code, each.cause) for each in ended] == [
            (0, 71, Cause.EXITED),
            (1, 71, Cause.EXITED),
        ]
        assert not agent.pids()
        assert "worker:1 could not be started: [Errno 11]" in (tmp_path / "worker-1.log").read_text()
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        server.release()
        agent.close()
