"""What a mode promises, over random orders of events.

`World` plays workers against a machine: they compute, push, repeat themselves, die, come back anew,
rest and wake, at any time and in any order, and the run may change its mode under them. It keeps its own
account of who is where, so what it expects does not come from the machine that it checks.
"""

import json
import math
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.modes import Admit, Apply, Drop, Hold, Instruction, PushId, parse_mode

MODES = ["bsp", "backup:1", "backup:3", "ssp:0", "ssp:1", "ssp:4", "asp"]
MODES += ["ssp:0+quorum=2", "ssp:2+quorum=4", "asp+quorum=3", "asp+quorum=20"]
EVENTS_PER_RUN = 500


@dataclass
class Worker:
    incarnation: int
    clock: int
    read_version: int
    sequence: int = 0
    waits: bool = False
    rests: bool = False  # while it waits: will rest once admitted


class World:
    def __init__(self, mode: str, ranks: int, seed: int, *, switches: bool = False) -> None:
        self.spec = parse_mode(mode)
        self.machine = self.spec.machine()
        self.rng = random.Random(seed)
        self.ranks = range(ranks)
        self.switches = switches
        self.workers: dict[int, Worker] = {}
        self.pending: dict[int, tuple[PushId, int]] = {}  # of workers that wait for their round
        self.held: list[PushId] = []
        self.incarnations: Counter[int] = Counter()
        self.history: list[PushId] = []
        self.applied: set[PushId] = set()
        self.dropped: set[PushId] = set()
        self.updates = 0
        self.floor = 0
        self.events = 0
        self.happened: Counter[str] = Counter()

    # What this world knows by itself

    @property
    def active(self) -> set[int]:
        return {rank for rank, worker in self.workers.items() if worker.waits or not worker.rests}

    def slowest(self) -> int:
        """The slowest active clock, or with nobody active the last there was."""
        self.floor = min((self.workers[rank].clock for rank in self.active), default=self.floor)
        return self.floor

    def is_current(self, push: PushId) -> bool:
        return push.worker in self.workers and self.workers[push.worker].incarnation == push.incarnation

    def leads_too_far(self, rank: int) -> bool:
        bound = self.spec.bound
        return bound is not None and self.workers[rank].clock - self.slowest() > bound

    # Events

    def step(self) -> None:
        event = self.rng.choices(
            (self.push, self.repeat, self.haunt, self.join, self.leave, self.rest, self.wake, self.switch),
            weights=(60, 4, 4, 8, 6, 6, 8, 3 * self.switches),
        )[0]
        event()

    def finish(self, ranks: list[int]) -> None:
        """Every worker that may is to push once; whoever waits is passed over."""
        for rank in ranks:
            if rank in self.workers and not self.workers[rank].waits:
                self.push(rank)

    def pick(self, *, waits: bool | None = None) -> int | None:
        ranks = [r for r, w in self.workers.items() if waits is None or w.waits is waits]
        return self.rng.choice(ranks) if ranks else None

    def push(self, rank: int | None = None) -> None:
        rank = self.pick(waits=False) if rank is None else rank
        if rank is None:
            return self.join()
        worker = self.workers[rank]
        push = PushId(rank, worker.incarnation, worker.sequence)
        worker.sequence += self.rng.choice((1, 1, 1, 3))
        self.history.append(push)
        if worker.rests:
            worker.clock = max(worker.clock, self.slowest())
            worker.rests = False
        late = self.spec.spare is not None and worker.read_version != self.updates
        worker.waits = True
        if self.spec.spare is None or late:
            worker.clock += 1
        if self.spec.spare is None:
            self.held.append(push)
        elif not late:
            self.pending[rank] = (push, worker.read_version)
        instructions = self.machine.pushed(push, worker.read_version)
        if late:
            assert instructions == [Drop(push), Admit(rank)]
        elif self.spec.spare is None:
            assert instructions[0] in (Apply(tuple(self.held)), Hold(push))
        self.obey(instructions, "late" if late else "push")

    def repeat(self) -> None:
        """A worker sends its last push again, because its link broke or the answer was lost."""
        rank = self.pick()
        if rank is None or not any(push.worker == rank for push in self.history):
            return
        last = next(push for push in reversed(self.history) if push.worker == rank)
        worker = self.workers[rank]
        instructions = self.machine.pushed(last, worker.read_version)
        again = Hold(last) if last in self.held else Drop(last)
        if last.incarnation != worker.incarnation:
            assert instructions == [again]
        elif not worker.waits:
            assert instructions == [again, Admit(rank)]
        elif self.spec.spare is None:
            assert instructions == [again]
        else:
            assert instructions == []
        self.obey(instructions, "repeat")

    def haunt(self) -> None:
        """Something arrives from the past, from a dead incarnation or from a stranger."""
        strays = [push for push in self.held if not self.is_current(push)]
        push = PushId(99, 0, 0)
        if strays and self.rng.random() < 0.5:
            push = self.rng.choice(strays)
        elif self.history and self.rng.random() < 0.9:
            push = self.rng.choice(self.history)
        if self.is_current(push):
            return
        instructions = self.machine.pushed(push, self.updates)
        assert instructions == [Hold(push) if push in self.held else Drop(push)]
        self.obey(instructions, "haunt")

    def join(self) -> None:
        rank = self.rng.choice(self.ranks)
        replaces = rank in self.workers
        if replaces and self.rng.random() < 0.7:
            return self.push(None) if self.pick(waits=False) is not None else None
        orphan = self.pending.pop(rank, None)
        self.workers.pop(rank, None)
        self.incarnations[rank] += 1
        self.workers[rank] = Worker(self.incarnations[rank], self.slowest(), self.updates)
        instructions = self.machine.joined(rank, self.incarnations[rank])
        drops = [Drop(orphan[0])] if orphan else []
        assert [i for i in instructions if isinstance(i, Drop)] == drops
        assert self.held or not any(isinstance(i, Apply) for i in instructions)
        self.obey(instructions, "replace" if replaces else "join")

    def leave(self, rank: int | None = None) -> None:
        rank = self.pick() if rank is None else rank
        if rank is None:
            return
        orphan = self.pending.pop(rank, None)
        del self.workers[rank]
        instructions = self.machine.left(rank)
        drops = [Drop(orphan[0])] if orphan else []
        assert [i for i in instructions if isinstance(i, Drop)] == drops
        self.obey(instructions, "leave")

    def rest(self, rank: int | None = None) -> None:
        rank = self.pick() if rank is None else rank
        if rank is None:
            return
        self.workers[rank].rests = True
        self.obey(self.machine.rested(rank), "rest")

    def wake(self, rank: int | None = None) -> None:
        rank = self.pick() if rank is None else rank
        if rank is None:
            return
        worker = self.workers[rank]
        if worker.rests and not worker.waits:
            worker.clock = max(worker.clock, self.slowest())
            worker.read_version = self.updates
        worker.rests = False
        self.obey(self.machine.woke(rank), "wake")

    def switch(self, mode: str | None = None) -> None:
        """The run goes on in another mode, or the same."""
        self.spec = parse_mode(mode or self.rng.choice(MODES))
        self.machine, instructions = self.machine.switch(self.spec)
        if self.spec.spare is None:
            for rank in sorted(self.pending):
                self.held.append(self.pending.pop(rank)[0])
                self.workers[rank].clock += 1
            if self.spec.bound is not None and self.workers:
                # Who computes may lead by the bound, who waits by one step more: the slowest are lifted.
                fastest = max(worker.clock - worker.waits for worker in self.workers.values())
                self.floor = max(self.slowest(), fastest - self.spec.bound)
                for rank in self.active:
                    self.workers[rank].clock = max(self.workers[rank].clock, self.floor)
        self.obey(instructions, "switch")

    def finish_all(self) -> None:
        """Everybody comes to rest: then every push was applied or dropped, and none both."""
        while todo := [rank for rank, worker in self.workers.items() if not worker.rests]:
            self.rest(self.rng.choice(todo))
        assert not self.active
        assert not self.pending
        assert not self.held
        assert self.applied.isdisjoint(self.dropped)
        assert self.applied | self.dropped == set(self.history)

    # Instructions

    def obey(self, instructions: list[Instruction], event: str) -> None:
        self.events += 1
        self.happened[event] += 1
        for instruction in instructions:
            match instruction:
                case Apply(pushes):
                    self.check_apply(pushes, event)
                case Admit(rank):
                    self.admit(rank, event)
                case Hold(push):
                    assert push in self.held
                    self.happened[f"held by {event}"] += 1
                case Drop(push):
                    assert self.pending.get(push.worker, (None, 0))[0] != push
                    assert push not in self.held
                    if event not in ("repeat", "haunt"):
                        assert push not in self.applied
                        assert push not in self.dropped, "dropped twice"
                        self.dropped.add(push)
        self.check_state()

    def check_apply(self, pushes: tuple[PushId, ...], event: str) -> None:
        assert not self.applied.intersection(pushes), "applied twice"
        assert not self.dropped.intersection(pushes), "applied though dropped"
        if self.held:
            assert list(pushes) == self.held[: len(pushes)], "not in order of arrival"
            assert event == "switch" or len(pushes) == len(self.held), "not all that were held"
            del self.held[: len(pushes)]
        else:
            assert list(pushes) == sorted(pushes), "not in rank order"
            assert {push for push, _ in self.pending.values()} == set(pushes)
            needed = max(1, len(self.active) - (self.spec.spare or 0))
            assert len(pushes) == needed or (event == "switch" and len(pushes) > needed), "not the quorum"
            assert all(read == self.updates for _, read in self.pending.values())
            for push in pushes:
                self.workers[push.worker].clock += 1
            self.slowest()
            self.pending.clear()
        self.applied.update(pushes)
        self.updates += 1
        self.happened[f"applied by {event}"] += 1

    def admit(self, rank: int, event: str) -> None:
        worker = self.workers[rank]
        assert worker.waits or event == "repeat"
        assert not self.leads_too_far(rank) or self.spec.spare is not None
        worker.waits = False
        self.slowest()
        worker.read_version = self.updates
        self.happened[f"admitted by {event}"] += 1

    def check_state(self) -> None:
        self.slowest()
        machine, active = self.machine, self.active
        waiting = {rank for rank, worker in self.workers.items() if worker.waits}
        assert machine.version == self.updates
        assert machine.members == set(self.workers)
        assert machine.active == active
        assert machine.clocks == {rank: worker.clock for rank, worker in self.workers.items()}

        # Somebody who is active can always push, and whoever waits does so for such a one.
        assert waiting <= active
        assert not active or active - waiting
        blocked = machine.waiting
        assert blocked.keys() == waiting
        for awaited in blocked.values():
            assert awaited
            assert awaited <= active - waiting

        if self.spec.spare is None:
            # Only those wait who lead too far, and only those lead too far who wait.
            bound = math.inf if self.spec.bound is None else self.spec.bound
            assert waiting == {r for r, w in self.workers.items() if w.clock - self.floor > bound}
            # What is held waits for somebody, too.
            assert not self.held or len(self.held) < min(self.spec.quorum, len(active))
        else:
            assert not self.held
            assert len(self.pending) < max(1, len(active) - self.spec.spare)
            assert self.pending.keys() == waiting


