"""Shard: what a server holds and has queued, with sets of pushes in the place of tensors.

It follows `ps/executor.py` line by line where that has tensors; whether a step can be executed, and which
slices change hands, is decided by the core (`step_needs`, `slice_transfers`), as it is there.
"""

import collections
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, assert_never

from paceline.core.modes import PushId, parse_mode
from paceline.core.modes.lbfgs import Answer, num_answers
from paceline.core.placement import Placement
from paceline.core.server.departures import Departures
from paceline.core.server.slice_transfers import SliceTransfers
from paceline.core.server.step_needs import can_execute
from paceline.core.steps import (
    AddStep,
    AdmitStep,
    ApplyStep,
    AskStep,
    AssignStep,
    CheckpointStep,
    CommitStep,
    DropStep,
    HoldStep,
    LeaveStep,
    LoadStep,
    ModeStep,
    PlaceStep,
    ReduceStep,
    Step,
    VectorsStep,
)
from tests.explorer.model import Broken

__all__ = ["Contents", "Peer", "Pushed", "Shard", "Slice"]

Entry = tuple[int, int, int, tuple[int, ...]]
"""A push that is applied: worker, incarnation, sequence, and the positions of its samples."""


@dataclass
class Slice:
    """A slice: the pushes that its parameters were made of."""

    version: int = 0
    pushes: frozenset[Entry] = frozenset()

    def add(self, entries: list[Entry]) -> None:
        for entry in entries:
            positions = {at for each in self.pushes for at in each[3]}
            if any(entry[:3] == each[:3] for each in self.pushes):
                raise Broken(f"the push {entry[:3]} is applied twice")
            if again := positions & set(entry[3]):
                raise Broken(f"the samples {sorted(again)} are applied twice, now by the push {entry[:3]}")
            self.pushes |= {entry}


Contents = dict[int, Slice]


@dataclass
class Peer:
    """A worker that is attached."""

    incarnation: int
    needs_fates: bool = False
    told: int = 0


@dataclass
class Pushed:
    """A push that is here."""

    peer: Peer
    positions: tuple[int, ...]
    read_version: int
    void: bool = False
    held: bool = False


