"""The machines that decide, event by event, which pushes are applied and who goes on.

A worker's life, as a machine sees it:

    joined ──► computing ──pushed──► waiting ──Admit──► computing ──► … ──left──►
                  │  ▲
           rested ▼  │ woke (or pushed)
                resting

Everything waits through `waiting` alone: joining and waking never do. What holds in every mode,
whatever the order of events:

- a push is applied at most once, and never after its worker left or came back anew, unless the servers
  held it by then; a push that they hold is never dropped;
- only active workers are waited for, that is members that do not rest; a rest that begins while
  its worker waits takes effect when it is admitted;
- a worker that waits, waits for a worker that is computing, so there is always a next event; and pushes are
  held only while a worker is active, so they are applied in the end;
- the slowest active clock never falls, so a member that was once within the bound stays within it.

An event costs a few set operations plus its instructions, and at worst one pass over the members.
"""

import copy
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from paceline.core.modes.mode_spec import ModeSpec

__all__ = [
    "Admit",
    "Apply",
    "Clocks",
    "Drop",
    "Hold",
    "Instruction",
    "Machine",
    "MachineState",
    "PushId",
    "Rounds",
    "WholeEpochs",
]


class PushId(NamedTuple):
    """The name of one push. Sorted, pushes of different workers are in rank order.

    A tuple, because it is hashed and compared many times in every exchange.
    """

    worker: int
    incarnation: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Apply:
    """The mean of these pushes, in this order, is one update: it makes the next version."""

    pushes: tuple[PushId, ...]


@dataclass(frozen=True, slots=True)
class Admit:
    """The worker gets fresh parameters and goes on."""

    worker: int


@dataclass(frozen=True, slots=True)
class Drop:
    """The push is late, repeated, orphaned or from a stranger: it is not applied."""

    push: PushId


@dataclass(frozen=True, slots=True)
class Hold:
    """The servers keep the push for a later Apply, out of its worker's reach, which goes on meanwhile.

    To hold what is held already (its worker sent it again) changes nothing.
    """

    push: PushId


Instruction = Apply | Admit | Drop | Hold


class MachineState(NamedTuple):
    """All that a machine knows, for a follower that begins here. (A checkpoint has less: see `snapshot`.)"""

    version: int
    newest: dict[int, PushId]
    members: set[int]
    active: set[int]
    waiting: set[int]
    tired: set[int]
    pending: dict[int, PushId]
    optimizers: dict[PushId, int]
    held: list[PushId]
    clocks: dict[int, int]
    floor: int
    crowd: dict[int, int]
    mixed: int
    last_mix: dict[int, int]