def test_every_promise_holds_over_a_hundred_thousand_events() -> None:
    events, happened = 0, Counter[str]()

    @settings(max_examples=220)
    @given(st.sampled_from(MODES), st.sampled_from(range(1, 10)), st.integers(0, 2**64), st.booleans())
    def run(mode: str, ranks: int, seed: int, switches: bool) -> None:
        nonlocal events
        world = World(mode, ranks, seed, switches=switches)
        while world.events < EVENTS_PER_RUN:
            world.step()
        world.finish_all()
        events += world.events
        happened.update(world.happened)

    run()
    assert events >= 100_000
    # The rare orders were among them.
    for event in ("push", "late", "repeat", "haunt", "join", "replace", "leave", "rest"):
        assert happened[event] > 500, event
    for event in ("leave", "rest", "push", "switch"):
        assert happened[f"applied by {event}"] > 100, event
        assert happened[f"admitted by {event}"] > 100, event
    for event in ("push", "repeat", "switch"):
        assert happened[f"held by {event}"] > 20, event
    assert happened["held by haunt"]
    assert happened["admitted by replace"] > 10


@settings(max_examples=150)
@given(st.sampled_from(MODES), st.sampled_from(MODES), st.integers(1, 9), st.integers(0, 2**64))
def test_no_switch_stops_a_run(before: str, after: str, ranks: int, seed: int) -> None:
    """Whatever the moment: every worker that is left can go on, and again after a switch back."""
    world = World(before, ranks, seed)
    for _ in range(60):
        world.step()
    for mode in (after, before, after):
        version, clocks = world.machine.version, world.machine.clocks
        world.switch(mode)
        assert world.machine.version >= version
        assert all(world.machine.clocks[rank] >= clock for rank, clock in clocks.items())
        for rank in [rank for rank, worker in world.workers.items() if worker.rests]:
            world.wake(rank)
        goal = {rank: worker.sequence + 3 for rank, worker in world.workers.items()}
        for _ in range(5 * (ranks + 1) + 5):
            todo = [r for r, w in world.workers.items() if w.sequence < goal[r]]
            world.finish(world.rng.sample(todo, len(todo)))
            for rank in set(world.workers) - set(todo):
                if not world.workers[rank].rests:
                    world.rest(rank)
        assert all(worker.sequence >= goal[rank] for rank, worker in world.workers.items())
    world.finish_all()


