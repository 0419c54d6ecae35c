"""Leases: who computes on which samples of an epoch.

An epoch is a seeded permutation of the data set; a lease is a range of positions in it that one
worker has to itself. It is finished when the update computed from it is applied, in the same
breath, and goes back to the pool when its worker dies. So every sample is applied exactly once per
epoch, whoever comes or goes, and a slow worker simply takes fewer.

    pool ──take──► outstanding ──finish──► applied, or refused
      ▲                 │ ├──skip────────► skipped: read, but not trained on
      ▲                 │
      └─give_back, left─┘          what is still in the pool when an epoch turns: unused

The last leases of an epoch may be out twice, as twins, so that it does not end with the slowest worker
(Dean et al., 2012). The first one that is finished counts, and the other is withdrawn. A book gives copies to
whoever has nothing else to do, or only of what a much slower worker holds.
"""

from collections import Counter, deque
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from paceline.exceptions import UsageError

__all__ = ["KEPT_EPOCHS", "BookState", "Copies", "Lease", "LeaseBook"]

KEPT_EPOCHS = 100
"""Number of epochs, the current one included, of which a book keeps an account of its own."""

Ranges = tuple[tuple[int, int], ...]
Copies = Literal["none", "slow", "any"]
_CLEARLY = 16
"""So many leases more than twice as many make a worker clearly faster than another, and not by chance."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Samples granted to one worker for one epoch: at most one batch."""

    id: int
    epoch: int
    ranges: Ranges
    """Half-open ranges of positions in the epoch's permutation, in the order to read them."""

    @property
    def samples(self) -> int:
        """How many samples it covers."""
        return _count(self.ranges)


class BookState(NamedTuple):
    """All that a LeaseBook knows, for a follower that begins here. (A checkpoint has less: `snapshot`.)"""

    samples: int
    batch_size: int
    drop_last: bool
    by_round: bool
    copies: Copies
    next_id: int
    taken: dict[int, dict[int, Lease]]
    widths: dict[int, int]
    parts: dict[int, tuple[float, int]]
    rests: dict[int, float]
    carried: set[int]
    twins: dict[int, tuple[int, int]]
    superseded: set[int]
    accounts: list[dict[str, int]]
    earlier: dict[str, int]
    settled: int
    pool: Ranges
    shares: dict[int, list[Ranges]]
    ahead: set[int]
    finished: dict[int, int]