class Machine(ABC):
    """Who is a member and how far each has come; subclasses decide what a push leads to.

    Every event returns what is to be done about it, in order. Events about strangers are harmless.
    Not thread-safe: one owner feeds it, and carries out what it says before the next event.
    """

    def __init__(self) -> None:
        self._version = 0
        # The newest push seen of each rank. It outlives its worker: a worker that was thought
        # dead and comes back under the same incarnation must not be applied twice.
        self._newest: dict[int, PushId] = {}
        self._members: set[int] = set()
        self._active: set[int] = set()
        self._waiting: set[int] = set()
        # Waiting workers that rest as soon as they are admitted.
        self._tired: set[int] = set()
        # Pushes that are not applied yet; their workers wait.
        self._pending: dict[int, PushId] = {}
        # The optimizers of pending pushes, where the run has several; 0 is left out.
        self._optimizers: dict[PushId, int] = {}
        # Pushes that the servers hold, in order of arrival; their workers need not even be members.
        self._held: dict[PushId, None] = {}
        # Clocks of the members, and of those a snapshot remembers until they join again.
        self._clocks: dict[int, int] = {}
        # The slowest active clock, or the last there was; how many active workers are at each.
        self._floor = 0
        self._crowd: dict[int, int] = {}

    # Events

    def joined(self, worker: int, incarnation: int) -> list[Instruction]:
        """A new member, or a new incarnation of one: what the older did not finish is dropped.

        It starts at the slowest active clock (after a restore: at its own if that is higher), so it
        neither leads nor holds back, and may go on at once. Older news than we have is ignored.
        """
        newest = self._newest.get(worker)
        if newest is None or newest.incarnation < incarnation:
            self._newest[worker] = PushId(worker, incarnation, -1)
        elif newest.incarnation > incarnation or worker in self._members:
            return []
        dropped = self._remove(worker)
        self._members.add(worker)
        self._clocks.setdefault(worker, self._floor)
        self._activate(worker)
        return dropped + self._settle()

    def left(self, worker: int) -> list[Instruction]:
        """The worker is gone. Its pending push is dropped, and no worker waits for it any more."""
        return self._remove(worker) + self._settle()

    def pushed(
        self, push: PushId, read_version: int, *, spent: bool = False, optimizer: int = 0
    ) -> list[Instruction]:
        """A worker has finished a step of an optimizer, which it computed from `read_version`, and waits.

        A push that is `spent` (another worker was first with its samples) is dropped; its worker has made a
        step all the same.

        A push that came before is dropped and its worker admitted, since the first answer may have
        been lost; unless the worker still waits: then its answer is on its way.
        """
        worker = push.worker
        refused = Hold(push) if push in self._held else Drop(push)
        if worker not in self._members or push.incarnation != self._newest[worker].incarnation:
            return [refused]
        if worker in self._waiting:
            return [] if push == self._pending.get(worker) else [refused]
        if push <= self._newest[worker]:
            return [refused, Admit(worker)]
        self._newest[worker] = push
        self._activate(worker)
        if optimizer and not spent:
            self._optimizers[push] = optimizer
        return self._decline(push) if spent else self._accept(push, read_version)

    def rested(self, worker: int) -> list[Instruction]:
        """The worker has nothing to push until it wakes, and is not waited for meanwhile."""
        if worker in self._waiting:
            self._tired.add(worker)
        else:
            self._deactivate(worker)
        return self._settle()

    def woke(self, worker: int) -> list[Instruction]:
        """The worker is active again, at the slowest active clock unless its own is higher."""
        self._tired.discard(worker)
        if worker in self._members:
            self._activate(worker)
        return []

    def switch(self, spec: "ModeSpec") -> tuple["Machine", list[Instruction]]:
        """The machine that goes on from here in another mode, and what is to be done about the change.

        Members, clocks, version, incarnations and newest pushes stay; this machine is not to be used again.
        Nothing that was accepted is lost: what is pending or held is applied, or stays so under the new
        mode's rule. A worker that waits goes on as soon as that rule lets it. Applies come before
        admissions; there may be several.

        A worker that is computing is not disturbed. Going into rounds, its push from an older version comes
        late: like all late ones it is dropped (its leases go back) and its worker goes on from the newest.
        Going under a bound that the clocks exceed, the slowest are lifted as if they had just joined, so that
        the fastest need not wait for what they were free to do.
        """
        machine = spec.machine()
        # Rounds that mixed optimizers are counted anew.
        state = MachineState._make(map(copy.copy, self.state()))
        machine.load_state(state._replace(mixed=0, last_mix={}))
        return machine, machine.take_over()

    # State

    @property
    def version(self) -> int:
        """How many updates have been applied."""
        return self._version

    @property
    def clocks(self) -> dict[int, int]:
        """Steps finished by each worker; after a restore, also of those that are not back yet."""
        return dict(self._clocks)

    @property
    def members(self) -> set[int]:
        """Workers that joined and have not left."""
        return set(self._members)

    @property
    def active(self) -> set[int]:
        """Members that do not rest."""
        return set(self._active)

    @property
    def waiting(self) -> dict[int, set[int]]:
        """Each worker that waits to be admitted, and the workers that it waits for."""
        awaited = self._awaited()
        return {worker: set(awaited) for worker in sorted(self._waiting)}

    def snapshot(self) -> dict[str, Any]:
        """Version and clocks, as JSON. Members and pending pushes are not part of it."""
        clocks = {str(worker): clock for worker, clock in sorted(self._clocks.items())}
        return {"version": self._version, "floor": self._floor, "clocks": clocks}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go on from a snapshot, of any mode, without members: they join again."""
        clocks = {int(worker): clock for worker, clock in snapshot["clocks"].items()}
        self.load_state(
            MachineState(
                version=snapshot["version"],
                newest={},
                members=set(),
                active=set(),
                waiting=set(),
                tired=set(),
                pending={},
                optimizers={},
                held=[],
                clocks=clocks,
                floor=snapshot["floor"],
                crowd={},
                mixed=0,
                last_mix={},
            )
        )

    def state(self) -> MachineState:
        """All that it knows, shared with the machine: encode it before the machine goes on."""
        return MachineState(
            version=self._version,
            newest=self._newest,
            members=self._members,
            active=self._active,
            waiting=self._waiting,
            tired=self._tired,
            pending=self._pending,
            optimizers=self._optimizers,
            held=[*self._held],
            clocks=self._clocks,
            floor=self._floor,
            crowd=self._crowd,
            mixed=0,
            last_mix={},
        )

    def load_state(self, state: MachineState) -> None:
        """The inverse of `state`, for a machine of the same mode."""
        self._version = state.version
        self._newest = state.newest
        self._members = state.members
        self._active = state.active
        self._waiting = state.waiting
        self._tired = state.tired
        self._pending = state.pending
        self._optimizers = state.optimizers
        self._held = dict.fromkeys(state.held)
        self._clocks = state.clocks
        self._floor = state.floor
        self._crowd = state.crowd

    # What a mode decides

    @abstractmethod
    def _accept(self, push: PushId, read_version: int) -> list[Instruction]:
        """Deal with a push that is new, of an active member that does not wait."""

    def _decline(self, push: PushId) -> list[Instruction]:
        """Deal with a push that is new, and of no use."""
        self._step(push.worker)
        return [Drop(push), *self._admit([push.worker])]

    @abstractmethod
    def _settle(self) -> list[Instruction]:
        """Do what has become possible now that a worker is not waited for any more."""

    @abstractmethod
    def _awaited(self) -> set[int]:
        """The workers that those who wait are waiting for."""

    @abstractmethod
    def take_over(self) -> list[Instruction]:
        """Bring what another mode left behind under this mode's rule."""

    # Bookkeeping

    def _apply(self, pushes: Iterable[PushId]) -> Apply:
        self._version += 1
        return Apply(tuple(pushes))

    def _admit(self, workers: Iterable[int]) -> list[Instruction]:
        admitted = sorted(workers)
        self._waiting.difference_update(admitted)
        for worker in admitted:
            if worker in self._tired:
                self._tired.remove(worker)
                self._deactivate(worker)
        return [Admit(worker) for worker in admitted]

    def _remove(self, worker: int) -> list[Instruction]:
        if worker not in self._members:
            return []
        self._deactivate(worker)
        self._members.remove(worker)
        self._waiting.discard(worker)
        self._tired.discard(worker)
        del self._clocks[worker]
        pending = self._pending.pop(worker, None)
        if pending is None:
            return []
        self._optimizers.pop(pending, None)
        return [Drop(pending)]

    def _activate(self, worker: int) -> None:
        if worker not in self._active:
            self._active.add(worker)
            self._clocks[worker] = max(self._clocks[worker], self._floor)
            self._move(None, self._clocks[worker])

    def _deactivate(self, worker: int) -> None:
        if worker in self._active:
            self._active.remove(worker)
            self._move(self._clocks[worker], None)

    def _step(self, worker: int) -> None:
        clock = self._clocks[worker]
        self._clocks[worker] = clock + 1
        self._move(clock, clock + 1)

    def _move(self, before: int | None, after: int | None) -> None:
        """One active worker goes from one clock to another; None is not being active."""
        crowd = self._crowd
        if after is not None:
            crowd[after] = crowd.get(after, 0) + 1
        if before is not None:
            crowd[before] -= 1
            if not crowd[before]:
                del crowd[before]
        if crowd and self._floor not in crowd:
            self._floor = min(crowd)


