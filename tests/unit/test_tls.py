"""Links under TLS: who gets in, what travels, and that two threads may use one at the same time."""

import os
import random
import select
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from paceline.comm import Address, Connection, Hub, Kind, Listener, Secret, connect, meeting
from paceline.comm import tls as module
from paceline.comm.certificates import Authority
from paceline.comm.impairment import LinkConditions
from paceline.comm.meeting import accept
from paceline.comm.tls import SecureSocket
from paceline.exceptions import LinkError
from tests.certificates import RUN, authority, certificate, secret
from tests.links import SECRET, Echo, client, echoes, running, until


@contextmanager
def listening() -> Iterator[tuple[Address, socket.socket]]:
    """Somewhere to connect to."""
    listener = Listener()
    (sock,) = [each for each in listener.sockets if each.family != socket.AF_UNIX]
    sock.setblocking(True)
    try:
        yield listener.address, sock
    finally:
        listener.close()


@contextmanager
def tls_link(
    theirs: bytes | None = None, conditions: LinkConditions | None = None
) -> Iterator[tuple[Connection, Connection]]:
    """Both ends of a TCP link between a worker and a server: the worker's, the server's."""
    with listening() as (address, sock), ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: accept(sock.accept()[0], theirs or secret("server")))
        near = connect(address, secret("worker"), peer="server:0", link="tcp", conditions=conditions)
        far = other.result(10)
    for end in (near, far):
        end.sock.settimeout(10)
    try:
        yield near, far
    finally:
        near.close()
        far.close()


def refusals(mine: bytes, theirs: bytes) -> tuple[str, str]:
    """What each side says about the other; "" if it has no objection."""

    def said(call: Callable[[], Connection]) -> str:
        try:
            call().close()
        except LinkError as error:
            return str(error)
        return ""

    with listening() as (address, sock), ThreadPoolExecutor(1) as pool:
        other = pool.submit(said, lambda: accept(sock.accept()[0], theirs))
        near = said(lambda: connect(address, mine, peer="server:0", link="tcp"))
        return near, other.result(10)


def test_frames_and_payloads_go_both_ways_under_tls_1_3() -> None:
    payload = random.Random(0).randbytes(1_000_003)
    with tls_link() as (near, far), ThreadPoolExecutor(1) as pool:
        assert isinstance(near.sock, SecureSocket) and near.sock.tls.version() == "TLSv1.3"
        assert not near.local and not far.local
        for a, b in ((near, far), (far, near)):
            sent = pool.submit(
                a.send, Kind.PUSH, {"clock": 3}, [memoryview(payload)[:7], memoryview(payload)[7:]]
            )
            frame = b.receive()
            assert frame.body == {"clock": 3} and b.read_blob(frame, 1 << 20) == payload
            sent.result()
        assert near.payload_sent == far.payload_received == len(payload)


def test_nothing_of_a_frame_can_be_read_on_the_way() -> None:
    seen = bytearray()

    class Spy(socket.socket):
        def sendall(self, data: Any, flags: int = 0) -> None:
            seen.extend(data)
            super().sendall(data, flags)

    with tls_link() as (near, far):
        assert isinstance(near.sock, SecureSocket)
        near.sock.replace(Spy(fileno=near.sock.carrier.detach()))
        near.send(Kind.STATE, {"loss": "confidential"}, [memoryview(b"gradient" * 100)])
        frame = far.receive()
        assert frame.body == {"loss": "confidential"} and far.read_blob(frame, 1 << 20) == b"gradient" * 100
    assert len(seen) > 900
    assert b"confidential" not in seen and b"gradient" not in seen


def test_a_bit_flipped_in_a_payload_on_its_way_is_noticed() -> None:
    with tls_link() as (near, far):
        assert isinstance(near.sock, SecureSocket)
        near.sock.tls.write(b"x" * 5000)
        sealed = bytearray(near.sock.outgoing.read())
        sealed[4000] ^= 1
        near.sock.carrier.sendall(sealed)
        with pytest.raises(LinkError, match="what arrived was damaged on its way"):
            far.receive()


EXPIRED = "certificate has expired"


@pytest.mark.parametrize(
    ("mine", "theirs", "near", "far"),
    [
        # The connecting side sees the other's certificate first, and goes away.
        (("worker",), ("server", {"hours": -1}), EXPIRED, "it has expired"),
        (
            ("worker",),
            ("server", {"number": 1}),
            "signed by another authority",
            "signed by another authority",
        ),
        (("worker",), ("server", {"run": "b"}), "signed by another authority", "another authority"),
        (("worker",), ("worker",), "has a worker's certificate: it is no server, or an impostor", "closed"),
        (("worker",), ("controller",), "has a controller's certificate", "closed"),
        # The listening side refuses, and says so.
        (("worker", {"hours": -1}), ("server",), "refused this role's certificate: it has expired", EXPIRED),
        (
            ("worker", {"hosts": ("127.0.0.1", "node-1")}),
            ("server", {"hosts": ("node-1", "10.0.0.7")}),
            "good for node-1, 10.0.0.7, and it was reached at 127.0.0.1",
            "closed",
        ),
    ],
    ids=["expired", "authority", "run", "worker as server", "controller as server", "client expired", "host"],
)
def test_who_is_refused_and_what_both_sides_say(mine: Any, theirs: Any, near: str, far: str) -> None:
    def made(role: str, settings: dict[str, Any] = {}) -> Secret:  # noqa: B006
        return secret(role, **settings)

    said = refusals(made(*mine), made(*theirs))
    assert near in said[0] and said[0].startswith("server:0: ")
    assert far in said[1]


