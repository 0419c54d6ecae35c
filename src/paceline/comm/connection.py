"""Frames over one authenticated socket; `meeting.py` gets such sockets."""

import array
import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.comm import frames, handshake
from paceline.comm.aside import Aside
from paceline.comm.faults import Tamper, tamper_with
from paceline.comm.frames import Body, Header, Kind
from paceline.comm.incoming import Incoming
from paceline.comm.message_codec import body_of
from paceline.comm.tls import SecureSocket, Stream
from paceline.exceptions import AuthError, FrameError, LinkError

__all__ = ["Connection", "Frame", "spin_for"]

SPIN_S = 0.5e-3
"""How long roles look for an answer before they sleep, see `spin_for`."""

_MAX_DESCRIPTORS = 2
# As plain numbers: the enumerations of the socket module cost a microsecond each time.
_WAITALL, _CLOEXEC, _CTRUNC = int(socket.MSG_WAITALL), int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)
_DESCRIPTORS_ROOM = socket.CMSG_LEN(_MAX_DESCRIPTORS * 4)


def spin_for(nbytes: int, threads: int, *, on_device: bool = False) -> float:
    """Seconds to look for an answer before sleeping for it.

    A small model's answer comes sooner than a sleeping process wakes up (a virtual machine's core takes
    100 µs and more). A role does not spin when the exchange is long, or when a thread would
    lack the core for it.

    Args:
        threads: of all roles of this host together.
        on_device: parameters and gradients stay on a device, so that the answer is short whatever they are.
    """
    small = on_device or nbytes <= 1 << 20
    return SPIN_S if small and threads <= len(os.sched_getaffinity(0)) else 0.0


_Due = tuple[Kind, Body, Sequence[memoryview], Sequence[int]]
"""What `send` is called with."""


class _Kept(NamedTuple):
    """A frame that the other side may not have got."""

    number: int
    kind: Kind
    body: Body
    payload: Sequence[memoryview]
    descriptors: Sequence[int]


class SocketState(NamedTuple):
    """A socket with its keys and the numbers of its frames: all that a link needs to go on over it."""

    sock: Stream
    keys: handshake.Keys
    sent: int
    received: int
    unread: int
    """Bytes of the last frame's payload that are still in the socket."""


@dataclass(slots=True)
class Frame:
    """A received frame.

    Its payload, if any, is still in the socket: read it with `read_into` or `read_blob`, unless
    `blob` holds it already. Its descriptors are the receiver's to close.
    """

    kind: Kind
    body: Body
    payload_bytes: int
    descriptors: list[int]
    blob: bytes | None = None