class Rounds(Machine):
    """bsp and backup: the first pushes of a version, all but `spare`, make the next version.

    A push that was computed from an older version comes too late: it is dropped, and its worker
    goes on from the newest. Without spares a worker that reads when it is told to cannot be late.

    An update is of one optimizer. Workers that run the same script step the optimizers in the same order, so
    all pushes of a round are of one. A worker that has just joined may be at another step of that order:
    then the optimizer with the most pushes (of several such, the one whose push came first) is updated, and
    the other pushes stay pending, so that the workers fall into step.
    """

    def __init__(self, spare: int = 0) -> None:
        super().__init__()
        self._spare = spare
        self.mixed = 0
        """Rounds in a row, up to the last one, whose pushes were of several optimizers."""
        self.last_mix: dict[int, int] = {}
        """The workers of the last such round, and the optimizer that each of them pushed for."""

    def state(self) -> MachineState:
        return super().state()._replace(mixed=self.mixed, last_mix=self.last_mix)

    def load_state(self, state: MachineState) -> None:
        super().load_state(state)
        self.mixed, self.last_mix = state.mixed, state.last_mix

    def _accept(self, push: PushId, read_version: int) -> list[Instruction]:
        if read_version != self._version:
            self._optimizers.pop(push, None)
            self._step(push.worker)
            return [Drop(push), Admit(push.worker)]
        self._pending[push.worker] = push
        self._waiting.add(push.worker)
        return self._settle()

    def _settle(self) -> list[Instruction]:
        made: list[Instruction] = []
        while len(self._pending) >= max(1, len(self._active) - self._spare):
            complete = self._of_one_optimizer()
            for push in complete:
                del self._pending[push.worker]
                self._optimizers.pop(push, None)
                self._step(push.worker)
            made += [self._apply(complete), *self._admit(push.worker for push in complete)]
        return made

    def _of_one_optimizer(self) -> list[PushId]:
        """The pending pushes that make the next update."""
        pushes = sorted(self._pending.values())
        if not self._optimizers:
            self.mixed = 0
            return pushes
        pushed_for = {push.worker: self._optimizers.get(push, 0) for push in self._pending.values()}
        counts = Counter(pushed_for.values())  # in order of arrival
        if len(counts) == 1:
            self.mixed = 0
            return pushes
        self.mixed += 1
        self.last_mix = pushed_for
        most = max(counts, key=lambda optimizer: counts[optimizer])
        return [push for push in pushes if pushed_for[push.worker] == most]

    def _awaited(self) -> set[int]:
        return self._active - self._waiting

    def take_over(self) -> list[Instruction]:
        """Bring what another mode left behind under this mode's rule."""
        # Another round's pushes are of this version still. What clocks held is not, and makes an update.
        held = [self._apply(self._held)] if self._held else []
        self._held.clear()
        return [*held, *self._admit(self._waiting - self._pending.keys()), *self._settle()]