def test_a_certificate_of_another_run_by_the_same_authority_is_refused_by_both() -> None:
    ours = authority(RUN, 0)
    other = Authority("another-run", ours.certificate, ours.key).issue("server", lasting=timedelta(days=1))
    near, far = refusals(secret("worker"), Secret(SECRET, other))
    assert "certificate is for run 'another-run', and this is run 'a-run'" in near
    assert "certificate is for run 'a-run', and this is run 'another-run'" in far


def test_hosts_in_a_certificate_are_where_it_is_good() -> None:
    with tls_link(theirs=secret("server", hosts=("127.0.0.1",))) as (near, _):
        assert isinstance(near.sock, SecureSocket) and near.sock.named.hosts == ("127.0.0.1",)


def test_the_secret_is_needed_under_tls_as_well() -> None:
    near, far = refusals(secret("worker", value=b"x" * 32), secret("server"))
    assert "does not know this run's secret" in near
    assert far


def test_one_side_with_tls_and_one_without_part() -> None:
    near, far = refusals(SECRET, secret("server"))
    assert near and "it does not speak TLS (a port scan, or a role without --tls?)" in far
    near, far = refusals(secret("worker"), SECRET)
    assert "started without --tls" in near or "cannot connect" in near
    assert "does not speak Paceline's protocol" in far


def test_strangers_with_tls_but_no_certificate_are_told_why_and_others_are_served() -> None:
    handler = Echo()
    with running(handler, secret=secret("server")) as hub:
        address = hub.listener.address
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with (
            socket.create_connection((address.host, address.port), timeout=5) as sock,
            pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"),
            context.wrap_socket(sock) as stranger,
        ):
            stranger.sendall(b"PACELINE\x01" + bytes(32))
            stranger.recv(64)
        until(hub, lambda: len(handler.strangers) == 1)
        assert "it showed no certificate" in handler.strangers[0]
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with (
            socket.create_connection((address.host, address.port), timeout=5) as sock,
            pytest.raises((ssl.SSLError, ConnectionError)),
        ):
            context.wrap_socket(sock)
        until(hub, lambda: len(handler.strangers) == 2)
        assert "an older TLS than 1.3" in handler.strangers[1]
        with client(hub, link="tcp", secret=secret("worker")) as good:
            assert echoes(good)


def test_a_silent_stranger_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "HANDSHAKE_S", 0.1)
    handler = Echo()
    with running(handler, secret=secret("server")) as hub:
        address = hub.listener.address
        with socket.create_connection((address.host, address.port), timeout=5) as sock:
            sock.sendall(b"\x16\x03\x01")  # the beginning of a TLS handshake
            until(hub, lambda: bool(handler.strangers))
            assert sock.recv(1) == b""
    assert "went silent before it authenticated" in handler.strangers[0]


def test_a_role_must_be_the_one_of_its_certificate() -> None:
    """A worker that knows the secret and has a good certificate says in its HELLO that it is a server."""
    handler = Echo()
    with running(handler, secret=secret("server")) as hub:
        bad = connect(hub.listener.address, secret("worker"), peer="server:0", link="tcp")
        try:
            bad.sock.settimeout(5)
            bad.send(Kind.HELLO, {"role": "server", "rank": 1})
            answer = bad.receive()
        finally:
            bad.close()
        assert answer.kind is Kind.ERROR
        assert "says that it is a server, and its certificate is a worker's" in answer.body["message"]
        until(hub, lambda: len(handler.strangers) == 1)
    assert handler.hellos == []


def test_listening_on_every_network_needs_tls() -> None:
    with pytest.raises(LinkError, match="listening on every network of this host, which needs --tls"):
        Hub(Echo(), Listener(host="0.0.0.0"), SECRET, patience_s=1)
    Hub(Echo(), Listener(host="0.0.0.0"), secret("server"), patience_s=1).close()


def test_unix_sockets_stay_as_they_are() -> None:
    with running(Echo(), secret=secret("server")) as hub, client(hub, secret=SECRET) as near:
        assert near.local and not isinstance(near.sock, SecureSocket)
        assert echoes(near)


