"""A role's link to the controller, which may die and be replaced while the role goes on.

The next controller listens on the very same socket, so a role that dials again waits in its queue until it
is there. Meanwhile statistics are dropped; what may be said only once is kept and said then.
"""

import collections
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.comm import frames
from paceline.comm.connection import Connection, Frame
from paceline.comm.frames import Kind
from paceline.comm.meeting import Address, connect
from paceline.comm.messages import SAID_ONCE
from paceline.exceptions import FrameError, LinkError

__all__ = ["LastingLink"]

_MOST_UNSAID = 256
_AGAIN_S = (0.01, 1.0)
"""The first pause before dialling again, and the longest."""
_LAST_WORDS = (Kind.ERROR, Kind.BYE)


class LastingLink(Connection):
    """A connection that dials again when it ends, in a thread of its own: nobody waits for it.

    One thread uses it at a time, as any Connection. A role that reads it with a Hub says so with
    `watch`; otherwise the link notices by itself, when it is used.

    Args:
        patience_s: how long the role goes on without a controller; then its process ends. With 0 the link
            is a plain connection: it ends with the controller.

    Raises:
        LinkError: nobody listens there.
        AuthError: who listens there does not know the secret.
    """

    def __init__(self, address: Address, secret: bytes, *, patience_s: float = 0.0) -> None:
        self._dial = lambda: connect(address, secret, peer="controller")
        self._patience_s = patience_s
        self._hello: dict[str, Any] = {}
        self._words: dict[Kind, dict[str, Any] | None] = {}
        """Last words, which every controller is told: the one before may have died before it read them."""
        self._unsaid: collections.deque[tuple[Kind, dict[str, Any] | None]] = collections.deque(
            maxlen=_MOST_UNSAID
        )
        self._back: Callable[[Connection], None] | None = None
        self._state = threading.RLock()
        self._here = threading.Event()
        self._here.set()
        self._closed = False
        fresh = self._reach() if patience_s else self._dial()
        super().__init__(fresh.sock, fresh._keys)
        self.peer = "controller"

    @property
    def lasting(self) -> bool:
        """Whether the role goes on when the controller dies."""
        return self._patience_s > 0

    def hello(self, body: dict[str, Any]) -> None:
        """Say who this is, now and to every controller that comes."""
        self._hello = body
        super().send(Kind.HELLO, body)

    def watch(self, back: Callable[[Connection], None]) -> None:
        """A Hub reads this link. Call `lost` when it ends; `back` is then called, in the link's thread, with
        a new connection to go on with (`renew`)."""
        self._back = back

    def send(
        self,
        kind: Kind,
        body: dict[str, Any] | None = None,
        payload: Sequence[memoryview] = (),
        descriptors: Sequence[int] = (),
    ) -> None:
        """As Connection's, but if there is no controller now it returns: the next one will be told, or not,
        see the module.

        Raises:
            MessageError: no controller would accept it. It is not kept.
        """
        if not self.lasting:
            super().send(kind, body, payload, descriptors)
            return
        with self._state:
            if kind in _LAST_WORDS:
                frames.check(kind, body or {})  # else every reconnection would try to say it again
                self._words[kind] = body
            if self._here.is_set():
                try:
                    super().send(kind, body, payload, descriptors)
                    return
                except LinkError:
                    if self._back is None:
                        self.lost()
            if kind in SAID_ONCE:
                frames.check(kind, body or {})
                self._unsaid.append((kind, body))

    def receive(self) -> Frame:
        """As Connection's; if the controller dies meanwhile, the first frame of the next one."""
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

    def say_last(self, kind: Kind, body: dict[str, Any] | None = None) -> None:
        """Send last words, and return when a controller has them: this process may end then.

        Raises LinkError if it cannot be reached (and is not to be waited for).
        """
        self._back = None
        self.send(kind, body)
        if not self.lasting:
            return
        until = time.monotonic() + self._patience_s
        with contextlib.suppress(TimeoutError):
            while (left := until - time.monotonic()) > 0:
                self.sock.settimeout(left)
                if self.receive().kind is Kind.HEARD:
                    return

    def lost(self) -> None:
        """The controller is gone: look for the next one."""
        with self._state:
            if self._here.is_set():
                self._here.clear()
                threading.Thread(target=self._come_back, name="to the next controller", daemon=True).start()

    def renew(self, fresh: Connection) -> None:
        """Go on with the next controller, who has heard who this is: tell it what it has to know."""
        with self._state:
            fresh.sock.settimeout(self.sock.gettimeout())
            super().close()
            super().renew(fresh)
            self._here.set()
            kept, self._unsaid = list(self._unsaid), collections.deque(maxlen=_MOST_UNSAID)
            for kind, body in [*kept, *self._words.items()]:
                self.send(kind, body)

    def close(self) -> None:
        """Close the socket. A link that no Hub reads (a Hub closes what has ended, and the role dials again)
        also stops looking for the next controller."""
        with self._state:
            self._closed = self._back is None
            super().close()

    def _come_back(self) -> None:
        try:
            fresh = self._reach()
        except LinkError as error:
            if self._closed:
                return
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(
                    f"no controller came back within {self._patience_s:g} s ({error}): this role ends\n"
                )
                sys.stderr.flush()
            os._exit(1)
        with self._state:
            back = self._back
            if self._closed:
                fresh.close()
            elif back is None:
                self.renew(fresh)
        if back is not None:
            back(fresh)

    def _reach(self) -> Connection:
        """Dial until somebody answers."""
        until = time.monotonic() + self._patience_s
        pause, longest = _AGAIN_S
        while True:
            fresh = None
            try:
                fresh = self._dial()
                if self._hello:
                    fresh.send(Kind.HELLO, self._hello)
                return fresh
            except LinkError:
                if fresh is not None:
                    fresh.close()
                if self._closed or time.monotonic() > until:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, longest)
