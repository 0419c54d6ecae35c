"""A link that outlives the controller at its other end."""

import queue
import subprocess
import sys
import threading

import pytest

from paceline.comm import Address, Connection, Frame, Hub, Kind, Listener, connect
from paceline.comm.lasting import LastingLink
from paceline.exceptions import LinkError, MessageError
from tests.links import PATIENCE_S, SECRET

HELLO = {"role": "worker", "rank": 1, "incarnation": 0, "pid": 1}


class Controller:
    """Hears what a role says, in a thread, until it is `killed`; its listening socket outlives it."""

    def __init__(self, sock=None, *, answers=True) -> None:
        listener = Listener.inherited(sock) if sock is not None else Listener(tcp=False)
        self.sock = listener.sockets[0].dup()
        self.address: Address = listener.address
        self.heard: queue.Queue[tuple[Kind, dict]] = queue.Queue()
        self._answers = answers
        self._links: list[Connection] = []
        self._going = True
        self._hub = Hub(self, listener, SECRET, patience_s=PATIENCE_S)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while self._going:
            self._hub.poll(PATIENCE_S)

    def on_hello(self, connection: Connection, body: dict) -> None:
        self._links.append(connection)
        self.heard.put((Kind.HELLO, body))

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        self.heard.put((frame.kind, frame.body))
        if frame.kind is Kind.BYE and self._answers:
            connection.send(Kind.HEARD)

    def on_end(self, connection: Connection, reason: str) -> None:
        """Of no interest."""

    def on_stranger(self, reason: str) -> None:
        """Of no interest."""

    def hears(self) -> tuple[Kind, dict]:
        return self.heard.get(timeout=PATIENCE_S)

    @property
    def serving(self) -> bool:
        return self._thread.is_alive()

    def tell_first(self, kind: Kind) -> None:
        self._links[0].send(kind)

    def killed(self) -> None:
        self._hub.post(lambda: setattr(self, "_going", False))
        self._thread.join(PATIENCE_S)
        for link in self._links:
            link.close()
        self._hub.close()


@pytest.fixture
def controllers():
    """Makes controllers one after the other on one socket; all are gone afterwards."""
    made: list[Controller] = []

    def make(**options) -> Controller:
        made.append(Controller(made[-1].sock if made else None, **options))
        return made[-1]

    yield make
    for each in made:
        if each.serving:
            each.killed()
        each.sock.close()


def linked(controller: Controller, patience_s: float = PATIENCE_S) -> LastingLink:
    link = LastingLink(controller.address, SECRET, patience_s=patience_s)
    link.hello(HELLO)
    assert controller.hears() == (Kind.HELLO, HELLO)
    return link


def test_the_next_controller_hears_who_this_is_and_what_may_be_said_only_once(controllers):
    first = controllers()
    link = linked(first)
    link.send(Kind.STATS, {"clock": 1})
    assert first.hears() == (Kind.STATS, {"clock": 1})
    first.killed()
    link.send(Kind.STATS, {"clock": 2})
    link.send(Kind.NOTE, {"text": "the disk is full"})
    second = controllers()
    assert second.hears() == (Kind.HELLO, HELLO)
    assert second.hears() == (Kind.NOTE, {"text": "the disk is full"})
    link.send(Kind.STATS, {"clock": 3})
    assert second.hears() == (Kind.STATS, {"clock": 3})
    link.close()


def test_last_words_that_a_controller_took_with_it_are_said_to_the_next(controllers):
    first = controllers(answers=False)
    link = linked(first)
    ending = threading.Thread(target=link.say_last, args=(Kind.BYE,))
    ending.start()
    assert first.hears() == (Kind.BYE, {})
    first.killed()
    second = controllers()
    assert second.hears() == (Kind.HELLO, HELLO)
    assert second.hears() == (Kind.BYE, {})
    ending.join(PATIENCE_S)
    assert not ending.is_alive()
    link.close()


@pytest.mark.parametrize("kind", [Kind.ERROR, Kind.NOTE])
def test_a_message_that_is_too_large_is_the_senders_error_and_no_reason_to_reconnect(controllers, kind):
    controller = controllers()
    link = linked(controller)
    with pytest.raises(MessageError, match=f"a {kind.name} body of .* is over its limit"):
        link.send(kind, {"note": "x" * (5 << 20)})
    link.send(Kind.STATS, {"clock": 1})
    # The same link goes on: nobody has said hello again, and what was refused is not said either.
    assert controller.hears() == (Kind.STATS, {"clock": 1})
    controller.killed()
    link.send(Kind.STATS, {"clock": 2})  # with this it sees that the controller is gone
    with pytest.raises(MessageError):
        link.send(kind, {"note": "x" * (5 << 20)})
    assert controllers().hears() == (Kind.HELLO, HELLO)
    link.close()


def test_a_link_that_is_closed_between_two_controllers_is_not_opened_again(controllers, monkeypatch):
    controller = controllers()
    link = linked(controller)
    connected, closed = threading.Event(), threading.Event()

    def dial_and_wait(*args, **options):
        fresh = connect(*args, **options)
        connected.set()
        assert closed.wait(PATIENCE_S)
        return fresh

    monkeypatch.setattr("paceline.comm.lasting.connect", dial_and_wait)
    controller.killed()
    link.send(Kind.STATS, {"clock": 1})
    (looking,) = (each for each in threading.enumerate() if each.name == "to the next controller")
    second = controllers()
    assert connected.wait(PATIENCE_S)
    link.close()
    closed.set()
    looking.join(PATIENCE_S)
    assert not looking.is_alive()
    assert link.sock.fileno() == -1
    assert second.hears() == (Kind.HELLO, HELLO)


def test_who_waits_for_a_controller_gets_the_first_frame_of_the_next(controllers):
    first = controllers()
    link = linked(first)
    got: list[Kind] = []
    waiting = threading.Thread(target=lambda: got.append(link.receive().kind))
    waiting.start()
    first.killed()
    second = controllers()
    assert second.hears() == (Kind.HELLO, HELLO)
    second.tell_first(Kind.START)
    waiting.join(PATIENCE_S)
    assert got == [Kind.START]
    link.close()


def test_without_patience_it_ends_with_the_controller(controllers):
    first = controllers()
    link = linked(first, patience_s=0.0)
    first.killed()
    with pytest.raises(LinkError):
        link.receive()
    with pytest.raises(LinkError):
        for _ in range(2):
            link.send(Kind.NOTE, {"text": "?"})
    link.close()


ALONE = """
import sys
from paceline.comm import Address, Kind
from paceline.comm.lasting import LastingLink
address = Address(unix=sys.argv[1], host="127.0.0.1", port=0)
link = LastingLink(address, bytes.fromhex(sys.argv[2]), patience_s=0.2)
link.hello({"role": "worker", "rank": 1, "incarnation": 0, "pid": 1})
link.receive()
"""


def test_a_role_to_which_no_controller_comes_back_ends(controllers):
    first = controllers()
    with subprocess.Popen(
        [sys.executable, "-c", ALONE, str(first.address.unix), SECRET.hex()],
        stderr=subprocess.PIPE,
        text=True,
    ) as role:
        assert first.hears() == (Kind.HELLO, HELLO)
        first.killed()
        first.sock.close()  # nobody listens there any more
        _, said = role.communicate(timeout=2 * PATIENCE_S)
    assert role.returncode == 1
    assert "no controller came back within 0.2 s" in said and "this role ends" in said
