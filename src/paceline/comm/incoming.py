"""Incoming: a frame that is on its way, read as far as it has come, without waiting for the rest."""

import array
import mmap
import os
import select
import socket

from paceline.comm import frames
from paceline.comm.frames import Header, Kind
from paceline.comm.tls import SecureSocket, Stream
from paceline.exceptions import FrameError, LinkError

__all__ = ["BUFFERED", "Incoming"]

BUFFERED = frozenset(
    [
        *(Kind.WEIGHTS, Kind.ADOPT, Kind.ADOPTED, Kind.STATE, Kind.LOAD),
        *(Kind.SLICES, Kind.SAVED, Kind.BUFFERS, Kind.STORE_PUT, Kind.FILE),
    ]
)
"""Kinds whose payload is kept until all of it has come. Gradients and parameters are read by a thread of
their link, which knows where they belong."""

_MAX_DESCRIPTORS = 2
_MAPPED_BYTES = 1 << 20
# As plain numbers: the enumerations of the socket module cost a microsecond each time.
_CLOEXEC, _CTRUNC = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)
_DESCRIPTORS_ROOM = socket.CMSG_LEN(_MAX_DESCRIPTORS * 4)


class Incoming:
    """What has come of one frame.

    Memory for a payload is taken as it arrives, not when it is announced.

    Args:
        sock: has a timeout, so its descriptor does not block.
        local: whether descriptors may come along.
        peer: name of the other side, for messages.
    """

    __slots__ = ("_done", "_into", "_local", "_peer", "_sock", "body", "descriptors", "header", "payload")

    def __init__(self, sock: Stream, *, local: bool, peer: str) -> None:
        self._sock = sock
        self._local = local
        self._peer = peer
        self._into = memoryview(bytearray(frames.HEADER_BYTES))
        self._done = 0
        self.header: Header | None = None
        self.body = bytearray()
        self.payload: memoryview | None = None
        self.descriptors: list[int] = []
        """The receiver's to close, when the frame is whole; until then `close` closes them."""

    @property
    def begun(self) -> bool:
        """Whether a part of the frame has come."""
        return self.header is not None or self._done > 0

    def read_head(self) -> bool:
        """Read on in the header and the body. Whether both are here.

        Raises:
            LinkError: the other side is gone.
            FrameError: this is no header.
        """
        if self.header is None:
            if not self._fill():
                return False
            self.header = frames.parse_header(bytes(self._into))
            if self.descriptors and self.header.kind not in frames.WITH_DESCRIPTORS:
                raise FrameError(f"a {self.header.kind.name} with a descriptor")
            self.body = bytearray(self.header.body_bytes)
            self._into, self._done = memoryview(self.body), 0
        return self._fill()

    def read_payload(self) -> bool:
        """Read on in the payload. Whether all of it is here.

        Raises:
            LinkError: the other side is gone.
            FrameError: a payload that has no place on this link, or in this host.
        """
        assert self.header is not None
        if not self.header.payload_bytes:
            return True
        if self.payload is None:
            self.payload = self._into = self._room(self.header.kind, self.header.payload_bytes)
            self._done = 0
        return self._fill()

    def close(self) -> None:
        """Give up on the frame."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def _room(self, kind: Kind, nbytes: int) -> memoryview:
        if kind not in BUFFERED:
            raise FrameError(f"a {kind.name} with a payload, which this link has in shared memory")
        if nbytes > os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE:
            raise FrameError(f"a {kind.name} payload of {nbytes:,} bytes, more than this host's memory")
        return memoryview(bytearray(nbytes) if nbytes < _MAPPED_BYTES else mmap.mmap(-1, nbytes))

    def _fill(self) -> bool:
        while self._done < len(self._into):
            try:
                count = self._receive(self._into[self._done :])
            except BlockingIOError:
                return False
            except OSError as error:
                raise LinkError(f"the link to {self._peer} broke: {error}") from error
            if not count:
                middle = " in the middle of a frame" if self.begun else ""
                raise LinkError(f"{self._peer} closed the link{middle}")
            self._done += count
        return True

    def _receive(self, room: memoryview) -> int:
        """Read what is here, at least a byte. BlockingIOError if there is nothing."""
        sock = self._sock
        if isinstance(sock, SecureSocket):
            return sock.recv_now(room)
        if self._local and self.header is None:
            return self._receive_with_descriptors(sock, room)
        return os.readv(sock.fileno(), [room])

    def _receive_with_descriptors(self, sock: socket.socket, room: memoryview) -> int:
        if self._done and not select.select([sock], [], [], 0)[0]:
            raise BlockingIOError
        data, ancillary, flags, _ = sock.recvmsg(len(room), _DESCRIPTORS_ROOM, _CLOEXEC)
        for level, kind, rights in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
                self.descriptors.extend(fds)
        if flags & _CTRUNC or len(self.descriptors) > _MAX_DESCRIPTORS:
            raise FrameError(f"{self._peer} sent too many descriptors")
        room[: len(data)] = data
        return len(data)
