"""Deliberate mistakes in the core: one for each mode and each rule of the order. The explorer must find
them all."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from paceline.core.fates import Fates
from paceline.core.leases import LeaseBook
from paceline.core.modes import Admit, Clocks, Drop, Hold, Machine, Rounds, WholeEpochs
from paceline.core.placement_changes import PlacementChanges
from paceline.core.rows import Groups
from paceline.core.sequencer import OrderLog, Sequenced, Sequencer
from paceline.core.server.checkpoint_cuts import CheckpointCuts
from paceline.core.server.departures import Departures
from paceline.core.server.follower_machine import FollowerMachine
from paceline.core.server.run_order import RunOrder
from paceline.core.server.slice_transfers import SliceTransfers
from paceline.core.server.standby import Standby
from paceline.core.server.start_gate import StartGate
from paceline.core.steps import ApplyStep, CheckpointStep
from tests.explorer.model import World

__all__ = ["MISTAKES", "Mistake"]


@dataclass(frozen=True)
class Mistake:
    """A wrong function in the place of a right one.

    Args:
        owner, name: what is replaced.
        wrong: makes the wrong function of the right one.
        world: where it shows.
        walks: random walks beyond the cap that are enough.
    """

    owner: Any
    name: str
    wrong: Callable[[Any], Any]
    world: World
    cap: int = 1_500
    walks: int = 30

    @contextmanager
    def made(self) -> Iterator[None]:
        with patch.object(self.owner, self.name, self.wrong(getattr(self.owner, self.name))):
            yield


def constant(value: Any) -> Callable[[Any], Any]:
    return lambda right: lambda *args, **more: value


def applied_twice(right: Any) -> Any:
    def flush(self: Any) -> Any:
        kept = dict(self._held)
        made = right(self)
        self._held.update(kept if self._version < 2 else {})
        return made

    return flush


def one_short(right: Any) -> Any:
    def settle(self: Any) -> Any:
        self._spare += 1
        try:
            return right(self)
        finally:
            self._spare -= 1

    return settle


def never_late(right: Any) -> Any:
    return lambda self, push, read_version: right(self, push, self._version)


def not_admitted(right: Any) -> Any:
    """The worker whose push makes a third update is forgotten."""

    def admit(self: Any, workers: Any) -> Any:
        return right(self, [] if self._version == 3 else workers)

    return admit


def waits_for_the_resting(right: Any) -> Any:
    return lambda self, worker: self._settle()


def first_lease_only(right: Any) -> Any:
    return lambda self, worker, ids, refused=False: right(self, worker, tuple(ids)[:1], refused)


def held_by_few(right: Any) -> Any:
    """The quorum is waited for even if fewer workers are left."""

    def flush(self: Any) -> Any:
        return right(self) if len(self._held) >= self._quorum else []

    return flush


def admits_nobody(right: Any) -> Any:
    return lambda self: [each for each in right(self) if not isinstance(each, Admit)]


def accepts_all(right: Any) -> Any:
    def accept(self: Any, push: Any, read_version: Any) -> Any:
        made = right(self, push, read_version)
        return [Drop(each.push) if isinstance(each, Hold) and push.sequence else each for each in made]

    return accept


def nothing_held(right: Any) -> Any:
    def order(self: Any, steps: Any, servers: Any, cut: Any) -> Any:
        now, held = right(self, steps, servers, cut)
        self.held = []
        return Sequenced([*now, *held], [])

    return order


def cut_before(right: Any) -> Any:
    def order(self: Any, steps: Any, servers: Any, cut: Any) -> Any:
        now, held = right(self, steps, servers, cut)
        cuts = [each for each in now if isinstance(each, CheckpointStep)]
        return Sequenced([*cuts, *[each for each in now if each not in cuts]], held)

    return order


def cut_between(right: Any) -> Any:
    def reduced(self: Any, number: Any, norms: Any, slices: Any, cut: Any) -> Any:
        steps = right(self, number, norms, slices, cut)
        cuts = [each for each in steps or () if isinstance(each, CheckpointStep)]
        return None if steps is None else [*cuts, *[each for each in steps if each not in cuts]]

    return reduced


def ready_at_once(right: Any) -> Any:
    def take_ready(self: Any, workers: Any) -> Any:
        return right(self, frozenset())

    return take_ready


def open_at_once(right: Any) -> Any:
    def attached(self: Any, worker: Any) -> Any:
        right(self, worker)
        self.open = True
        return True

    return attached


def one_step_less(right: Any) -> Any:
    def since(self: Any, position: Any) -> Any:
        steps = right(self, position)
        return steps[1:] if steps else steps

    return since


def event_lost(right: Any) -> Any:
    def hear(self: Any, steps: Any, events: Any, held: Any) -> Any:
        return right(self, steps, list(events)[:-1] if len(events) > 1 else events, held)

    return hear


def told_at_once(right: Any) -> Any:
    """Steps are sent without the events that they follow from."""

    def forward(self: Any, steps: Any = None, held: Any = None) -> Any:
        if steps and any(isinstance(step, ApplyStep) for step in steps):
            self._events = []
        return right(self, steps, held)

    return forward


def keeps_leases(right: Any) -> Any:
    return lambda self, worker: None if worker in self._taken else right(self, worker)


def kept_requests(right: Any) -> Any:
    def attach(self: Any, worker: int, incarnation: int) -> None:
        self.present.attached[worker] = incarnation
        self._answered_before[worker] = 100

    return attach


def wrong_fates(right: Any) -> Any:
    return lambda self, worker, sequence, applied: right(self, worker, sequence, applied=False)


def parts_of_one(right: Any) -> Any:
    def written(self: Any, directory: str, now: float, failed: str | None = None) -> Any:
        if self._making is not None:
            self._making.parts = 1
        return right(self, directory, now, failed)

    return written


_REPLICAS = World("asp", batches=0, steps=2, replicas=1, crashes=1, victims="s")
_CLIPPED = World("bsp", batches=2, clip_norm=1.0)
_CUTS = World("bsp", batches=4, checkpoint_every=1)
_THREE = World("asp", servers=3, batches=0, steps=2, replicas=1, crashes=1, victims="s")

MISTAKES: dict[str, Mistake] = {
    # modes
    "bsp: an update lacks a worker": Mistake(Rounds, "_settle", one_short, World("bsp", batches=2)),
    "bsp+period: only the first batch of a push counts": Mistake(
        LeaseBook, "finish", first_lease_only, World("bsp+period=2", batches=4)
    ),
    "backup: a late push is applied": Mistake(Rounds, "_accept", never_late, World("backup:1", batches=3)),
    "ssp: nobody waits": Mistake(Clocks, "_leads", constant(False), World("ssp:0", batches=4)),
    "ssp+batches: a worker is forgotten": Mistake(
        Machine, "_admit", not_admitted, World("ssp:1+batches=speed", batches=4)
    ),
    "asp: pushes are applied twice": Mistake(Clocks, "_flush", applied_twice, World("asp", batches=4)),
    "asp+quorum: too few are left for a quorum": Mistake(
        Clocks, "_flush", held_by_few, World("asp+quorum=2", batches=3)
    ),
    "asp+damping: a worker is forgotten": Mistake(
        Machine, "_admit", not_admitted, World("asp+damping=dc", batches=4)
    ),
    "downpour: only the first batch of a push counts": Mistake(
        LeaseBook, "finish", first_lease_only, World("downpour:2,2", batches=4)
    ),
    "easgd: only the first batch of a push counts": Mistake(
        LeaseBook, "finish", first_lease_only, World("easgd:2", batches=4)
    ),
    "eamsgd: a worker is forgotten": Mistake(Machine, "_admit", not_admitted, World("eamsgd:1", batches=4)),
    "local: a round waits for workers that rest": Mistake(
        Machine, "rested", waits_for_the_resting, World("local:2", batches=5)
    ),
    "diloco: an update lacks a worker": Mistake(Rounds, "_settle", one_short, World("diloco:2", batches=4)),
    "hogwild: a worker is forgotten": Mistake(Machine, "_admit", not_admitted, World("hogwild", batches=4)),
    "dogwild: pushes are applied twice": Mistake(
        Clocks, "_flush", applied_twice, World("dogwild", batches=4)
    ),
    "allreduce: members stand for themselves": Mistake(
        Groups, "speaks", constant(True), World("allreduce", servers=1, batches=4, groups=((0, 1),))
    ),
    "hybrid: members stand for themselves": Mistake(
        Groups, "speaks", constant(True), World("hybrid:bsp", batches=4, groups=((0, 1),))
    ),
    "sandblaster: pushes are dropped": Mistake(
        WholeEpochs, "_accept", accepts_all, World("sandblaster", batches=3)
    ),
    "a switch of mode forgets workers that wait": Mistake(
        Clocks, "take_over", admits_nobody, World("ssp:0", batches=4, schedule=("1=asp",))
    ),
    # the order
    "second halves are not waited for": Mistake(Sequencer, "order", nothing_held, _CLIPPED),
    "a checkpoint is cut before its update": Mistake(Sequencer, "order", cut_before, _CUTS),
    "a checkpoint is cut between the halves": Mistake(
        Sequencer, "reduced", cut_between, _CLIPPED._replace(checkpoint_every=1)
    ),
    "a checkpoint is committed without a part": Mistake(CheckpointCuts, "part_written", parts_of_one, _CUTS),
    "a placement does not wait for workers": Mistake(
        PlacementChanges, "take_ready", ready_at_once, _REPLICAS._replace(steps=3), walks=300
    ),
    "slices do not wait for their owners": Mistake(
        SliceTransfers, "complete", constant(True), _REPLICAS._replace(steps=3), walks=300
    ),
    "the gate opens for the first worker": Mistake(
        StartGate, "attached", open_at_once, World("bsp", servers=1, batches=2, started=False)
    ),
    "attach: a process inherits what the one before asked": Mistake(
        FollowerMachine, "attach", kept_requests, World("asp", batches=2, replicas=1, started=False)
    ),
    "skip: requests are never answered before": Mistake(
        FollowerMachine, "_is_answered", constant(True), World("asp", batches=2, replicas=1)
    ),
    "owed: a new leader answers no old request": Mistake(
        FollowerMachine, "unheard", constant([]), _REPLICAS, walks=100
    ),
    "catch-up: a follower lacks a step": Mistake(OrderLog, "since", one_step_less, _THREE, walks=300),
    "replay: a follower misses an event": Mistake(
        Standby, "hear", event_lost, World("asp", batches=2, replicas=1)
    ),
    "replay: events are not sent": Mistake(
        RunOrder, "forward", told_at_once, World("asp", batches=2, replicas=1)
    ),
    "leases: those of a dead worker are lost": Mistake(
        LeaseBook, "left", keeps_leases, World("asp", servers=1, batches=2, crashes=1, victims="w"), walks=100
    ),
    "departures: answers go to the next process": Mistake(
        Departures,
        "answers_present",
        constant(True),
        World("asp", replicas=1, crashes=1, victims="w", schedule=("2=bsp",)),
        walks=200,
    ),
    "fates: workers are told that applied pushes are not": Mistake(
        Fates, "decided", wrong_fates, World("asp", batches=2, compress="topk:0.5")
    ),
}
"""By name."""
