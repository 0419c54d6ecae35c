"""Ends a run in order when its time limit has passed."""

import contextlib

from paceline.comm import Connection
from paceline.comm.messages import EndEarly
from paceline.exceptions import LinkError

__all__ = ["TimeLimit"]


class TimeLimit:
    """Asks whichever server leads to end the run early, once the limit has passed.

    A new lead, after a failover or when the run goes back to a checkpoint, is asked again. Asking twice does
    no harm.

    Args:
        limit_s: seconds after the start of the run; None: no limit.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._asked: Connection | None = None

    def check(self, elapsed_s: float, lead: Connection | None) -> None:
        """Ask the lead if it is time. Called in every turn of the loop.

        Args:
            elapsed_s: since the start of the run.
            lead: the link to the server that leads; None while there is none.
        """
        if self._limit_s is None or elapsed_s < self._limit_s or lead is None or lead is self._asked:
            return
        reason = f"its time was up ({self._limit_s:g} s, --max-time)"
        with contextlib.suppress(LinkError):
            lead.tell(EndEarly(reason))
            self._asked = lead
