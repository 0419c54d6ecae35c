"""The leases of a group of workers: rows, which every member reads its part of.

Members come for rows at different times, because their loaders read ahead. The group's root alone stands in
the lease book: whoever comes first draws the next rows in its name, and the others are given the same ones,
in the same order.
"""

from collections.abc import Iterable, Sequence

from paceline.core.leases import Lease, LeaseBook

__all__ = ["Groups", "Rows"]


class Rows:
    """What one group has drawn of its epoch, and how far each member has come. Pure, one owner."""

    def __init__(self, members: Sequence[int]) -> None:
        self.members = tuple(members)
        self._begin(-1)

    @property
    def root(self) -> int:
        """The member that speaks for the group: its lowest rank."""
        return min(self.members)

    @property
    def width(self) -> int:
        """How many members it has."""
        return len(self.members)

    def take(self, book: LeaseBook, worker: int, epoch: int, limit: int) -> tuple[Lease, ...]:
        """The next rows for a member; see `LeaseBook.take`. Only the root ends an epoch for its group."""
        if epoch > book.epoch:
            if worker == self.root:
                self.give_back(book, ())
                book.take(worker, epoch, limit)
                self._begin(epoch)
            return ()
        if epoch < book.epoch or epoch < self._epoch:
            return ()
        if epoch > self._epoch:
            self._begin(epoch)
        if self._at[worker] == len(self._drawn):
            self._drawn += book.take(self.root, epoch, limit)
        at = self._at[worker]
        rows = tuple(self._drawn[at : at + limit])
        self._at[worker] += len(rows)
        self._forget_read()
        return rows

    def give_back(self, book: LeaseBook, ids: Iterable[int]) -> None:
        """The root will not use these, nor what others drew meanwhile: the group stops here."""
        beyond = [lease.id for lease in self._drawn[self._at[self.root] :]]
        book.give_back(self.root, [*ids, *beyond])
        for worker in self.members:
            self._at[worker] = len(self._drawn)

    def _forget_read(self) -> None:
        """Rows that every member has need not be kept."""
        read = min(self._at.values())
        del self._drawn[:read]
        for worker in self.members:
            self._at[worker] -= read

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._drawn: list[Lease] = []
        self._at = dict.fromkeys(self.members, 0)


class Groups:
    """All groups of a run. A worker that is in none stands for itself.

    Args:
        groups: ranks of the members of each.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._rows = {worker: rows for rows in map(Rows, groups) for worker in rows.members}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def root_of(self, worker: int) -> int:
        """The worker that stands for this one in the mode and in the leases."""
        return self._rows[worker].root if worker in self._rows else worker

    def speaks(self, worker: int) -> bool:
        """Whether a worker stands for itself, or for its group."""
        return worker not in self._rows or self._rows[worker].root == worker

    def width(self, worker: int) -> int:
        """How many workers this one stands for."""
        return self._rows[worker].width if worker in self._rows else 1

    def take(self, book: LeaseBook, worker: int, epoch: int, limit: int) -> tuple[Lease, ...]:
        """The next leases for a worker; see `LeaseBook.take`."""
        if worker in self._rows:
            return self._rows[worker].take(book, worker, epoch, limit)
        return book.take(worker, epoch, limit)

    def give_back(self, book: LeaseBook, worker: int, leases: Sequence[int]) -> None:
        """A worker will not use these leases."""
        if worker in self._rows:
            self._rows[worker].give_back(book, leases)
        else:
            book.give_back(worker, leases)
