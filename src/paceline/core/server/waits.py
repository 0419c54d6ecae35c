"""Waits: which requests of workers are unanswered, since when, and by whose message they get their answer."""

from paceline.core.server.lead_actions import Notes

__all__ = ["NO_WORKER", "Waits"]

NO_WORKER = -1


class Waits:
    """The leader's account of its workers' requests. One owner. Times are seconds of one clock."""

    def __init__(self) -> None:
        self.owed: set[int] = set()
        """Workers with a request that the order has not answered."""
        self.taking: set[int] = set()
        """Workers that wait for leases from this leader: one that asked the leader before will ask again."""
        self.voting: set[int] = set()
        """Workers that wait for this leader's answer whether the run ends early."""
        self.calling: dict[int, str] = {}
        """Workers that wait for this leader's answer to a collective: its place in the script."""
        self.since: dict[int, float] = {}
        """When each worker began to wait for its answer."""
        self.heard_at: dict[int, float] = {}
        """When each worker made its last request."""
        self.linkless: dict[int, tuple[int, float]] = {}
        """Workers whose links are gone for good: their incarnations, and since when."""
        self.acting = NO_WORKER
        """The worker whose message is being dealt with."""

    def heard(self, worker: int, now: float) -> None:
        """A worker made a request."""
        self.heard_at[worker] = now

    def begin(self, worker: int, now: float) -> None:
        """A worker waits for its answer."""
        self.since[worker] = now

    def begin_all_anew(self, now: float) -> None:
        """All workers that wait begin to wait now: for processes that are started in place of others."""
        self.since = dict.fromkeys(self.since, now)

    def answered(self, worker: int, now: float, notes: Notes) -> None:
        """A worker is answered. If another worker's message made that possible, the notes name it."""
        since = self.since.pop(worker, None)
        if since is not None and self.acting not in (NO_WORKER, worker):
            notes["on"], notes["held"] = self.acting, round(now - since, 6)

    def link_lost(self, worker: int, incarnation: int, now: float) -> None:
        """A worker's link is gone for good. Mostly its process has ended, and the controller will say so."""
        self.linkless[worker] = (incarnation, now)

    def left(self, worker: int) -> None:
        """A worker is gone."""
        self.acting = NO_WORKER
        self.since.pop(worker, None)
        self.owed.discard(worker)
        self.taking.discard(worker)
        self.voting.discard(worker)
        self.calling.pop(worker, None)