@dataclass
class Shard:
    """Executes the order."""

    rank: int
    mode: str
    placement: Placement
    contents: Contents
    peers: dict[int, Peer] = field(default_factory=dict)
    queue: "collections.deque[Step]" = field(default_factory=collections.deque)
    pushed: dict[PushId, Pushed] = field(default_factory=dict)
    reduced: int | None = None
    reducing: list[Entry] = field(default_factory=list)
    sum: frozenset[Entry] = frozenset()
    """Sandblaster: what is in the sum of the epoch."""
    transfers: "SliceTransfers[Contents]" = field(default_factory=SliceTransfers)
    departures: Departures = field(default_factory=Departures)
    dropped: set[PushId] = field(default_factory=set)

    def receive(self, push: PushId, pushed: Pushed) -> None:
        """See Attachments.receive_push."""
        self.forget_pushes(pushed.peer)
        self.pushed[push] = pushed

    def forget_pushes(self, peer: Peer) -> None:
        """Forget what a worker pushed, but for what is held."""
        for push in [p for p, each in self.pushed.items() if each.peer is peer and not each.held]:
            del self.pushed[push]

    def execute(self, admit: Callable[[int, AdmitStep], None]) -> Iterator[tuple[str, Any]]:
        """Execute what is due. Yields what follows from it, as (what, facts)."""
        while self.queue:
            step = self.queue[0]
            if isinstance(step, PlaceStep):
                yield from self._gifts(step.placement)
            ready = can_execute(
                step, pushes=self.pushed, loads=(), workers=self.peers, has_slices=self._has_slices
            )
            if not ready:
                return
            self.queue.popleft()
            yield from self._one(step, admit)

    def _has_slices(self, placement: Placement) -> bool:
        return self.transfers.complete(self.placement, placement, self.rank)

    def _gifts(self, placement: Placement) -> Iterator[tuple[str, Any]]:
        for other, due in self.transfers.due(self.placement, placement, self.rank):
            slices = {i: Slice(self.contents[i].version, self.contents[i].pushes) for i in due}
            yield "slices", (other, placement.number, slices)

    def _one(self, step: Step, admit: Callable[[int, AdmitStep], None]) -> Iterator[tuple[str, Any]]:
        match step:
            case AdmitStep(worker, version):
                if worker in self.peers and self.departures.answers_present(worker):
                    self._check_version(version)
                    admit(worker, step)
            case DropStep(push):
                self.pushed.pop(push, None)
                self.dropped.add(push)
            case LeaveStep(worker, incarnation):
                self.departures.left(worker, incarnation)
                for push in [p for p in self.pushed if (p.worker, p.incarnation) == (worker, incarnation)]:
                    if not self.pushed[push].held:
                        del self.pushed[push]
                peer = self.peers.get(worker)
                if peer is not None and peer.incarnation == incarnation:
                    yield "forgotten", worker
            case ModeStep(text):
                self.mode = text
                yield "mode", parse_mode(text)
            case PlaceStep(placement):
                self._place(placement)
                yield "placed", placement
            case CheckpointStep(version, directory):
                self._check_version(version)
                if self.reduced is not None:
                    raise Broken("a checkpoint is cut between the halves of an update")
                owned = self.placement.owned(self.rank)
                yield "snapshot", (directory, {i: self.contents[i] for i in owned})
            case ReduceStep(pushes, number):
                self.reducing, self.reduced = self._entries(pushes), number
                yield "reduced", (number, [(i, 1.0) for i in self.placement.held(self.rank)])
            case CommitStep():
                if self.reduced is None:
                    raise Broken("a second half of an update without a first")
                self.reduced = None
                self._apply(self.reducing)
                self.reducing = []
            case HoldStep(push):
                if (here := self.pushed.get(push)) is not None:
                    here.held = True
            case AddStep(pushes):
                added = Slice(0, self.sum)
                added.add(self._entries(pushes))
                self.sum = added.pushes
            case AskStep(ops):
                answers: list[Answer] = [1.0] * num_answers(ops)
                yield "answers", answers
            case VectorsStep():
                entries, self.sum = sorted(self.sum), frozenset()
                self._apply(entries)
            case ApplyStep(pushes):
                self._apply(self._entries(pushes))
            case AssignStep(push):
                self.pushed.pop(push, None)
            case LoadStep():
                raise Broken("nobody gave an optimizer state")
            case _:
                assert_never(step)

    def _check_version(self, version: int) -> None:
        for i in self.placement.owned(self.rank):
            if self.contents[i].version != version:
                raise Broken(
                    f"server:{self.rank} has slice {i} at version {self.contents[i].version}, not {version}"
                )

    def _entries(self, pushes: tuple[Any, ...]) -> list[Entry]:
        found: list[Entry] = []
        spec = parse_mode(self.mode)
        for push in pushes:
            name = PushId(*push[:3])
            pushed = self.pushed.pop(name, None)
            if pushed is None:
                raise Broken(
                    f"server:{self.rank} executes an update without the push {tuple(name)}, which never came"
                )
            held = self.placement.held(self.rank)
            if spec.spare is not None and held and pushed.read_version != self.contents[held[0]].version:
                raise Broken(
                    f"in {self.mode} the push {tuple(name)} of version {pushed.read_version} makes an "
                    f"update of version {self.contents[held[0]].version}"
                )
            found.append((*name, pushed.positions))
        return found

    def _apply(self, entries: list[Entry]) -> None:
        for i in self.placement.held(self.rank):
            self.contents[i].version += 1
            self.contents[i].add(entries)

    def _place(self, placement: Placement) -> None:
        before, self.placement = self.placement, placement
        arrived = self.transfers.take(placement.number)
        if before.held(self.rank) == placement.held(self.rank):
            return
        kept = {i: each for i, each in self.contents.items() if i in placement.held(self.rank)}
        for slices in arrived:
            kept.update(slices)
        if missing := set(placement.held(self.rank)) - set(kept):
            raise Broken(f"server:{self.rank} answers for slices {sorted(missing)} that it never got")
        self.contents = kept
