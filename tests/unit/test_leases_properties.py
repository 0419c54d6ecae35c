"""Every sample is applied exactly once per epoch, over random orders of events.

`World` plays workers against a book and keeps its own account of where every sample is.
"""

import json
import random
from collections import Counter
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.leases import Lease, LeaseBook

EVENTS_PER_RUN = 300

books = st.fixed_dictionaries(
    {
        "samples": st.integers(1, 60),
        "batch_size": st.integers(1, 9),
        "drop_last": st.booleans(),
        "by_round": st.booleans(),
        "copies": st.sampled_from(["none", "any"]),
    }
)


OFTEN = {
    "take": 40,
    "finish": 40,
    "give_back": 6,
    "join": 6,
    "leave": 5,
    "turn": 20,
    "switch": 4,
    "restore": 1,
    "refuse": 4,
    "skip": 4,
    "stop_early": 2,
}
"""How often each event happens."""


class World:
    def __init__(self, book: dict[str, int], ranks: int, seed: int, impatient: bool) -> None:
        self.settings = book
        self.samples, self.batch_size = book["samples"], book["batch_size"]
        self.book = LeaseBook(**book)  # type: ignore[arg-type]
        self.rng = random.Random(seed)
        self.ranks = range(ranks)
        self.impatient = impatient  # whether workers stop early and pushes are refused
        self.by_round = bool(book["by_round"])
        self.epochs: dict[int, int] = {}
        self.held: dict[int, dict[int, Lease]] = {}
        self.twins: dict[int, tuple[int, int]] = {}  # holder and id of a lease's twin
        self.late: list[tuple[int, int]] = []  # workers, and leases of theirs whose twin was first
        self.ids: set[int] = set()
        self.free = set(range(self.samples))
        self.fates: dict[int, str] = {}
        self.expected: list[dict[str, int]] = []
        self.events = 0
        self.happened: Counter[str] = Counter()

    # Events

    def step(self, often: Mapping[str, int] = OFTEN) -> None:
        names = [name for name in often if self.impatient or name not in ("refuse", "skip", "stop_early")]
        name = self.rng.choices(names, weights=[often[name] for name in names])[0]
        if self.held or name in ("join", "turn", "switch", "restore"):
            getattr(self, name)()
            self.events += 1
            self.happened[name] += 1
            self.check()

    def take(self, rank: int | None = None) -> None:
        rank = self.someone() if rank is None else rank
        limit, epoch = self.rng.choice((1, 1, 2, 5)), self.epochs[rank]
        copied = self.to_copy(rank, epoch)
        leases = self.book.take(rank, epoch, limit)
        assert len(leases) <= limit
        assert not leases or epoch == self.book.epoch
        if copied is not None:
            holder, original = copied
            (copy,) = leases
            assert copy.ranges == original.ranges
            self.twins[copy.id], self.twins[original.id] = (holder, original.id), (rank, copy.id)
            self.happened["copied"] += 1
        for lease in leases:
            positions = self.positions(lease)
            assert lease.epoch == epoch
            assert 1 <= lease.samples == len(positions) <= self.batch_size
            assert lease.samples == self.batch_size or not self.settings["drop_last"]
            assert copied or self.free.issuperset(positions), "leased twice"
            assert lease.id not in self.ids
            self.ids.add(lease.id)
            self.free.difference_update(positions)
            self.held[rank][lease.id] = lease
        if not leases and self.book.done(epoch):
            self.epochs[rank] += 1

    def finish(self, fate: str = "applied", rank: int | None = None, ids: list[int] | None = None) -> None:
        rank = self.someone() if rank is None else rank
        ids = self.some_ids(rank) if ids is None else ids
        assert self.book.fresh(rank, ids)
        leases = [self.held[rank].pop(number) for number in ids]
        for number in ids:
            if twin := self.parted(number):
                other, withdrawn = twin
                del self.held[other][withdrawn]
                self.late.append(twin)
                self.happened["copy first" if number > withdrawn else "original first"] += 1
        stale = self.rng.sample(sorted(self.ids), 1) if self.ids else []
        stale = [n for n in stale if not any(n in held for held in self.held.values()) and n not in ids]
        assert self.book.fresh(rank, [*ids, *stale]) == (not stale)
        samples = self.book.finish(rank, [*ids, *stale, *ids], refused=fate == "refused")
        assert samples == sum(lease.samples for lease in leases)
        for position in (p for lease in leases for p in self.positions(lease)):
            assert position not in self.fates, "finished twice"
            self.fates[position] = fate

    def finish_late(self) -> None:
        """Workers whose leases were withdrawn push all the same."""
        for rank, number in self.late:
            ids = [number, *self.held.get(rank, ())]
            assert not self.book.fresh(rank, ids)
            assert self.book.finish(rank, [number]) == 0
            self.book.give_back(rank, [number])
        self.late.clear()

    def refuse(self) -> None:
        self.finish("refused")

    def skip(self) -> None:
        rank = self.someone()
        ids = self.some_ids(rank)
        alone = [self.held[rank][number] for number in ids if number not in self.twins]
        for number in ids:
            self.parted(number)
            del self.held[rank][number]
        assert self.book.skip(rank, ids) == sum(lease.samples for lease in alone)
        self.fates |= {p: "skipped" for lease in alone for p in self.positions(lease)}

    def switch(self) -> None:
        self.by_round = not self.by_round
        self.book.deal_by_round(self.by_round)

    def give_back(self, rank: int | None = None) -> None:
        rank = self.someone() if rank is None else rank
        ids = self.some_ids(rank)
        self.book.give_back(rank, ids)
        self.put_back(rank, ids)

    def join(self) -> None:
        """Somebody new, or somebody in the place of one whose death nobody noticed."""
        rank = self.rng.choice(self.ranks)
        if rank in self.held:
            self.put_back(rank, list(self.held[rank]))
        self.book.joined(rank)
        self.held[rank], self.epochs[rank] = {}, self.book.epoch

    def leave(self) -> None:
        rank = self.someone()
        self.book.left(rank)
        self.put_back(rank, list(self.held[rank]))
        del self.held[rank], self.epochs[rank]

    def stop_early(self) -> None:
        rank = self.someone()
        self.book.give_back(rank, list(self.held[rank]))
        self.put_back(rank, list(self.held[rank]))
        self.epochs[rank] = self.book.epoch + 1
        assert self.book.take(rank, self.epochs[rank], 5) == ()

    def turn(self) -> bool:
        book, waiting = self.book, self.waiting()
        nothing_out = not any(self.held.values())
        all_stopped = bool(self.held) and waiting == self.held.keys()
        turned = book.turn_if_over(waiting)
        if turned:
            assert nothing_out
            if not all_stopped and not self.settings["drop_last"]:
                assert not self.free
            elif not all_stopped:
                assert len(self.free) < self.batch_size * max(1, self.dealt_to())
            fates = Counter(self.fates.values())
            assert len(self.fates) + len(self.free) == self.samples
            self.expected.append(
                {
                    "epoch": len(self.expected),
                    "samples": self.samples,
                    "applied": fates["applied"],
                    "refused": fates["refused"],
                    "skipped": fates["skipped"],
                    "unused": len(self.free),
                }
            )
            self.happened["turned"] += 1
            self.happened["whole epochs"] += fates["applied"] == self.samples
            self.free, self.fates = set(range(self.samples)), {}
        else:
            assert not (nothing_out and (all_stopped or not self.free))
        return turned

    def restore(self) -> None:
        snapshot = json.loads(json.dumps(self.book.snapshot()))
        self.book = LeaseBook(**self.settings)  # type: ignore[arg-type]
        self.book.restore(snapshot)
        self.by_round = bool(self.settings["by_round"])
        for rank in list(self.held):
            self.put_back(rank, list(self.held[rank]))
        self.held.clear()
        self.epochs.clear()

    # What this world knows by itself

    def someone(self) -> int:
        return self.rng.choice(list(self.held))

    def some_ids(self, rank: int) -> list[int]:
        ids = list(self.held[rank])
        return self.rng.sample(ids, self.rng.randint(0, len(ids)))

    def put_back(self, rank: int, ids: list[int]) -> None:
        for number in ids:
            lease = self.held[rank].pop(number)
            if self.parted(number):
                self.happened["one of twins gone"] += 1
            else:
                self.free.update(self.positions(lease))

    def parted(self, number: int) -> tuple[int, int] | None:
        """The twin of a lease; from now on both are single."""
        twin = self.twins.pop(number, None)
        if twin:
            del self.twins[twin[1]]
        return twin

    def to_copy(self, rank: int, epoch: int) -> tuple[int, Lease] | None:
        """Which lease the worker must get a copy of if it asks now: the oldest single one of another."""
        idle = epoch == self.book.epoch and not self.held[rank]
        enough = self.batch_size if self.settings["drop_last"] else 1
        if self.settings["copies"] == "none" or self.by_round or not idle or len(self.free) >= enough:
            return None
        others = [(w, lease) for w, held in self.held.items() for lease in held.values() if w != rank]
        single = [(w, lease) for w, lease in others if lease.id not in self.twins]
        return min(single, key=lambda found: found[1].id, default=None)

    def waiting(self) -> set[int]:
        return {rank for rank, epoch in self.epochs.items() if epoch > self.book.epoch}

    def dealt_to(self) -> int:
        return len(self.held.keys() - self.waiting()) if self.by_round else 1

    @staticmethod
    def positions(lease: Lease) -> list[int]:
        return [position for start, stop in lease.ranges for position in range(start, stop)]

    def check(self) -> None:
        book = self.book
        assert book.remaining == len(self.free)
        assert book.members == self.held.keys()
        assert {rank: set(leases) for rank, leases in book.outstanding.items()} == {
            rank: set(held.values()) for rank, held in self.held.items() if held
        }
        *turned, current = book.accounts()
        assert turned == self.expected
        assert current["applied"] + current["refused"] + current["skipped"] == len(self.fates)
        for account in turned:
            parts = sum(account[fate] for fate in ("applied", "refused", "skipped", "unused"))
            assert parts == account["samples"]


