"""Departures: which process of a worker an answer in the order is for.

A server notices by itself that a worker's process is gone, and the next process may attach before the server
has executed what the order has for the one before. Answers up to the LeaveStep are not for the next process,
which would take them for answers to its own requests.
"""

__all__ = ["Departures"]


class Departures:
    """One owner: a server's executor."""

    def __init__(self) -> None:
        self._gone: dict[int, int] = {}
        """Workers with a process that is gone here and still in the order: its incarnation."""
        self._left: dict[int, int] = {}
        """The last incarnation of each worker that has left in the order."""

    def gone(self, worker: int, incarnation: int) -> None:
        """A worker's process is no longer attached to this server."""
        if incarnation > self._left.get(worker, -1):
            self._gone[worker] = incarnation

    def left(self, worker: int, incarnation: int) -> None:
        """The order says that this process, and those before it, are gone."""
        self._left[worker] = max(incarnation, self._left.get(worker, -1))
        if self._gone.get(worker, -1) <= incarnation:
            self._gone.pop(worker, None)

    def answers_present(self, worker: int) -> bool:
        """Whether an answer that comes next in the order is for the process that is attached now."""
        return worker not in self._gone
