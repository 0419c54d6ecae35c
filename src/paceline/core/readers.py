"""Readers: how far each worker's script is in the run's epochs, and which workers wait for leases."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

__all__ = ["Readers"]


@dataclass
class Readers:
    """Workers as readers of epochs. One owner."""

    parked: dict[int, int] = field(default_factory=dict)
    """Workers that wait for leases: the epoch that they are in."""
    entered: dict[int, int] = field(default_factory=dict)
    """The last epoch that each worker asked for while it was not over."""
    looking: dict[int, int] = field(default_factory=dict)
    """Workers that have taken leases of an epoch after others ended their script, and made no step since: a
    script may look at a batch when its training is over."""
    told_over: dict[int, int] = field(default_factory=dict)
    """The last epoch that each worker was told is over."""
    finished: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Clock and last epoch of workers whose script ended in order."""
    noted: set[int] = field(default_factory=set)
    """Those of them of whose end the user was told."""
    late: set[int] = field(default_factory=set)
    """Workers that were behind when the mode changed."""
    streamed: int = 0
    """Without a lease book: number of epochs that all workers have read."""

    def join(self, worker: int) -> None:
        """A process attached, perhaps in another one's place."""
        for known in (self.parked, self.finished, self.entered, self.looking, self.told_over):
            known.pop(worker, None)
        self.noted.discard(worker)
        self.late.discard(worker)

    def finish(self, worker: int, clock: int) -> None:
        """A worker's script ended in order."""
        self.finished[worker] = (clock, self.entered.get(worker, -1))

    def tell_over(self, worker: int, epoch: int) -> None:
        """A worker is told that its epoch is over."""
        self.told_over[worker] = epoch
        self.late.discard(worker)

    def behind(self, members: Set[int], epoch: int) -> set[int]:
        """Workers in an epoch that ended without them, of which they have not heard."""
        entered = {worker: self.entered.get(worker, -1) for worker in members}
        return {w for w, e in entered.items() if self.told_over.get(w, -1) < e < epoch}

    def note_early_ends(self, worker: int, clocks: Mapping[int, int], epoch: int | None = None) -> list[str]:
        """Say once that a script ended while another worker goes on with an epoch (or, without a loader, a
        step) that it never began. Within its last epoch it may have left its loop early: the others do the
        rest of that one, and perhaps they end there, too."""
        news = []
        for who, (clock, last) in sorted(self.finished.items()):
            if who in self.noted or (epoch is not None and last >= epoch):
                continue
            self.noted.add(who)
            done = f"{clock} step{'s' * (clock != 1)}" + (f", in epoch {last + 1}," if last >= 0 else "")
            step = f"step {clocks.get(worker, 0) + 1}"
            where = step if epoch is None else f"epoch {epoch + 1}, {step}"
            news.append(
                f"worker:{who} ended its script after {done} while worker:{worker} goes on with {where}. The "
                "other workers train on without it, and all samples are theirs. If all workers are to end "
                "together, call paceline.should_stop(condition) on every worker."
            )
        return news