def test_every_sample_is_applied_exactly_once_per_epoch() -> None:
    events, happened = 0, Counter[str]()

    @settings(max_examples=200)
    @given(books, st.integers(1, 7), st.integers(0, 2**64), st.booleans())
    def run(book: dict[str, int], ranks: int, seed: int, impatient: bool) -> None:
        nonlocal events
        world = World(book, ranks, seed, impatient)
        while world.events < EVENTS_PER_RUN:
            world.step()
        if not impatient and not book["drop_last"]:
            assert all(account["applied"] == book["samples"] for account in world.expected)
        events += world.events
        happened.update(world.happened)

    run()
    assert events >= 50_000
    assert happened["turned"] > 1000
    assert happened["whole epochs"] > 500
    assert (
        min(happened[e] for e in ("leave", "join", "restore", "refuse", "skip", "stop_early", "switch")) > 100
    )


def test_of_twins_the_first_one_counts() -> None:
    """Few leases an epoch, and workers that come to the end of them again and again."""
    happened = Counter[str]()
    often = {**OFTEN, "take": 90, "finish_late": 10, "leave": 2, "switch": 0}

    @settings(max_examples=150)
    @given(books, st.integers(2, 7), st.integers(0, 2**64), st.booleans())
    def run(book: dict[str, int], ranks: int, seed: int, impatient: bool) -> None:
        few = {"batch_size": 1 + book["samples"] // 5, "by_round": False, "copies": "any"}
        world = World({**book, **few}, ranks, seed, impatient)
        while world.events < EVENTS_PER_RUN:
            world.step({**often, "join": 6 if len(world.held) == ranks else 60})
        happened.update(world.happened)

    run()
    assert happened["whole epochs"] > 500
    assert min(happened[e] for e in ("copied", "copy first", "original first", "one of twins gone")) > 300


@settings(max_examples=150)
@given(books, st.integers(1, 7), st.integers(0, 2**64))
def test_an_epoch_always_ends(book: dict[str, int], ranks: int, seed: int) -> None:
    """From any state, members that go on asking and finishing come to the next epoch.

    Those that stopped early do not hold them up.
    """
    world = World(book, ranks, seed, impatient=True)
    for _ in range(60):
        world.step()
    if not world.held:
        world.join()
    for _ in range(world.rng.randrange(3)):
        world.take()
        world.stop_early()
    epoch = world.book.epoch
    for _ in range(2 * book["samples"] + 2):
        for rank in world.rng.sample(list(world.held), len(world.held)):
            world.take(rank)
            for number in list(world.held[rank]):
                world.finish(rank=rank, ids=[number])
        world.turn()
        world.check()
        if world.book.done(epoch):
            return
    raise AssertionError("the epoch never ended")


@settings(max_examples=200)
@given(
    st.integers(1, 8),
    st.integers(1, 9),
    st.integers(1, 200),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_a_round_is_the_batch_of_one_large_process(
    workers: int, batch_size: int, samples: int, drop_last: bool, rng: random.Random
) -> None:
    book = LeaseBook(samples=samples, batch_size=batch_size, drop_last=drop_last, by_round=True)
    for worker in range(workers):
        book.joined(worker)
    shares: dict[int, list[Lease]] = {worker: [] for worker in range(workers)}
    large = workers * batch_size
    end = samples - samples % large if drop_last else samples
    while book.remaining > samples - end:
        worker = rng.randrange(workers)
        shares[worker].extend(book.take(worker, 0, rng.choice((1, 2, 7))))

    for number, start in enumerate(range(0, end, large)):
        stop = min(start + large, end)
        parts = [own[number] for own in shares.values() if number < len(own)]
        together = [p for part in parts for p in World.positions(part)]
        assert together == list(range(start, stop))
        sizes = [part.samples for part in parts] + [0] * (workers - len(parts))
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1
    assert max(map(len, shares.values())) == -(-end // large)
