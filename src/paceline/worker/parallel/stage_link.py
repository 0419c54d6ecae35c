"""What one stage of a pipeline passes to its neighbour: activations one way, their gradients the other."""

import json
import socket
import struct
from typing import Any, NamedTuple

from torch import Tensor

from paceline.comm import Region
from paceline.exceptions import DeadlineError, LinkError, PacelineError
from paceline.worker.parallel.handed_values import from_handed, handed
from paceline.worker.parallel.mailbox import places_of, views_at

__all__ = ["CallAborted", "Passed", "StageLink"]

_LENGTH = struct.Struct("<Q")
_SMALLEST = 1 << 12


class CallAborted(PacelineError):
    """Another stage has failed, and says why itself."""


class Passed(NamedTuple):
    """What arrived."""

    values: Any
    """Tensors in it lie in memory that the neighbour writes again once it has got a later message, or the
    call is over: copy what is kept."""
    tensors: list[Tensor]
    """Those of `values`, in order."""
    differentiable: list[int]
    """The places of those among them that have a gradient."""


class _Slot:
    """Memory for one message."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.used_by = -1
        """Number of the message that it holds."""


class StageLink:
    """One stage's end of a link to a neighbour. A send does not wait for the neighbour.

    Args:
        neighbour: for messages: "stage 2 of --pipeline 3".
        deadline_s: how long a message may take to come.
    """

    def __init__(self, sock: socket.socket, neighbour: str, deadline_s: float) -> None:
        self.sock = sock
        self._neighbour = neighbour
        self._deadline_s = deadline_s
        self._slots: list[_Slot] = []
        self._rooms: dict[int, Region] = {}
        """The neighbour's slots, mapped here."""
        self._sent = 0
        self._received = 0
        self._read = 0
        """How many of the messages that were sent the neighbour has received, as far as is known."""
        sock.settimeout(deadline_s)

    def begin_call(self) -> None:
        """The call before is over: the neighbour has read everything."""
        self._read = self._sent

    def send(self, call: int, what: str, value: Any) -> None:
        """Pass something on.

        Args:
            what: "F3": of the forward pass of micro-batch 3; "B3" of its backward pass.

        Raises:
            TypeError: something that cannot be handed over.
        """
        tensors: list[Tensor] = []
        written = handed(value, tensors)
        places, size = places_of(tensors)
        head: dict[str, Any] = {
            "call": call,
            "what": what,
            "values": written,
            "places": places,
            "gradients": [k for k, t in enumerate(tensors) if t.requires_grad],
            "read": self._received,
        }
        fresh: Region | None = None
        if tensors:
            head["slot"], fresh = self._slot_for(size)
            region = self._slots[head["slot"]].region
            for view, tensor in zip(views_at(region, places), tensors, strict=True):
                view.copy_(tensor.detach())
            if fresh is not None:
                head["room"] = fresh.size
        self._send(head, fresh)

    def abort(self, call: int) -> None:
        """Tell the neighbour that this stage has failed."""
        self._send({"call": call, "what": "abort", "read": self._received}, None)

    def receive(self, call: int, what: str) -> Passed:
        """Wait for what the neighbour passes on.

        Raises:
            CallAborted: the neighbour's call has failed.
            LinkError: it has ended.
            DeadlineError: it takes too long.
        """
        while True:
            head = self._receive()
            self._received += 1
            self._read = max(self._read, head["read"])
            if head["call"] < call:  # of a call that was given up
                continue
            if head["what"] == "abort":
                raise CallAborted(f"{self._neighbour} failed")
            if (head["call"], head["what"]) != (call, what):
                raise LinkError(
                    f"{self._neighbour} passed {head['what']} of call {head['call']} on, expected {what} of "
                    f"call {call}"
                )
            tensors = views_at(self._rooms[head["slot"]], head["places"]) if "slot" in head else []
            return Passed(from_handed(head["values"], tensors), tensors, head["gradients"])

    def close(self) -> None:
        """Close the socket; the neighbour sees it."""
        self.sock.close()
        for slot in self._slots:
            slot.region.close()
        self._slots = []

    def _slot_for(self, size: int) -> tuple[int, Region | None]:
        """A slot that the neighbour has read, of this size; and its memory, if that is new."""
        for index, slot in enumerate(self._slots):
            if slot.used_by < self._read and slot.region.size >= size:
                slot.used_by = self._sent
                return index, None
        slot = _Slot(Region.create(max(_SMALLEST, size)))
        slot.used_by = self._sent
        self._slots.append(slot)
        return len(self._slots) - 1, slot.region

    def _send(self, head: dict[str, Any], fresh: Region | None) -> None:
        data = json.dumps(head).encode()
        try:
            framed = _LENGTH.pack(len(data)) + data
            if fresh is None:
                self.sock.sendall(framed)
            else:
                sent = socket.send_fds(self.sock, [framed], [fresh.fd])
                self.sock.sendall(framed[sent:])
                fresh.close_descriptor()
        except TimeoutError:
            raise self._late() from None
        except OSError as error:
            raise self._ended(str(error)) from None
        self._sent += 1

    def _receive(self) -> dict[str, Any]:
        try:
            start, descriptors, _, _ = socket.recv_fds(self.sock, _LENGTH.size, 1)
            if not start:
                raise EOFError
            length = _LENGTH.unpack(start + self._exactly(_LENGTH.size - len(start)))[0]
            head: dict[str, Any] = json.loads(self._exactly(length))
        except TimeoutError:
            raise self._late() from None
        except (OSError, EOFError) as error:
            raise self._ended(str(error)) from None
        if descriptors:
            region = Region.attach(descriptors[0], head["room"])
            region.close_descriptor()
            self._rooms[head["slot"]] = region
        return head

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            more = self.sock.recv_into(view[got:])
            if not more:
                raise EOFError
            got += more
        return bytes(data)

    def _late(self) -> DeadlineError:
        return DeadlineError(
            f"{self._neighbour} did not pass anything on within {self._deadline_s:g} s (--deadline). Raise "
            "the deadline if a micro-batch may take this long."
        )

    def _ended(self, why: str) -> LinkError:
        return LinkError(f"{self._neighbour} has ended: {why or 'it was killed'}")