class Connection:
    """Frames over one authenticated socket. One thread receives at a time. Several may send: a server's main
    thread grants leases while the thread of that link answers a probe. Frames leave whole, one by one.

    Where both sides `keep` what they send, a link that breaks can go on over another socket (`go_on`): both
    say how many frames have come, and what is missing is sent again. So each frame is received exactly once,
    in order, however often the link breaks. Request and reply take turns there, so the side that receives
    something knows that all it had sent has arrived.
    """

    def __init__(self, sock: Stream, keys: handshake.Keys) -> None:
        self.sock: Stream = sock
        self.peer = "unknown"
        """Role name of the other side, known after its HELLO."""
        self.local = sock.family == getattr(socket, "AF_UNIX", None)
        """Whether both ends are on one host and can share memory."""
        self.same_host = self.local or _is_loopback(sock)
        self.payload_sent = 0
        self.payload_received = 0
        """Bytes of payloads so far; frames themselves and shared memory do not count."""
        self._tamper: Tamper | None = None
        self._aside: Aside | None = None
        self._kept: list[_Kept] | None = None
        # Frames of this link that went over sockets before this one. Probes are none: they may be lost.
        self._sent_before = self._received_before = 0
        self._keys = keys
        self.token = frames.tag_of(b"resume", *sorted([keys.send, keys.receive])).hex()
        """Known to the two ends of this link alone; it stays when the link goes on over another socket."""
        self._sent = 0
        self._received = 0
        self._unread = 0
        self._incoming: Incoming | None = None
        """A frame that has not come whole, see `receive_now`."""
        self._sending = threading.RLock()
        """Held from the moment a frame gets its number until the kernel has all of it."""
        self._behind_stream: list[_Due] | None = None
        """Frames that other threads sent while one is streamed: that may wait for those very threads. None:
        none is streamed."""
        self._polled: tuple[Stream, select.poll] | None = None
        """What waits for the socket to be readable."""

    def fileno(self) -> int:
        """For selectors; see `waiting`."""
        return self.sock.fileno()

    # --- links that outlive their socket ----------------------------------------------------------

    def keep(self) -> None:
        """From now on keep what is sent until the other side answers."""
        if self._kept is None:
            self._kept = []

    @property
    def keeps(self) -> bool:
        """Whether the link can go on over another socket."""
        return self._kept is not None

    @property
    def num_kept(self) -> int:
        """Number of frames that are kept until the other side answers."""
        return len(self._kept or ())

    @property
    def received(self) -> int:
        """Frames of this link that have come, whole."""
        return self._received_before + self._received - bool(self._unread)

    def go_on(self, other: "Connection", theirs: int) -> None:
        """Go on over another connection's socket; `theirs`: so many of our frames have come over there.

        Raises:
            LinkError: it breaks again, or what is missing was not kept.
        """
        with self._sending:
            missing = [each for each in self._kept or () if each.number >= theirs]
            if self._sent_before + self._sent - theirs != len(missing):
                raise LinkError(f"{self.peer} lacks frames that are gone")
            sent, received, timeout = self._sent_before + self._sent, self.received, self.sock.gettimeout()
            self.sock.close()
            self._take_socket(other.socket_state._replace(unread=0))
            self.sock.settimeout(timeout)
            self._sent_before, self._received_before = theirs - self._sent, received - self._received
            self._kept = []
            if self._tamper is not None:
                self._tamper.delayed = b""
            try:
                for each in missing:
                    self.send(each.kind, each.body, each.payload, each.descriptors)
            except LinkError:
                self._kept, self._sent_before = missing, sent - self._sent
                raise

    def _keep(
        self, kind: Kind, body: Body, payload: Sequence[memoryview], descriptors: Sequence[int]
    ) -> None:
        if self._kept is not None:
            number = self._sent_before + self._sent
            self._kept.append(_Kept(number, kind, body, payload, descriptors))

    @staticmethod
    def _forget_answered(kept: list[_Kept]) -> None:
        """A peer that answers has all earlier frames, except for final pulls: a server answers a pull when
        the lead says so, and that may come sooner than the pull, which may be lost on its way."""
        last = max((at for at, each in enumerate(kept) if each.kind is not Kind.PULL), default=-1)
        del kept[: last + 1]

    # --- frames -----------------------------------------------------------------------------------

    def wait(self, seconds: float) -> bool:
        """Whether something has come within this time, if only its end."""
        if self.sock.fileno() < 0:
            return True
        return self.waiting or bool(self._poll(seconds * 1000))

    @property
    def waiting(self) -> bool:
        """Whether something is here although the socket may not look readable: TLS reads ahead."""
        return isinstance(self.sock, SecureSocket) and self.sock.waiting

    def check_role(self, role: str) -> None:
        """AuthError if the other side's certificate is not one of this role; without TLS it has none."""
        if isinstance(self.sock, SecureSocket) and self.sock.named.role != role:
            raise AuthError(
                f"the other side says that it is a {role}, and its certificate is a {self.sock.named.role}'s"
            )

    def renew(self, fresh: "Connection") -> None:
        """Go on over another connection's socket, from its first frame that is not sent or read yet."""
        self.local = fresh.local
        self._take_socket(fresh.socket_state)

    def _take_socket(self, state: SocketState) -> None:
        """Use another socket from here on. What was on its way over the one before is lost."""
        self.sock, self._keys, self._sent, self._received, self._unread = state
        self._drop_incoming()
        if self._aside is not None:
            self._aside.give_up()
            self._aside = Aside(self.sock, self._aside.limit)

    @property
    def socket_state(self) -> SocketState:
        """For another Connection that goes on over this one's socket."""
        return SocketState(self.sock, self._keys, self._sent, self._received, self._unread)

    def damage_next(self, kind: str) -> None:
        """Damage the next frame that is sent, for tests: see `faults.py`."""
        self._tamper = tamper_with(kind, self._tamper)

    def tell(self, said: object, payload: Sequence[memoryview] = (), descriptors: Sequence[int] = ()) -> None:
        """Send a message as a frame of its kind (see `message_codec.py`). As `send`."""
        kind, body = body_of(said)
        self.send(kind, body, payload, descriptors)

    def send(
        self,
        kind: Kind,
        body: Body | None = None,
        payload: Sequence[memoryview] = (),
        descriptors: Sequence[int] = (),
    ) -> None:
        """Send one frame, blocking until the kernel has all of it. From any thread.

        While another thread streams a frame, this one is left to that thread, which sends it afterwards.

        Raises:
            LinkError: the other side is gone.
            MessageError: the other side would not accept it.
        """
        with self._sending:
            if self._behind_stream is not None:
                frames.check(kind, body or {})
                self._behind_stream.append((kind, body or {}, payload, descriptors))
            else:
                self._send(kind, body or {}, payload, descriptors)

    def _send(
        self, kind: Kind, body: Body, payload: Sequence[memoryview], descriptors: Sequence[int]
    ) -> None:
        size = sum(view.nbytes for view in payload)
        head = frames.encode(kind, body, sequence=self._sent, payload_bytes=size, key=self._keys.send)
        if kind is Kind.PROBE:
            self._sent_before -= 1
        elif self._kept is not None:
            self._keep(kind, body, payload, descriptors)
        self._sent += 1
        if self._tamper is not None:
            left = self._tamper(self.sock, head, payload)
            if left is None:
                return
            head = left
        try:
            if self._aside is not None:
                self._aside.write([memoryview(head), *payload], descriptors)
            else:
                self._write(head, payload, descriptors)
            self.payload_sent += size
        except TimeoutError:
            raise LinkError(f"{self.peer} does not read what is sent to it") from None
        except OSError as error:
            raise LinkError(f"the link to {self.peer} broke: {error}") from error

    def _write(self, head: bytes, payload: Sequence[memoryview], descriptors: Sequence[int]) -> None:
        if descriptors:
            assert isinstance(self.sock, socket.socket), "descriptors go by unix sockets only"
            rights = array.array("i", descriptors)
            sent = self.sock.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            self.sock.sendall(memoryview(head)[sent:])
        else:
            self.sock.sendall(head)
        for view in payload:
            self.sock.sendall(view)

    def send_streamed(
        self,
        kind: Kind,
        body: Body,
        payload: Iterator[memoryview],
        whole: Sequence[memoryview],
    ) -> None:
        """Send a frame whose payload, in the end `whole`, comes in pieces, as they get ready. Blocking, also
        with `send_aside`: what other threads send meanwhile goes behind it.

        Raises:
            LinkError: the other side is gone, or the pieces were not the whole: the link is
                then of no more use.
        """
        if self._tamper is not None and self._tamper.active:
            for _ in payload:
                pass
            self.send(kind, body, whole)
            return
        size = sum(view.nbytes for view in whole)
        with self._sending:
            head = frames.encode(kind, body, sequence=self._sent, payload_bytes=size, key=self._keys.send)
            self._keep(kind, body, whole, ())
            self._sent += 1
            self._behind_stream = []
        try:
            if self._aside is not None:
                self._aside.drain()
            self.sock.sendall(head)
            for view in payload:
                self.sock.sendall(view)
                self.payload_sent += view.nbytes
                size -= view.nbytes
        except OSError as error:
            raise LinkError(f"the link to {self.peer} broke: {error}") from error
        finally:
            if size:  # what follows must not be taken for the rest of this payload
                with contextlib.suppress(OSError):
                    self.sock.shutdown(socket.SHUT_RDWR)
            self._end_stream()

        if size:
            raise LinkError(f"a {kind.name} to {self.peer} ended {size:,} bytes short")

    def _end_stream(self) -> None:
        """Send what other threads wanted to send meanwhile. If the link is broken, `go_on` sends it."""
        with self._sending:
            due, self._behind_stream = self._behind_stream, None
            for each in due or ():
                with contextlib.suppress(LinkError):  # the next frame to receive shows it
                    self._send(*each)

    def spin(self, seconds: float) -> None:
        """Look for a frame without sleeping, at most this long: for answers that come sooner than a
        sleeping process wakes up."""
        if self.waiting:
            return
        look, now = self._poll, time.perf_counter
        end = now() + seconds
        while not look(0) and now() < end:
            pass

    @property
    def _poll(self) -> Callable[[float], list[tuple[int, int]]]:
        """Waits, at most so many milliseconds, until there is something to read."""
        if self._polled is None or self._polled[0] is not self.sock:
            self._polled = self.sock, select.poll()
            self._polled[1].register(self.sock, select.POLLIN)
        return self._polled[1].poll

    def receive(self) -> Frame:
        """The next frame, blocking.

        Raises:
            LinkError: the other side is gone.
            FrameError: what arrived is not the protocol, or the last frame had a payload that
                nobody expected.
            TimeoutError: nothing came within the socket's timeout.
        """
        if self._incoming is not None:  # a Hub has begun to read it
            return self._finish_incoming()
        self._refuse_unread()
        descriptors: list[int] = []
        try:
            header = frames.parse_header(self._receive_head(descriptors))
            if descriptors and header.kind not in frames.WITH_DESCRIPTORS:
                raise FrameError(f"a {header.kind.name} with a descriptor")
            body = bytearray(header.body_bytes)
            self._fill(memoryview(body))
            return self._frame_of(header, body, descriptors)
        except BaseException:
            for fd in descriptors:
                os.close(fd)
            raise

    def receive_now(self) -> Frame | None:
        """As `receive`, without waiting: None if the frame is not whole yet. Its payload is then here, too.
        The socket has a timeout, which does not count here.

        Raises:
            LinkError: the other side is gone.
            FrameError: as `receive`; or a payload that has no place on a link that a Hub reads.
        """
        incoming = self._incoming
        if incoming is None:
            self._refuse_unread()
            incoming = self._incoming = Incoming(self.sock, local=self.local, peer=self.peer)
        try:
            if incoming.payload is None:
                if not incoming.read_head():
                    return None
                assert incoming.header is not None
                if incoming.header.payload_bytes:
                    # Verified first: only a peer with the keys makes us take memory for a payload.
                    frames.verify(
                        incoming.header, incoming.body, sequence=self._received, key=self._keys.receive
                    )
            if not incoming.read_payload():
                return None
            assert incoming.header is not None
            frame = self._frame_of(incoming.header, incoming.body, incoming.descriptors)
        except BaseException:
            self._drop_incoming()
            raise
        if incoming.payload is None:
            self._incoming = None
        return frame

    @property
    def begun(self) -> bool:
        """Whether a part of a frame is here, whose rest `receive_now` waits for."""
        return self._incoming is not None and not self._unread and self._incoming.begun

    @property
    def unread(self) -> int:
        """Bytes of the last frame's payload that are still to be read."""
        return self._unread

    def _refuse_unread(self) -> None:
        if self._unread:
            raise FrameError(f"a payload of {self._unread:,} bytes from {self.peer} nobody expected")

    def _frame_of(self, header: Header, body: bytearray, descriptors: list[int]) -> Frame:
        """A frame whose header and body are here, and verified by this."""
        frames.verify(header, body, sequence=self._received, key=self._keys.receive)
        self._received += 1
        self._unread = header.payload_bytes
        if header.kind is Kind.PROBE:
            self._received_before -= 1
        elif self._kept:
            self._forget_answered(self._kept)
        return Frame(header.kind, frames.decode_body(body), header.payload_bytes, descriptors)

    def _finish_incoming(self) -> Frame:
        """Wait for the rest of a frame that a Hub has begun to read."""
        self._refuse_unread()
        timeout = self.sock.gettimeout()
        while (frame := self.receive_now()) is None:
            if not self.wait(3600 if timeout is None else timeout):
                if self.begun:
                    raise LinkError(f"{self.peer} stopped in the middle of a frame")
                raise TimeoutError
        return frame

    def _drop_incoming(self) -> None:
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None

    def read_into(self, views: Sequence[memoryview]) -> None:
        """Read the payload of the last frame into `views`; their sizes must add up to it."""
        for _ in self.read_each(views):
            pass

    def read_each(self, views: Sequence[memoryview]) -> Iterator[int]:
        """As `read_into`, giving the position of each view when it is full. To be used to the end."""
        room = sum(view.nbytes for view in views)
        if room != self._unread:
            raise FrameError(f"a payload of {self._unread:,} bytes from {self.peer}, expected {room:,}")
        here = None if self._incoming is None else self._incoming.payload
        for position, view in enumerate(views):
            if here is None:
                self._fill(view)
            else:
                view.cast("B")[:], here = here[: view.nbytes], here[view.nbytes :]
            yield position
        self.payload_received += room
        self._unread = 0
        self._incoming = None

    def read_blob(self, frame: Frame, limit: int) -> bytes:
        """The payload of the last frame as bytes, if it is within the limit."""
        if frame.blob is None:
            if frame.payload_bytes > limit:
                raise FrameError(
                    f"a {frame.kind.name} payload of {frame.payload_bytes:,} bytes from "
                    f"{self.peer} is over the limit of {limit:,}"
                )
            room = bytearray(frame.payload_bytes)
            self.read_into([memoryview(room)])
            frame.blob = bytes(room)
        return frame.blob

    def send_aside(self, limit: int | None = None) -> None:
        """From now on `send` does not wait for the other side to read: see `aside.py`. Payloads must not
        change after they were sent.

        Args:
            limit: maximum number of bytes that may wait, beside one frame of any size; None: any number.
        """
        if self._aside is None:
            self._aside = Aside(self.sock, limit)
        else:
            self._aside.limit = limit

    def close(self, *, linger: bool = True) -> None:
        """Close the socket. Safe to call twice.

        Args:
            linger: wait a moment for the other side to read what was sent aside.
        """
        if self._aside is not None:
            if linger:
                self._aside.finish()
            else:
                self._aside.give_up()
        self._drop_incoming()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def _receive_head(self, descriptors: list[int]) -> bytes:
        """A header; the descriptors that come with it are added to the list, also on an error."""
        want = frames.HEADER_BYTES
        if not self.local:
            head = bytearray(want)
            self._fill(memoryview(head), at_boundary=True)
            return bytes(head)
        assert isinstance(self.sock, socket.socket)
        try:
            data, ancillary, flags, _ = self.sock.recvmsg(want, _DESCRIPTORS_ROOM, _CLOEXEC)
        except TimeoutError:
            raise
        except OSError as error:
            raise LinkError(f"the link to {self.peer} broke: {error}") from error
        for level, kind, rights in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
                descriptors.extend(fds)
        if flags & _CTRUNC:
            raise FrameError(f"{self.peer} sent too many descriptors")
        if not data:
            raise LinkError(f"{self.peer} closed the link")
        if len(data) < want:
            rest = bytearray(want - len(data))
            self._fill(memoryview(rest))
            data += bytes(rest)
        return data

    def _fill(self, view: memoryview, *, at_boundary: bool = False) -> None:
        view = view.cast("B")
        done = 0
        while done < len(view):
            try:
                count = self.sock.recv_into(view[done:], 0, _WAITALL)
            except TimeoutError:
                if at_boundary and not done:
                    raise
                raise LinkError(f"{self.peer} stopped in the middle of a frame") from None
            except OSError as error:
                raise LinkError(f"the link to {self.peer} broke: {error}") from error
            if not count:
                middle = "" if at_boundary and not done else " in the middle of a frame"
                raise LinkError(f"{self.peer} closed the link{middle}")
            done += count


def _is_loopback(sock: Stream) -> bool:
    try:
        peer = sock.getpeername()
    except OSError:
        return False
    return isinstance(peer, tuple) and str(peer[0]).startswith(("127.", "::1"))
