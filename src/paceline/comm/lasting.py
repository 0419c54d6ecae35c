"""A role's link to the controller, which may die and be replaced while the role goes on.

The successor listens on the very same socket, so a role that dials again waits in its queue until the
successor is there. Meanwhile reports are dropped; messages that are sent only once are kept for it.
"""

import collections
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from paceline.comm import frames
from paceline.comm.connection import Connection, Frame
from paceline.comm.frames import Body, Kind
from paceline.comm.meeting import Address, connect
from paceline.comm.messages import SAID_ONCE
from paceline.exceptions import FrameError, LinkError

__all__ = ["LastingLink"]

_MOST_PENDING = 256
"""Maximum number of messages kept for the successor."""
_AGAIN_S = (0.01, 1.0)
"""The first pause before dialling again, and the longest."""
_LAST_WORDS = (Kind.ERROR, Kind.BYE)
_Message = tuple[Kind, Body | None]


class _Dialler:
    """Reaches the controller, and says who calls."""

    def __init__(self, address: Address, secret: bytes, patience_s: float) -> None:
        self._address = address
        self._secret = secret
        self.patience_s = patience_s
        self.hello: Body = {}
        self.given_up = False
        """The link is closed: no controller is looked for any more."""

    def dial(self) -> Connection:
        """Connect once. Raises LinkError."""
        return connect(self._address, self._secret, peer="controller")

    def reach(self) -> Connection:
        """Dial until a controller answers. Raises LinkError if none does in time."""
        until = time.monotonic() + self.patience_s
        pause, longest = _AGAIN_S
        while True:
            fresh = None
            try:
                fresh = self.dial()
                if self.hello:
                    fresh.send(Kind.HELLO, self.hello)
                return fresh
            except LinkError:
                if fresh is not None:
                    fresh.close()
                if self.given_up or time.monotonic() > until:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, longest)


class _Pending:
    """Messages for the successor."""

    def __init__(self) -> None:
        self._last_words: dict[Kind, Body | None] = {}
        """Sent to every controller: the one before may have died before it read them."""
        self._messages: collections.deque[_Message] = collections.deque(maxlen=_MOST_PENDING)

    def sending(self, kind: Kind, body: Body | None) -> None:
        """Keep last words, before they are sent. MessageError if no controller would accept them."""
        if kind in _LAST_WORDS:
            frames.check(kind, body or {})  # else every reconnection would try to send it again
            self._last_words[kind] = body

    def missed(self, kind: Kind, body: Body | None) -> None:
        """This could not be sent: keep it if nothing replaces it. MessageError as above."""
        if kind in SAID_ONCE:
            frames.check(kind, body or {})
            self._messages.append((kind, body))

    def take(self) -> Iterator[_Message]:
        """All that the successor is to be told."""
        messages = list(self._messages)
        self._messages.clear()
        yield from [*messages, *self._last_words.items()]


class LastingLink(Connection):
    """A connection that dials again when it ends, in a thread of its own: no caller waits for it.

    One thread uses it at a time, as any Connection. A role that reads it with a Hub says so with
    `watch`; otherwise the link notices by itself, when it is used.

    Args:
        patience_s: how long the role goes on without a controller; then its process ends. With 0 the link
            is a plain connection: it ends with the controller.

    Raises:
        LinkError: no process listens there.
        AuthError: the process that listens there does not know the secret.
    """

    def __init__(self, address: Address, secret: bytes, *, patience_s: float = 0.0) -> None:
        self._dialler = _Dialler(address, secret, patience_s)
        self._pending = _Pending()
        self._back: Callable[[Connection], None] | None = None
        self._state = threading.RLock()
        self._here = threading.Event()
        self._here.set()
        fresh = self._dialler.reach() if patience_s else self._dialler.dial()
        super().__init__(fresh.sock, fresh.socket_state.keys)
        self.peer = "controller"

    @property
    def lasting(self) -> bool:
        """Whether the role goes on when the controller dies."""
        return self._dialler.patience_s > 0

    def hello(self, body: Body) -> None:
        """Say who this is, now and to every successor."""
        self._dialler.hello = body
        super().send(Kind.HELLO, body)

    def watch(self, back: Callable[[Connection], None]) -> None:
        """A Hub reads this link. Call `lost` when it ends; `back` is then called, in the link's thread, with
        a new connection to go on with (`renew`)."""
        self._back = back

    def send(
        self,
        kind: Kind,
        body: Body | None = None,
        payload: Sequence[memoryview] = (),
        descriptors: Sequence[int] = (),
    ) -> None:
        """As Connection's, but without a controller it returns: the successor is told, or the message is
        dropped, see the module.

        Raises:
            MessageError: no controller would accept it. It is not kept.
        """
        if not self.lasting:
            super().send(kind, body, payload, descriptors)
            return
        with self._state:
            self._pending.sending(kind, body)
            if self._here.is_set():
                try:
                    super().send(kind, body, payload, descriptors)
                    return
                except LinkError:
                    if self._back is None:
                        self.lost()
            self._pending.missed(kind, body)

    def receive(self) -> Frame:
        """As Connection's; if the controller dies meanwhile, the first frame of its successor."""
        while True:
            if self._back is None:
                self._here.wait()
            try:
                return super().receive()
            except FrameError:
                raise
            except LinkError:
                if not self.lasting or self._back is not None:
                    raise
                self.lost()

    def say_last(self, kind: Kind, body: Body | None = None) -> None:
        """Send last words, and return when a controller has journaled them: this process may end then.

        Raises LinkError if no controller can be reached, and the link is not lasting.
        """
        self._back = None
        self.send(kind, body)
        if not self.lasting:
            return
        until = time.monotonic() + self._dialler.patience_s
        with contextlib.suppress(TimeoutError):
            while (left := until - time.monotonic()) > 0:
                self.sock.settimeout(left)
                if self.receive().kind is Kind.HEARD:
                    return

    def lost(self) -> None:
        """The controller is gone: reach its successor, in a thread."""
        with self._state:
            if self._here.is_set():
                self._here.clear()
                threading.Thread(target=self._come_back, name="to the next controller", daemon=True).start()

    def renew(self, fresh: Connection) -> None:
        """Go on with the successor, to which HELLO was sent: send what is pending."""
        with self._state:
            fresh.sock.settimeout(self.sock.gettimeout())
            super().close()
            super().renew(fresh)
            self._here.set()
            for kind, body in self._pending.take():
                self.send(kind, body)

    def close(self, *, linger: bool = True) -> None:
        """Close the socket. A link that no Hub reads (a Hub closes what has ended, and the role dials again)
        also stops looking for a successor."""
        with self._state:
            self._dialler.given_up = self._back is None
            super().close(linger=linger)

    def _come_back(self) -> None:
        try:
            fresh = self._dialler.reach()
        except LinkError as error:
            if self._dialler.given_up:
                return
            with contextlib.suppress(OSError, ValueError):
                patience_s = self._dialler.patience_s
                sys.stderr.write(
                    f"no controller came back within {patience_s:g} s ({error}): this role ends\n"
                )
                sys.stderr.flush()
            os._exit(1)
        with self._state:
            back = self._back
            if self._dialler.given_up:
                fresh.close()
            elif back is None:
                self.renew(fresh)
        if back is not None:
            back(fresh)
