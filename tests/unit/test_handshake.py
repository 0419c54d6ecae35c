"""Both sides prove that they know the secret; strangers get nothing and hold nobody up."""

import random
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from paceline.comm import Address, Connection, Kind, Listener, connect, handshake, meeting, new_secret
from paceline.comm.meeting import accept
from paceline.exceptions import AuthError, LinkError
from tests.links import SECRET, Echo, client, echoes, open_descriptors, running, sockets, until

CARRIERS = pytest.mark.parametrize("carrier", ["unix", "tcp"])


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> float:
    """Strangers may hold a connection open for this long."""
    monkeypatch.setattr(meeting, "HANDSHAKE_S", 0.1)
    return 0.1


def both(
    left: Callable[[], Any], right: Callable[[], Any]
) -> tuple[Any | BaseException, Any | BaseException]:
    """Results or errors of two calls that talk to each other."""
    with ThreadPoolExecutor(2) as pool:
        a, b = pool.submit(left), pool.submit(right)
        return a.exception(10) or a.result(), b.exception(10) or b.result()


def meet(carrier: str, mine: bytes, theirs: bytes) -> tuple[Any, Any]:
    near, far = sockets(carrier)

    def initiate() -> handshake.Keys:
        with near:
            return handshake.initiate(near, mine, within_s=5)

    with far:
        return both(initiate, lambda: accept(far, theirs))


@CARRIERS
def test_both_sides_get_the_same_two_keys(carrier: str) -> None:
    keys, accepted = meet(carrier, SECRET, SECRET)
    assert isinstance(keys, handshake.Keys) and isinstance(accepted, Connection)
    accepted_keys = accepted.socket_state.keys
    assert (keys.send, keys.receive) == (accepted_keys.receive, accepted_keys.send)
    assert keys.send != keys.receive
    again, _ = meet(carrier, SECRET, SECRET)
    assert {again.send, again.receive}.isdisjoint({keys.send, keys.receive})


def test_secrets_are_long_and_never_the_same() -> None:
    found = {new_secret() for _ in range(100)}
    assert len(found) == 100 and {len(s) for s in found} == {32}


@CARRIERS
def test_with_two_secrets_both_sides_refuse(carrier: str) -> None:
    connecting, listening = meet(carrier, SECRET, b"x" * 32)
    assert isinstance(connecting, AuthError) and "does not know this run's secret" in str(connecting)
    # The connecting side saw it first and went away without a proof.
    assert isinstance(listening, AuthError)


def test_a_connecting_side_without_the_secret_is_refused_by_the_listening_side() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.sendall(b"PACELINE\x01" + bytes(32) + bytes(32))
        with pytest.raises(AuthError, match="the other side does not know this run's secret"):
            accept(far, SECRET)
        assert far.fileno() == -1, "the stranger's connection is still open"


def test_the_proof_of_one_side_is_no_proof_of_the_other() -> None:
    """A stranger who sends the listening side's own proof back to it learns nothing by it."""
    near, far = socket.socketpair()

    def reflect() -> None:
        near.sendall(b"PACELINE\x01" + bytes(32))
        answer = handshake.receive_exactly(near, 64, "in a test", time.monotonic() + 5)
        near.sendall(answer[32:])

    with near, far:
        _, error = both(reflect, lambda: accept(far, SECRET))
    assert isinstance(error, AuthError)


def test_a_listening_side_without_the_secret_learns_no_proof() -> None:
    near, far = socket.socketpair()
    with near, far:
        far.sendall(bytes(64))
        with pytest.raises(AuthError, match="belongs to another run, or is an impostor"):
            handshake.initiate(near, SECRET, within_s=5)
        near.shutdown(socket.SHUT_WR)
        said = far.recv(4096)
        assert len(said) == len(b"PACELINE\x01") + 32 and far.recv(1) == b""


def test_connect_names_the_peer_that_does_not_know_the_secret() -> None:
    with running(Echo()) as hub:
        for link in ("tcp", "shm"):
            with pytest.raises(AuthError, match="server:3: the other side does not know"):
                connect(hub.listener.address, b"x" * 32, peer="server:3", link=link)
        with client(hub) as good:
            assert echoes(good)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (b"", "closed the connection before it authenticated"),
        (b"PACE", "closed the connection before it authenticated"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n", "does not speak Paceline's"),
        (b"PACELINE\x02" + bytes(32), "does not speak Paceline's"),
        (b"\x16\x03\x01" + bytes(60), "does not speak Paceline's"),
        (b"PACELINE\x01" + bytes(32), "before it proved that it knows the secret"),
    ],
    ids=["nothing", "half", "http", "version", "tls", "no proof"],
)
@CARRIERS
def test_garbage_is_refused(carrier: str, said: bytes, message: str) -> None:
    near, far = sockets(carrier)
    with near, far:
        near.sendall(said)
        near.shutdown(socket.SHUT_WR)
        with pytest.raises(AuthError, match=message):
            accept(far, SECRET)


@pytest.mark.parametrize(
    "said", [b"", b"PACELINE", b"PACELINE\x01" + bytes(32)], ids=["nothing", "half", "greeting"]
)
def test_silence_is_refused_in_time_by_the_listening_side(said: bytes, impatient: float) -> None:
    near, far = socket.socketpair()
    with near, far:
        near.sendall(said)
        before = time.monotonic()
        with pytest.raises(AuthError, match="went silent before it"):
            accept(far, SECRET)
        assert impatient / 2 < time.monotonic() - before < 20 * impatient


