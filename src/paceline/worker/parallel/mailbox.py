"""Messages with tensors between a worker and the processes that it forked.

A message is JSON on a socket pair; its tensors lie in memory that the sender made and the receiver maps. One
side asks and the other answers, so a tensor that was received stays as it is until the next message is sent.
"""

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm import Region
from paceline.params import dtype_named

__all__ = ["Mailbox", "bytes_for", "places_of", "views_at", "views_of"]

_LENGTH = struct.Struct("<Q")
_ALIGNED = 64
_SMALLEST = 1 << 16


class Mailbox:
    """One side's end."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._out: Region | None = None
        self._in: Region | None = None

    def send(self, body: Any, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message. What was received before is the other side's to change from here on."""
        places, size = places_of(tensors)
        fresh = self._make_room(size)
        if self._out is not None and tensors:
            for view, tensor in zip(views_at(self._out, places), tensors, strict=True):
                view.copy_(tensor.detach())
        head = {"body": body, "tensors": places, "room": fresh.size if fresh is not None else None}
        data = json.dumps(head).encode()
        descriptors = [] if fresh is None else [fresh.fd]
        socket.send_fds(self.sock, [_LENGTH.pack(len(data))], descriptors)
        if fresh is not None:
            fresh.close_descriptor()
        self.sock.sendall(data)

    def receive(self) -> tuple[Any, list[Tensor]]:
        """The next message; its tensors are memory that the other side writes again.

        Raises:
            EOFError: the other side is gone.
            TimeoutError: the socket's time is up.
        """
        length, descriptors, _, _ = socket.recv_fds(self.sock, _LENGTH.size, 1)
        if not length:
            raise EOFError
        data = self._read(_LENGTH.unpack(length + self._read(_LENGTH.size - len(length)))[0])
        head = json.loads(data)
        if descriptors:
            self._in = Region.attach(descriptors[0], head["room"])
            self._in.close_descriptor()
        places = head["tensors"]
        assert self._in is not None or not places
        return head["body"], [] if self._in is None else views_at(self._in, places)

    def close(self) -> None:
        """Close the socket; the other side sees it."""
        self.sock.close()

    def _make_room(self, size: int) -> Region | None:
        """New memory to send from, if what there is does not do."""
        if not size or (self._out is not None and self._out.size >= size):
            return None
        self._out = Region.create(max(_SMALLEST, size + size // 4))
        return self._out

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            more = self.sock.recv_into(view[got:])
            if not more:
                raise EOFError
            got += more
        return bytes(data)


def views_of(region: Region, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Memory for tensors like these, one behind the other."""
    return views_at(region, places_of(tensors)[0])


def bytes_for(tensors: Sequence[Tensor]) -> int:
    """Size of the memory that `views_of` needs."""
    return max(1, places_of(tensors)[1])


def places_of(tensors: Sequence[Tensor]) -> tuple[list[tuple[str, list[int], int]], int]:
    """Of each tensor its dtype, shape and offset; and the size of all."""
    places, end = [], 0
    for tensor in tensors:
        places.append((str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end))
        end += -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED
    return places, end


def views_at(region: Region, places: Sequence[Any]) -> list[Tensor]:
    """The tensors at places that `places_of` returned."""
    found = []
    for name, shape, offset in places:
        dtype = dtype_named(name)
        count = 1
        for n in shape:
            count *= n
        if not count:
            found.append(torch.empty(shape, dtype=dtype))
            continue
        found.append(torch.frombuffer(region.buffer, dtype=dtype, count=count, offset=offset).view(shape))
    return found