class Clocks(Machine):
    """ssp and asp: every `quorum` pushes are an update; a worker that leads by more than `bound` waits.

    A worker at clock c goes on only if c - (slowest active clock) <= bound (Ho et al., 2013). It does
    not wait for the quorum: the servers hold its push (n-softsync, Zhang et al., 2016), which counts in its
    clock, and even stays in if the worker leaves. So that nothing is held for ever, as many as there
    are active workers suffice.
    """

    def __init__(self, bound: int | None, quorum: int = 1) -> None:
        super().__init__()
        self._bound = bound
        self._quorum = quorum

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go on from a snapshot, of any mode, without members: they join again."""
        super().restore(snapshot)
        self._lift()

    def _accept(self, push: PushId, read_version: int) -> list[Instruction]:
        self._optimizers.pop(push, None)
        self._held[push] = None
        self._step(push.worker)
        admitted: list[Instruction] = []
        if self._leads(push.worker):
            # It was not the slowest then, so no other worker is freed by its step.
            self._waiting.add(push.worker)
        else:
            admitted = self._admit([push.worker, *self._freed()])
        return [*(self._flush() or [Hold(push)]), *admitted]

    def _decline(self, push: PushId) -> list[Instruction]:
        self._step(push.worker)
        if self._leads(push.worker):
            self._waiting.add(push.worker)
            return [Drop(push)]
        return [Drop(push), *self._admit([push.worker, *self._freed()])]

    def _settle(self) -> list[Instruction]:
        # A worker that rests once admitted leaves fewer to wait for, so admissions are decided first.
        admitted = self._admit(self._freed())
        return [*self._flush(), *admitted]

    def _awaited(self) -> set[int]:
        if not self._waiting:
            return set()
        return {worker for worker in self._active if self._clocks[worker] == self._floor}

    def take_over(self) -> list[Instruction]:
        """Bring what another mode left behind under this mode's rule."""
        # Pushes that waited for their round were all computed from this version: none is stale yet.
        instructions: list[Instruction] = []
        for push in sorted(self._pending.values()):
            self._held[push] = None
            self._step(push.worker)
            instructions += self._flush() or [Hold(push)]
        self._pending.clear()
        self._optimizers.clear()
        self._lift()
        admitted = self._admit([worker for worker in self._waiting if not self._leads(worker)])
        admitted += self._admit(self._freed())  # by those who were the slowest, and rest now
        return [*instructions, *self._flush(), *admitted]

    def _flush(self) -> list[Instruction]:
        if not self._held or len(self._held) < min(self._quorum, len(self._active)):
            return []
        update = self._apply(self._held)
        self._held.clear()
        return [update]

    def _lift(self) -> None:
        """Raise the slowest clock until no computing worker leads too far, and no waiting one by over a step.

        Joining and waking never wait, so after a restore or a switch the slowest start high enough for
        the fastest to go on.
        """
        if self._bound is None or not self._clocks:
            return
        fastest = max(clock - (worker in self._waiting) for worker, clock in self._clocks.items())
        if fastest - self._bound <= self._floor:
            return
        self._floor = fastest - self._bound
        for worker in self._active:
            self._clocks[worker] = max(self._clocks[worker], self._floor)
        self._crowd = dict(Counter(self._clocks[worker] for worker in self._active))

    def _leads(self, worker: int) -> bool:
        return self._bound is not None and self._clocks[worker] - self._floor > self._bound

    def _freed(self) -> Iterable[int]:
        # All who wait are at one clock, a step beyond the bound: one of them answers for all.
        if self._waiting and not self._leads(next(iter(self._waiting))):
            return tuple(self._waiting)
        return ()


class WholeEpochs(Machine):
    """sandblaster: every push is held until the epoch is over, if it is of the present version.

    No worker waits here: one that is through with an epoch rests. The leader says when the parameters
    changed, and with that what is held is spent. A push from before comes too late, and is dropped.
    """

    def changed(self) -> None:
        """The parameters are other ones now: this is the next version."""
        self._version += 1

    def _accept(self, push: PushId, read_version: int) -> list[Instruction]:
        self._optimizers.pop(push, None)
        self._step(push.worker)
        taken = Hold(push) if read_version == self._version else Drop(push)
        return [taken, *self._admit([push.worker])]

    def _settle(self) -> list[Instruction]:
        return []

    def _awaited(self) -> set[int]:
        return set()

    def take_over(self) -> list[Instruction]:
        """Bring what another mode left behind under this mode's rule: there is nothing."""
        return []
