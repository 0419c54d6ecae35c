"""ControllerLine: what a server says to the controller, whatever its role is."""

import contextlib
import logging
import time

from paceline.comm import Connection
from paceline.comm.hub import refuse
from paceline.comm.lasting import LastingLink
from paceline.comm.messages import ServerListening, StrangerSeen, ToController, UserNote
from paceline.core.json_types import JsonObject
from paceline.core.limited_lines import LimitedLines
from paceline.exceptions import LinkError, PacelineError

__all__ = ["ControllerLine"]

log = logging.getLogger("paceline.server")


class ControllerLine:
    """The link to the controller. The controller may die, and another one take over; the main thread only.

    Args:
        link: to the present controller.
        address: where workers and other servers reach this server, as JSON.
    """

    def __init__(self, link: LastingLink, address: JsonObject) -> None:
        self.link = link
        self._address = address
        self._told: set[str] = set()
        self._refusals = LimitedLines()
        self._failed = False

    def introduce(self) -> None:
        """Say where this server listens."""
        self.link.tell(ServerListening(self._address))

    def tell(self, message: ToController) -> None:
        """Tell the controller, if there is one. LastingLink keeps what the next one must hear."""
        with contextlib.suppress(LinkError):
            self.link.tell(message)

    def tell_user_once(self, text: str) -> None:
        """Show the user something that training does not stop for."""
        if text not in self._told:
            self._told.add(text)
            log.warning("%s", text)
            self.tell(UserNote(text))

    def fail(self, error: PacelineError) -> None:
        """The run cannot go on: tell the controller, once."""
        if not self._failed:
            self._failed = True
            log.error("%s", error)
            refuse(self.link, error)

    def report_stranger(self, reason: str) -> None:
        """A connection was refused: a port scan, or a role of another run."""
        for text in self._refusals.said(reason, time.monotonic()):
            log.warning("refused a connection: %s", text)
            self.tell(StrangerSeen(text))

    def keep_after_end(self) -> bool:
        """The link ended. Returns whether another controller may take over; then it is waited for."""
        if self.link.lasting:
            self.link.lost()
        return self.link.lasting

    def renew(self, fresh: Connection) -> None:
        """Go on with another controller."""
        self.link.renew(fresh)