@settings(max_examples=150)
@given(st.sampled_from(MODES), st.integers(2, 9), st.integers(0, 2**64))
def test_whoever_goes_blocks_nobody(mode: str, ranks: int, seed: int) -> None:
    world = World(mode, ranks, seed)
    for _ in range(60):
        world.step()
    if world.workers:
        survivor = world.rng.choice(list(world.workers))
        others = [rank for rank in world.workers if rank != survivor]
        for rank in world.rng.sample(others, len(others)):
            world.rng.choice((world.leave, world.rest))(rank)
            if rank in world.workers and world.workers[rank].waits:
                world.leave(rank)
        assert not world.workers[survivor].waits
        updates = world.updates
        for _ in range(5):
            world.push(survivor)
            assert not world.workers[survivor].waits
        assert world.updates >= updates + 4  # the first may have been late


@settings(max_examples=150)
@given(st.sampled_from(MODES), st.integers(1, 9), st.integers(0, 2**64))
def test_work_that_remains_gets_done(mode: str, ranks: int, seed: int) -> None:
    world = World(mode, ranks, seed)
    for _ in range(60):
        world.step()
    goal = {rank: worker.sequence + 5 for rank, worker in world.workers.items()}
    sweeps = 0
    while todo := [r for r, w in world.workers.items() if w.sequence < goal[r]]:
        world.finish(world.rng.sample(todo, len(todo)))
        for rank in set(world.workers) - set(todo):
            if not world.workers[rank].rests:
                world.rest(rank)
        sweeps += 1
        assert sweeps <= 5 * (ranks + 1) + 5


