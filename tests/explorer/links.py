"""What a worker's real code is given in the place of sockets: links whose answers the explorer chooses.

A blocking call whose answer has not come raises `Blocked`. The explorer runs the operation again from its
beginning when one more answer is known, so every state of a worker is an operation and the answers to it so
far.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.comm import Address, Frame, Kind
from paceline.comm.frames import Body
from paceline.comm.message_codec import body_of
from paceline.comm.worker_messages import AttachMessage
from paceline.exceptions import LinkError
from tests.explorer.model import END, Message, Output, Pid, message

__all__ = [
    "Blocked",
    "ExploredCarrier",
    "ExploredLane",
    "ExploredLink",
    "ExploredMemory",
    "Surroundings",
    "reach",
]


class Blocked(Exception):
    """A worker waits: for a message of a process (`recv`), or for an answer to a call (`connect`)."""

    def __init__(self, what: str, whom: Pid) -> None:
        super().__init__(what, whom)
        self.wants = (what, whom)


class Surroundings:
    """The messages that an operation has got, and those that it has sent."""

    def __init__(self, me: Pid, inputs: Sequence[Message]) -> None:
        self.me = me
        self.inputs = list(inputs)
        self.outputs: list[Output] = []
        self.positions: list[int] = []
        """Samples that the next push was computed from."""

    def next(self, what: str, whom: Pid) -> Message:
        if not self.inputs:
            raise Blocked(what, whom)
        return self.inputs.pop(0)


_NOWHERE = Pid("c", -1, 0)
_now = [Surroundings(_NOWHERE, ())]
"""Of the operation that runs."""


def around(surroundings: Surroundings) -> None:
    """From here on links belong to this operation."""
    _now[0] = surroundings


def receive(whom: Pid) -> Message:
    return _now[0].next("recv", whom)


def put(to: Pid | None, sent: Message, do: str = "") -> None:
    _now[0].outputs.append(Output(to, sent, do))


def computed_from(positions: list[int]) -> None:
    """The next push was computed from these samples."""
    _now[0].positions = positions


class _Sock:
    def settimeout(self, seconds: float | None) -> None: ...


class ExploredLink:
    """A connection to a server process."""

    local = same_host = True

    def __init__(self, server: Pid) -> None:
        self.server = server
        self.peer = f"server:{server.rank}"
        self.sock = _Sock()
        self.payload_sent = self.payload_received = 0
        self.keeps = False
        self.received = 0
        self.closed = False

    def keep(self) -> None:
        self.keeps = True

    def wait(self, seconds: float) -> bool:
        return True

    def spin(self, seconds: float) -> None: ...

    def tell(self, said: object, payload: Sequence[memoryview] = (), descriptors: Sequence[int] = ()) -> None:
        kind, body = body_of(said)
        self.send(kind, body, payload, descriptors)

    def send(
        self, kind: Kind, body: Body, payload: Sequence[memoryview] = (), descriptors: Sequence[int] = ()
    ) -> None:
        if self.closed:
            raise LinkError(f"the link to {self.peer} is closed")
        if kind is Kind.PUSH:
            body = {**body, "at": _now[0].positions}
        if kind is not Kind.HELLO:
            put(self.server, Message(kind.name, json.dumps(body, sort_keys=True)))

    def receive(self) -> Frame:
        if self.closed:
            raise LinkError(f"the link to {self.peer} is closed")
        got = receive(self.server)
        if got == END:
            raise LinkError(f"{self.peer} is gone")
        return Frame(Kind[got.kind], got.body, 0, [])

    def read_blob(self, frame: Frame, limit: int) -> bytes:
        return b""

    def close(self) -> None:
        self.closed = True


def reach(address: Address, secret: bytes = b"", *, peer: str, **more: Any) -> ExploredLink:
    """In the place of comm.connect: the address names the process."""
    rank, incarnation = divmod(address.port - 1, 1000)
    whom = Pid("s", rank, incarnation)
    if _now[0].next("connect", whom).kind == "REFUSED":
        raise LinkError(f"nobody listens at {peer} any more")
    return ExploredLink(whom)


ACCEPTED, REFUSED = message("ACCEPTED"), message("REFUSED")
"""Answers to `connect`."""


class ExploredCarrier:
    """Payloads lie in shared memory: nothing travels."""

    def __init__(self, compress: str) -> None:
        self._compress = compress

    def offer(self, message: AttachMessage) -> Sequence[int]:
        if self._compress != "none":
            message.compress = self._compress
        return ()

    def hear(self, reply: Any) -> None: ...

    def arrange(self, sends: Sequence[Any], owned: Sequence[int]) -> None:
        return None

    def write(self, message: Any, due: Any) -> tuple[Any, Sequence[memoryview]]:
        return message, ()

    def read(self, frame: Frame, into: Any = None) -> Iterator[int]:
        return iter(())

    def close(self) -> None: ...


class ExploredMemory:
    """The parameters are of no interest here."""

    def __init__(self, layout: Any) -> None:
        self.layout = layout

    def in_place(self, mode: Any) -> bool:
        return bool(mode.in_place)


class ExploredLane:
    """Nobody measures."""

    def enter(self, phase: Any, *more: Any) -> Any:
        return phase

    def blame(self, worker: int, seconds: float) -> None: ...

    def carried(self, nbytes: int) -> None: ...