class LeaseBook:
    """The samples of one epoch after another: free, dealt, taken, and what became of them.

    It deals the lowest free positions first, so what a dead worker returns is done before the rest.
    A *first-come* book deals to whoever asks. A *by-round* book deals a round at a time: the next
    positions, one batch for each member in rank order, so together they see exactly what one
    process with a batch of all of them would see; it deals to all of them when the first one asks.
    A book may change from one to the other at any time.

    A first-come book may be told that a worker should have smaller batches (`resize`).

    Memory grows neither with the samples nor with the epochs: finished leases leave only their counts, and
    of all but the last `KEPT_EPOCHS` epochs only the sums of those are kept.
    Not thread-safe: one owner.

    Args:
        samples: how many there are in an epoch.
        batch_size: of one worker; no lease is larger, unless its member is wider (see `joined`).
        drop_last: leave a last batch (a last round in a by-round book) unused if it is short.
            Otherwise a short last round is split evenly, lower ranks first.
        by_round: deal by rounds instead of first come, first served.
        copies: when first come, first served has nothing left, give a worker without leases a copy of one
            that another worker holds: "any", only of one that is at most half as fast ("slow"), or
            "none".
    """

    def __init__(
        self, *, samples: int, batch_size: int, drop_last: bool, by_round: bool, copies: Copies = "none"
    ) -> None:
        if samples < 1:
            raise UsageError(f"the data set is empty: leases need samples >= 1, got {samples}")
        if batch_size < 1:
            raise UsageError(f"batch_size must be at least 1, got batch_size={batch_size}")
        self._samples = samples
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._by_round = by_round
        self._copies: Copies = copies
        self._next_id = 0
        # Members, and what each has taken and not finished.
        self._taken: dict[int, dict[int, Lease]] = {}
        # How many workers a member stands for.
        self._widths: dict[int, int] = {}
        # The part of a batch that a member gets, since which lease, and what rounding has left of it.
        self._parts: dict[int, tuple[float, int]] = {}
        self._rests: dict[int, float] = {}
        # Those of them that an epoch does not wait for.
        self._carried: set[int] = set()
        # Of those that are out twice: who holds the other one, and its id.
        self._twins: dict[int, tuple[int, int]] = {}
        # Those whose twin was first, until somebody asks.
        self._superseded: set[int] = set()
        # Of the last epochs, the current one last; and of all before them together.
        self._accounts: deque[dict[str, int]] = deque()
        self._earlier: dict[str, int] = {"epochs": 0}
        self._settled = 0
        self._open_epoch()

    def _open_epoch(self) -> None:
        self._accounts.append(
            {
                "epoch": self._earlier["epochs"] + len(self._accounts),
                "samples": self._samples,
                "applied": 0,
                "refused": 0,
                "skipped": 0,
                "unused": 0,
            }
        )
        self._fold()
        # Free positions: rising ranges that do not touch.
        self._pool: Ranges = ((0, self._samples),)
        # By rounds: what is dealt to a member that has not come for it yet.
        self._shares: dict[int, deque[Ranges]] = {}
        # Members that asked for a later epoch: they stopped early and get no more of this one.
        self._ahead: set[int] = set()
        # How many leases of this epoch each worker has finished.
        self._finished: Counter[int] = Counter()

    def _fold(self) -> None:
        """Keep only the sums of epochs that ended long ago."""
        while len(self._accounts) > KEPT_EPOCHS:
            _add(self._earlier, self._accounts.popleft())
            self._earlier["epochs"] += 1

    def _count_in(self, epoch: int, what: str, samples: int) -> None:
        """So many samples of an epoch were applied, refused or left unused."""
        at = epoch - self._earlier["epochs"]
        account = self._accounts[at] if at >= 0 else self._earlier
        account[what] = account.get(what, 0) + samples
        self._settled += samples if what != "unused" else 0

    # Members

    def joined(self, worker: int, width: int = 1) -> None:
        """A new member. If one of that rank was there, it is gone, and its leases go back.

        Args:
            width: how many workers it stands for (a group of them): it is dealt that many batches at once,
                as one lease.
        """
        self.left(worker)
        self._taken[worker] = {}
        self._widths[worker] = width

    def left(self, worker: int) -> None:
        """The worker is gone. Its unfinished leases go back to the pool, except those with a twin."""
        self.give_back(worker, tuple(self._taken.get(worker, ())))
        self._return_shares(worker)
        self._taken.pop(worker, None)
        self._widths.pop(worker, None)
        self._parts.pop(worker, None)
        self._rests.pop(worker, None)
        self._ahead.discard(worker)

    # Leases

    def take(self, worker: int, epoch: int, limit: int) -> tuple[Lease, ...]:
        """The next leases for a worker; none if there is nothing for it now.

        None means: the epoch is over for it if `done(epoch)`; otherwise ask again when a lease came
        back, a member left, or an epoch turned. Asking for an epoch that has not begun says that
        the worker is through with this one; the others get the rest of it.

        Args:
            worker: who asks; strangers get nothing.
            epoch: the one that the worker is in.
            limit: how many at most (in a by-round book: of how many rounds). A first-come book gives fewer
                towards the end of an epoch, so that the last ones finish together, and copies one by one.
        """
        if worker not in self._taken or epoch < self.epoch:
            return ()
        if epoch > self.epoch:
            self._ahead.add(worker)
            self._return_shares(worker)
            return ()
        self._ahead.discard(worker)
        batches = self._next_shares(worker, limit) if self._by_round else self._next_batches(worker, limit)
        if batches or self._by_round or limit < 1:
            return tuple(self._issue(worker, ranges) for ranges in batches)
        copy = self._next_copy(worker)
        return () if copy is None else (copy,)

    def fresh(self, worker: int, ids: Iterable[int]) -> bool:
        """Whether all of these leases are still to be done, by this worker. To be asked before an update.

        If not, its twin was first, or the worker has lost it: the update would count samples again that were
        applied already. Leave it out, and `give_back` the ids.
        """
        return self._taken.get(worker, {}).keys() >= set(ids)

    def most_samples(self, worker: int, ids: Iterable[int], of_a_batch: int) -> int:
        """How many samples a push can have that these leases of a worker were used for: a batch for each that
        it holds, or one."""
        held = self._taken.get(worker, {}).keys() & set(ids)
        batch = of_a_batch if self._batch_size == 1 else self._batch_size
        return max(1, len(held)) * self._widths.get(worker, 1) * batch

    def superseded(self, ids: Iterable[int]) -> bool:
        """Whether somebody else was first with one of these leases. It is told once."""
        found = self._superseded.intersection(ids)
        self._superseded -= found
        return bool(found)

    def finish(self, worker: int, ids: Iterable[int], refused: bool = False) -> int:
        """The update computed from these leases was applied, or refused for good.

        Returns:
            The number of samples that this finished: leases that the worker does not hold (any
            more) do not count, so nothing counts twice.
        """
        samples = 0
        for lease, twin in self._withdraw(worker, ids):
            if twin is not None:
                self._withdraw(twin[0], [twin[1]])
                self._superseded.add(twin[1])
            self._count_in(lease.epoch, "refused" if refused else "applied", lease.samples)
            samples += lease.samples
            self._finished[worker] += lease.epoch == self.epoch
        return samples

    def give_back(self, worker: int, ids: Iterable[int]) -> None:
        """These leases were not used: somebody else may take them, unless their epoch is over.

        One that has a twin is forgotten: its samples are still the twin's.
        """
        leases = [lease for lease, twin in self._withdraw(worker, ids) if twin is None]
        self._return(lease.ranges for lease in leases if lease.epoch == self.epoch)
        for lease in leases:
            if lease.epoch < self.epoch:
                self._count_in(lease.epoch, "unused", lease.samples)

    def skip(self, worker: int, ids: Iterable[int]) -> int:
        """The worker's script read these leases and made no step with them. They are not dealt again.

        One that has a twin is forgotten: its samples are still the twin's.

        Returns:
            The number of samples that are skipped by this.
        """
        samples = 0
        for lease, twin in self._withdraw(worker, ids):
            if twin is None:
                self._count_in(lease.epoch, "skipped", lease.samples)
                samples += lease.samples
        return samples

    def carry(self, worker: int, ids: Iterable[int]) -> None:
        """The worker read these to the end of its epoch, but their update comes later (accumulation). The
        epoch turns without them; they are finished, or unused, when that is known."""
        self._carried.update(number for number in ids if number in self._taken.get(worker, {}))

    def resize(self, worker: int, ids: Iterable[int], factor: float) -> None:
        """First come, first served: make a worker's next batches so many times as large, down to a sample
        and up to a whole batch.

        Args:
            ids: the leases that this was seen of. If they were dealt before the last change, which they could
                not show yet, nothing changes.
        """
        part, since = self._parts.get(worker, (1.0, 0))
        if worker in self._taken and max(ids, default=-1) >= since:
            least = 1 / (self._widths[worker] * self._batch_size)
            self._parts[worker] = (min(1.0, max(least, part * factor)), self._next_id)

    def part(self, worker: int, samples: int) -> float:
        """The part of a whole batch of this worker that so many samples are, at most 1."""
        return min(1.0, samples / (self._widths.get(worker, 1) * self._batch_size))

    def deal_by_round(self, by_round: bool, copies: Copies | None = None) -> None:
        """Go on by rounds, or first come, first served. What was dealt and not taken is dealt again, and
        batches are whole ones again.

        Args:
            copies: as in the constructor; None leaves that as it is.
        """
        self._by_round = by_round
        self._copies = copies or self._copies
        self._parts.clear()
        self._rests.clear()
        for worker in tuple(self._shares):
            self._return_shares(worker)

    # Epochs

    def done(self, epoch: int) -> bool:
        """Whether that epoch is over."""
        return self.epoch > epoch

    def turn_if_over(self, waiting: Set[int]) -> bool:
        """Begin the next epoch if this one is over; returns whether it was.

        It is over when nothing is outstanding that is not carried, and either nothing is left to take
        or every member is in `waiting`, that is has stopped early. What is left then counts as unused.
        """
        if any(leases.keys() - self._carried for leases in self._taken.values()):
            return False
        left_to_take = bool(self._shares) or self._can_deal()
        all_stopped = bool(self._taken) and self._taken.keys() <= waiting
        if left_to_take and not all_stopped:
            return False
        self._accounts[-1]["unused"] = self.remaining
        self._open_epoch()
        return True

    # State

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._earlier["epochs"] + len(self._accounts) - 1

    @property
    def settled(self) -> int:
        """Samples of all epochs that are through: applied, refused or skipped."""
        return self._settled

    @property
    def members(self) -> set[int]:
        """Workers that joined and have not left."""
        return set(self._taken)

    @property
    def outstanding(self) -> dict[int, tuple[Lease, ...]]:
        """What each worker has taken and neither finished nor given back; twins with both."""
        return {worker: tuple(leases.values()) for worker, leases in self._taken.items() if leases}

    @property
    def remaining(self) -> int:
        """Samples of this epoch that nobody has taken."""
        return _count(self._pool) + sum(_count(share) for shares in self._shares.values() for share in shares)

    def accounts(self) -> list[dict[str, int]]:
        """What became of the samples of each of the last `KEPT_EPOCHS` epochs, the current one last.

        In an epoch that is over and has no carried leases, applied + refused + skipped + unused == samples.
        """
        return [dict(account) for account in self._accounts]

    def earlier(self) -> dict[str, int]:
        """The sums of all epochs before those of `accounts`, and how many `epochs` these are."""
        return dict(self._earlier)

    def snapshot(self) -> dict[str, Any]:
        """The book as JSON. What is outstanding is in its pool: that work is not applied yet."""
        unfinished = [self._pool]
        accounts, earlier = self.accounts(), self.earlier()
        for shares in self._shares.values():
            unfinished.extend(shares)
        for lease in (lease for leases in self._taken.values() for lease in leases.values()):
            if lease.id in self._twins and self._twins[lease.id][1] < lease.id:
                continue  # its samples are in already, or will be, with the older twin
            if lease.epoch == self.epoch:
                unfinished.append(lease.ranges)
            else:
                at = lease.epoch - earlier["epochs"]
                account = accounts[at] if at >= 0 else earlier
                account["unused"] = account.get("unused", 0) + lease.samples
        return {
            "samples": self._samples,
            "accounts": accounts,
            "earlier": earlier,
            "pool": [list(piece) for piece in _merged(unfinished)],
            "next_id": self._next_id,
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go on from a snapshot, without members. Batch size and mode may be others than then."""
        if snapshot["samples"] != self._samples:
            raise UsageError(
                f"the data set has {self._samples} samples, but the run to be resumed was trained "
                f"on {snapshot['samples']}: resume it with the data set that it began with"
            )
        self._taken.clear()
        self._widths.clear()
        self._parts.clear()
        self._rests.clear()
        self._twins.clear()
        self._carried.clear()
        self._open_epoch()
        self._accounts = deque({"skipped": 0, **account} for account in snapshot["accounts"])
        self._earlier = dict(snapshot.get("earlier", {"epochs": 0}))
        self._fold()
        self._settled = sum(
            account.get(what, 0)
            for account in (self._earlier, *self._accounts)
            for what in ("applied", "refused", "skipped")
        )
        self._pool = tuple((start, stop) for start, stop in snapshot["pool"])
        self._next_id = snapshot["next_id"]

    def state(self) -> BookState:
        """All that it knows. It shares its contents with the book: encode it before the book goes on."""
        return BookState(
            samples=self._samples,
            batch_size=self._batch_size,
            drop_last=self._drop_last,
            by_round=self._by_round,
            copies=self._copies,
            next_id=self._next_id,
            taken=self._taken,
            widths=self._widths,
            parts=self._parts,
            rests=self._rests,
            carried=self._carried,
            twins=self._twins,
            superseded=self._superseded,
            accounts=[*self._accounts],
            earlier=self._earlier,
            settled=self._settled,
            pool=self._pool,
            shares={worker: [*shares] for worker, shares in self._shares.items()},
            ahead=self._ahead,
            finished=self._finished,
        )

    @classmethod
    def from_state(cls, state: BookState) -> "LeaseBook":
        """The inverse of `state`."""
        book = cls(
            samples=state.samples,
            batch_size=state.batch_size,
            drop_last=state.drop_last,
            by_round=state.by_round,
            copies=state.copies,
        )
        book._next_id = state.next_id
        book._taken = state.taken
        book._widths = state.widths
        book._parts = state.parts
        book._rests = state.rests
        book._carried = state.carried
        book._twins = state.twins
        book._superseded = state.superseded
        book._accounts = deque(state.accounts)
        book._earlier = state.earlier
        book._settled = state.settled
        book._pool = state.pool
        book._shares = {worker: deque(shares) for worker, shares in state.shares.items()}
        book._ahead = state.ahead
        book._finished = Counter(state.finished)
        return book

    # Dealing

    def _issue(self, worker: int, ranges: Ranges) -> Lease:
        lease = Lease(self._next_id, self.epoch, ranges)
        self._next_id += 1
        self._taken[worker][lease.id] = lease
        return lease

    def _next_copy(self, worker: int) -> Lease | None:
        """A copy of the oldest lease that the epoch waits for, if the worker has no other work."""
        if self._copies == "none" or self._taken[worker].keys() - self._carried:
            return None
        settled = self._twins.keys() | self._carried
        single = [(n, who) for who, leases in self._taken.items() for n in leases.keys() - settled]
        if self._copies == "slow":
            fast = self._finished[worker] - _CLEARLY
            single = [(n, who) for n, who in single if fast >= 2 * self._finished[who]]
        if not single:
            return None
        number, holder = min(single)
        copy = self._issue(worker, self._taken[holder][number].ranges)
        self._twins[copy.id], self._twins[number] = (holder, number), (worker, copy.id)
        return copy

    def _next_batches(self, worker: int, limit: int) -> list[Ranges]:
        size = self._widths[worker] * self._batch_size
        whole, rest = divmod(_count(self._pool), size)
        batches = whole if self._drop_last or not rest else whole + 1
        fair = max(1, batches // (2 * len(self._taken)))
        if worker in self._parts:
            fair = min(fair, 2)  # so that a change is soon seen
        return [self._draw(self._resized(worker, size)) for _ in range(min(limit, fair, batches))]

    def _resized(self, worker: int, size: int) -> int:
        if worker not in self._parts:
            return size
        exact = self._parts[worker][0] * size + self._rests.get(worker, 0.0)
        now = max(1, int(exact))
        self._rests[worker] = exact - now
        return now

    def _next_shares(self, worker: int, limit: int) -> list[Ranges]:
        while len(self._shares.get(worker, ())) < limit and self._can_deal():
            self._deal_round()
        shares = self._shares.pop(worker, deque())
        taken = [shares.popleft() for _ in range(min(limit, len(shares)))]
        if shares:
            self._shares[worker] = shares
        return taken

    def _deal_round(self) -> None:
        ranks = sorted(self._taken.keys() - self._ahead)
        seats = [worker for worker in ranks for _ in range(self._widths[worker])]
        in_round = min(_count(self._pool), len(seats) * self._batch_size)
        each, extra = divmod(in_round, len(seats))
        sizes: Counter[int] = Counter()
        for place, worker in enumerate(seats):
            sizes[worker] += each + (place < extra)
        for worker in ranks:
            if sizes[worker]:
                self._shares.setdefault(worker, deque()).append(self._draw(sizes[worker]))

    def _can_deal(self) -> bool:
        widths = [self._widths[worker] for worker in self._taken.keys() - self._ahead]
        batches = sum(widths) if self._by_round else min(widths, default=1)
        least = batches * self._batch_size if self._drop_last else 1
        return _count(self._pool) >= max(1, least)

    # The pool

    def _draw(self, samples: int) -> Ranges:
        """Take the lowest free positions, at most so many, out of the pool."""
        drawn, pool = [], deque(self._pool)
        while samples and pool:
            start, stop = pool.popleft()
            cut = min(stop, start + samples)
            drawn.append((start, cut))
            samples -= cut - start
            if cut < stop:
                pool.appendleft((cut, stop))
        self._pool = tuple(pool)
        return tuple(drawn)

    def _return(self, parts: Iterable[Ranges]) -> None:
        self._pool = _merged([self._pool, *parts])

    def _return_shares(self, worker: int) -> None:
        self._return(self._shares.pop(worker, ()))

    def _withdraw(self, worker: int, ids: Iterable[int]) -> list[tuple[Lease, tuple[int, int] | None]]:
        """Take leases from a worker. Of each that had a twin: who has that one, and its id; single now."""
        held = self._taken.get(worker, {})
        found = []
        for number in ids:
            if number in held:
                twin = self._twins.pop(number, None)
                if twin is not None:
                    del self._twins[twin[1]]
                self._carried.discard(number)
                found.append((held.pop(number), twin))
        return found


def _add(sums: dict[str, int], account: dict[str, int]) -> None:
    for what, samples in account.items():
        if what != "epoch":
            sums[what] = sums.get(what, 0) + samples


def _count(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _merged(parts: Iterable[Ranges]) -> Ranges:
    """The positions of all parts as rising ranges that do not touch."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(piece for part in parts for piece in part):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)
