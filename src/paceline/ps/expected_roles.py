"""ExpectedRoles: the processes of the run that the controller has started, as a server knows them.

The run's secret says that a peer is of this run. This says which of its processes may take which place: no
peer attaches as a worker that was never started, or in the place of one that was not replaced.
"""

from collections.abc import Mapping

from paceline.comm.frames import Body
from paceline.exceptions import FrameError

__all__ = ["ExpectedRoles"]


class ExpectedRoles:
    """Incarnations by rank. Before the controller has said any, every rank may come: it says them before it
    tells a process where this server is."""

    def __init__(self) -> None:
        self._known: dict[str, Mapping[int, int]] | None = None

    def expect(self, workers: Mapping[int, int], servers: Mapping[int, int]) -> None:
        """These are the run's processes from now on."""
        self._known = {"worker": workers, "server": servers}

    def check(self, name: str, incarnation: int | None = None) -> None:
        """Raise FrameError if there is no such process.

        Args:
            name: `worker:1`.
            incarnation: None: any.
        """
        if self._known is None:
            return
        role, _, rank = name.partition(":")
        expected = self._known[role].get(int(rank))
        if expected is None:
            raise FrameError(f"{name} is no process of this run")
        if incarnation not in (None, expected):
            raise FrameError(f"{name} says that it is incarnation {incarnation}, and {expected} was started")

    def greeted(self, name: str, body: Body) -> None:
        """As `check`, for what a newcomer says in its HELLO."""
        incarnation = body.get("incarnation")
        self.check(name, incarnation if type(incarnation) is int and name.startswith("worker:") else None)