def test_silence_is_refused_in_time_by_the_connecting_side(impatient: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = Address(unix=None, host="127.0.0.1", port=listening.getsockname()[1])
        before = time.monotonic()
        with pytest.raises(AuthError, match="server:0: the other side went silent"):
            connect(address, SECRET, peer="server:0")
        assert time.monotonic() - before < 20 * impatient


def test_a_byte_now_and_then_does_not_hold_a_connection_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    timeouts: list[float] = []

    class Slow:
        def settimeout(self, seconds: float) -> None:
            timeouts.append(seconds)

        def recv(self, count: int) -> bytes:
            nonlocal now
            now += 1.0
            return b"P"

    monkeypatch.setattr("paceline.comm.handshake.time.monotonic", lambda: now)
    with pytest.raises(AuthError, match="went silent in a test"):
        handshake.receive_exactly(Slow(), 32, "in a test", deadline=5.0)  # type: ignore[arg-type]
    assert now == 5.0
    assert all(a > b for a, b in pairwise(timeouts)) and min(timeouts) > 0


def test_a_full_queue_of_newcomers_is_no_reason_to_hang(impatient: float) -> None:
    listener = Listener(tcp=False)
    listener.sockets[0].listen(0)
    waiting = []
    try:
        with pytest.raises(BlockingIOError):
            for _ in range(5):
                sock = socket.socket(socket.AF_UNIX)
                waiting.append(sock)
                sock.setblocking(False)
                sock.connect(f"\0{listener.address.unix}")
        with pytest.raises(LinkError, match="cannot meet server:0 on this host"):
            connect(listener.address, SECRET, peer="server:0", link="shm")
    finally:
        for sock in waiting:
            sock.close()
        listener.close()


@pytest.mark.parametrize("tcp", [True, False], ids=["tcp", "unix"])
def test_a_port_scan_is_counted_and_the_hub_goes_on(tcp: bool, impatient: float) -> None:
    random_ = random.Random(1)
    handler = Echo()
    before = open_descriptors()
    with running(handler) as hub, client(hub) as good:
        address = hub.listener.address
        for i in range(60):
            sock = socket.socket(socket.AF_INET if tcp else socket.AF_UNIX)
            with sock:
                sock.settimeout(5)
                sock.connect((address.host, address.port) if tcp else f"\0{address.unix}")
                if i % 2:
                    sock.sendall(random_.randbytes(200))
                    assert _drain(sock) == b"", "a stranger was told something"
            if i % 10 == 0:
                assert echoes(good)
        assert echoes(good)
        until(hub, lambda: len(handler.strangers) == 60)
    assert handler.hellos == ["worker:0"]
    assert open_descriptors() == before


def test_silent_strangers_do_not_keep_a_good_client_out(impatient: float) -> None:
    handler = Echo()
    with running(handler) as hub:
        silent = [
            socket.create_connection((hub.listener.address.host, hub.listener.address.port))
            for _ in range(40)
        ]
        with client(hub) as good:
            assert echoes(good)
            until(hub, lambda: len(handler.strangers) == 40)
            assert echoes(good)
        for sock in silent:
            sock.close()
    assert all("went silent before it authenticated" in reason for reason in handler.strangers)


def test_more_strangers_than_places_are_turned_away_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.comm.hub._MAX_NEWCOMERS", 3)
    monkeypatch.setattr(meeting, "HANDSHAKE_S", 1.0)
    handler = Echo()
    with running(handler) as hub:
        address = (hub.listener.address.host, hub.listener.address.port)
        strangers = [socket.create_connection(address, timeout=5) for _ in range(5)]
        until(hub, lambda: len(handler.strangers) == 2)
        assert set(handler.strangers) == {"too many connections authenticating at once"}
        for sock in strangers:
            sock.close()
        until(hub, lambda: len(handler.strangers) == 5)
        with client(hub) as good:
            assert echoes(good)


def test_an_authenticated_newcomer_must_say_hello() -> None:
    handler = Echo()
    with running(handler) as hub:
        hellos: list[tuple[Kind, dict[str, Any]]] = [
            (Kind.STATS, {}),
            (Kind.HELLO, {}),
            (Kind.HELLO, {"role": "worker"}),
            (Kind.HELLO, {"role": "worker", "rank": "0"}),
            (Kind.HELLO, {"role": 1, "rank": True}),
        ]
        for kind, body in hellos:
            connection = connect(hub.listener.address, SECRET, peer="server:0")
            connection.sock.settimeout(5)
            connection.send(kind, body)
            with pytest.raises(LinkError, match="server:0 closed the link"):
                connection.receive()
            connection.close()
        until(hub, lambda: len(handler.strangers) == 5)
    assert handler.hellos == []
    assert "STATS instead of HELLO" in handler.strangers[0]


def test_another_user_may_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = socket.socketpair()
    with near, far:
        monkeypatch.setattr("paceline.comm.connection.os.geteuid", lambda: 12_345)
        with pytest.raises(AuthError, match="may not connect to a role of user 12345"):
            accept(far, SECRET)


def _drain(sock: socket.socket) -> bytes:
    data = b""
    try:
        while piece := sock.recv(4096):
            data += piece
    except ConnectionError:
        pass
    return data