@settings(max_examples=150)
@given(st.sampled_from(MODES), st.sampled_from(MODES), st.integers(1, 9), st.integers(0, 2**64))
def test_a_restored_machine_goes_on(before: str, after: str, ranks: int, seed: int) -> None:
    world = World(before, ranks, seed)
    for _ in range(60):
        world.step()
    old = world.machine
    snapshot = json.loads(json.dumps(old.snapshot()))

    again = World(after, ranks, seed + 1)
    again.machine.restore(snapshot)
    again.updates = again.machine.version
    again.floor = again.machine.snapshot()["floor"]
    assert (again.machine.version, again.machine.clocks) == (old.version, old.clocks)
    assert again.machine.snapshot()["clocks"] == snapshot["clocks"]
    for rank in world.rng.sample(sorted(old.members), len(old.members)):
        assert again.machine.joined(rank, 0) == []
        clock = again.machine.clocks[rank]
        assert clock >= old.clocks[rank]
        again.workers[rank] = Worker(0, clock, again.updates)
    again.check_state()
    if before == after and before in ("bsp", "asp") and old.members == old.active:
        assert max(again.machine.clocks.values(), default=0) == max(old.clocks.values(), default=0)
    for _ in range(60):
        again.step()


@pytest.mark.parametrize("mode", ["bsp", "backup:100", "ssp:3", "asp", "ssp:3+quorum=500"])
def test_thousands_of_workers(mode: str) -> None:
    """Each event is far cheaper than a pass over all pairs of workers: this ends in a second."""
    workers, machine, rng = 2000, parse_mode(mode).machine(), random.Random(0)
    for worker in range(workers):
        machine.joined(worker, 0)
    read, sequence, ready = [0] * workers, [0] * workers, list(range(workers))
    for _ in range(20_000):
        place = rng.randrange(len(ready))
        ready[place], ready[-1] = ready[-1], ready[place]
        worker = ready.pop()
        push = PushId(worker, 0, sequence[worker])
        sequence[worker] += 1
        for instruction in machine.pushed(push, read[worker]):
            if isinstance(instruction, Admit):
                ready.append(instruction.worker)
                read[instruction.worker] = machine.version
    assert machine.version >= 10