def test_a_hub_serves_frames_that_arrived_together() -> None:
    """Several frames in one packet: after the first the socket is empty, and the hub must not sleep on it."""
    handler = Echo()
    with (
        running(handler, secret=secret("server")) as hub,
        client(hub, link="tcp", secret=secret("worker")) as near,
    ):
        assert echoes(near)
        sealed: list[bytes] = []

        class Holding(socket.socket):
            def sendall(self, data: Any, flags: int = 0) -> None:
                sealed.append(bytes(data))

        assert isinstance(near.sock, SecureSocket)
        plain = near.sock.carrier
        holding = Holding(fileno=os.dup(plain.fileno()))
        near.sock.replace(holding)
        for number in range(20):
            near.send(Kind.STATE, {"number": number}, [memoryview(b"p" * number)] if number else ())
        holding.close()
        near.sock.replace(plain)
        plain.sendall(b"".join(sealed))
        for number in range(20):
            frame = near.receive()
            assert frame.body == {"number": number}
            assert near.read_blob(frame, 100) == b"p" * number


def test_spinning_sees_what_was_read_ahead() -> None:
    with tls_link() as (near, far):
        far.send(Kind.STATS, {"a": 1})
        far.send(Kind.STATS, {"b": 2})
        assert near.receive().body == {"a": 1}
        deadline = time.monotonic() + 10
        while not near.waiting and time.monotonic() < deadline:
            if select.select([near], [], [], 0.1)[0]:
                break
        before = time.monotonic()
        near.spin(30)
        assert time.monotonic() - before < 10
        assert near.receive().body == {"b": 2}


def test_a_pause_between_frames_is_a_timeout_and_one_within_a_frame_is_the_end() -> None:
    with tls_link() as (near, far):
        assert isinstance(near.sock, SecureSocket)
        far.sock.settimeout(0.05)
        with pytest.raises(TimeoutError):
            far.receive()
        near.sock.tls.write(b"x" * 100)
        near.sock.carrier.sendall(near.sock.outgoing.read()[:50])  # half a record
        with pytest.raises(LinkError, match="it stopped in the middle of something"):
            far.receive()


def test_an_early_end_is_an_error_in_a_frame_and_an_end_between_frames() -> None:
    for cut, message in ((0, "worker:0 closed the link$"), (20, "in the middle of a frame")):
        with tls_link() as (near, far):
            assert isinstance(near.sock, SecureSocket)
            far.peer = "worker:0"
            if cut:
                near.sock.sendall(b"P" * cut)
            near.close()
            with pytest.raises(LinkError, match=message):
                far.receive()


class Alone:
    """OpenSSL's object, and how often it was used by two threads at the same time."""

    def __init__(self, tls: ssl.SSLObject) -> None:
        self.collisions = 0
        self.tls = tls
        self._used = threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            mine = self._used.acquire(blocking=False)
            self.collisions += not mine
            try:
                return getattr(self.tls, name)(*args)
            finally:
                if mine:
                    self._used.release()

        return call


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("conditions", [None, LinkConditions(latency_s=0.001)], ids=["plain", "impaired"])
def test_one_thread_sends_while_another_receives_under_load(
    restless: None, conditions: LinkConditions | None
) -> None:
    """Both ends send and receive at the same time, frames of many sizes, and every byte is right.

    Without the lock of SecureSocket one link in twelve breaks, because OpenSSL mixes up what the two threads
    wait for; so it is counted how often both are in it.
    """
    frames, sizes = 200 if conditions else 1200, (20_000, 1, 20_000, 100, 20_000, 70_001)
    data = memoryview(random.Random(1).randbytes(max(sizes) + frames))

    def send(end: Connection) -> None:
        for i in range(frames):
            end.send(Kind.PUSH, {"i": i}, [data[i : i + sizes[i % len(sizes)]]])

    def receive(end: Connection) -> int:
        for i in range(frames):
            frame = end.receive()
            assert frame.body == {"i": i}
            room = bytearray(sizes[i % len(sizes)])
            end.read_into([memoryview(room)[: len(room) // 2], memoryview(room)[len(room) // 2 :]])
            assert room == data[i : i + len(room)], f"frame {i} is damaged"
        return frames

    with tls_link(conditions=conditions) as (near, far), ThreadPoolExecutor(4) as pool:
        for end in (near, far):
            end.sock.tls = Alone(end.sock.tls)
        work = [pool.submit(call, end) for call in (send, receive) for end in (near, far)]
        assert [each.result(60) for each in work] == [None, None, frames, frames]
        assert [end.sock.tls.collisions for end in (near, far)] == [0, 0]


def test_keys_are_loaded_from_no_file_on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[str] = []

    load = ssl.SSLContext.load_cert_chain

    def watched(self: ssl.SSLContext, certfile: str) -> None:
        paths.append(os.readlink(certfile))
        load(self, certfile)

    module.context_of.cache_clear()
    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", watched)
    with tls_link():
        pass
    module.context_of.cache_clear()
    assert len(paths) == 2 and all(path.startswith("/memfd:") for path in paths)


def test_a_key_is_not_in_what_is_printed_of_a_certificate() -> None:
    made = certificate("worker")
    assert "PRIVATE KEY" in made.key and "PRIVATE KEY" not in repr(made)


def test_a_secret_with_a_certificate_is_the_secret() -> None:
    made = secret("worker")
    assert made == SECRET and isinstance(made, bytes) and made.hex() == SECRET.hex()
    assert Secret.certificate_of(made) is not None and Secret.certificate_of(SECRET) is None
