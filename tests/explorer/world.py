"""A world as a graph: its states, the events that may come next in each, and what must hold."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from paceline.core.run_decisions import RunState
from tests.explorer.beginnings import Disk, contents_from_json
from tests.explorer.controllers import ControllerModel
from tests.explorer.links import ACCEPTED, REFUSED
from tests.explorer.model import CONTROLLER, END, Broken, Message, Output, Pid, World, message
from tests.explorer.servers import ServerModel
from tests.explorer.snapshots import canonical, copy_of, packed
from tests.explorer.workers import WorkerModel

__all__ = ["Event", "Explored", "State"]

TIMER = message("TICK")
WORK = message("WORK")


class Event(NamedTuple):
    """What may come next."""

    what: str
    """`deliver` a message, `refuse` or `accept` a connection, `work` of a thread, `timer`, `crash`."""
    of: Pid
    source: Pid | None = None
    kept: int = -1
    """The process dies when it has sent so many of the messages that follow; -1: it lives."""

    def __str__(self) -> str:
        source = "" if self.source is None else f" {self.source} →"
        dies = "" if self.kept < 0 else f", which dies when {self.kept} of what follows is sent"
        return f"{self.what}{source} {self.of}{dies}"


class State(NamedTuple):
    """All processes by their number in the table of forms, and all messages on their way."""

    processes: tuple[tuple[Pid, int], ...]
    channels: tuple[tuple[Pid, Pid, tuple[Message, ...]], ...]
    crashes: int = 0
    acknowledged: frozenset[tuple[int, int, int]] = frozenset()
    unapplied: frozenset[tuple[int, int, int]] = frozenset()
    """Pushes of which their workers were told that they are not applied."""
    disk: Message | None = None
    over: bool = False


class Facts(NamedTuple):
    """What the graph must know of a process."""

    wants: tuple[str, Pid] | None = None
    """A worker: what it waits for."""
    joined: bool = True
    """A worker: whether it has joined the run."""
    work: bool = False
    """A leader: a thread of it has something to do. A controller: it waits for a cause."""
    leads: bool = False
    leader: Pid | None = None
    """A follower: the leader that it has a link to."""
    knows: int | None = None
    """The form of its decider."""
    followers: tuple[Pid, ...] = ()
    """A leader: servers that execute the order."""
    unsent: bool = False
    """A leader: whether followers have not heard of all events."""
    takes_part: bool = True
    """A server: whether it executes the order."""
    state: RunState | None = None
    """The controller's."""


class Explored:
    """One world: what follows from every event in every state, computed once for equal processes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.transitions = 0
        self._numbers: dict[Any, int] = {}
        self._packed: list[bytes] = []
        self._facts: list[Facts] = []
        self._known: dict[tuple[int, Pid | None, Message], tuple[int, tuple[Output, ...]] | str] = {}
        self._spawned: dict[Any, tuple[int, tuple[Output, ...]]] = {}

    # --- processes --------------------------------------------------------------------------------

    def _number(self, process: Any) -> int:
        if isinstance(process, WorkerModel):
            form = process.form
        else:
            process.outputs = []
            form = canonical(process)
        number = self._numbers.get(form)
        if number is None:
            number = self._numbers[form] = len(self._packed)
            self._packed.append(packed(process))
            self._facts.append(self._facts_of(process))
        return number

    def _facts_of(self, process: Any) -> Facts:
        if isinstance(process, WorkerModel):
            return Facts(wants=process.wants, joined=process.has_joined)
        if isinstance(process, ControllerModel):
            return Facts(work=process.waits_for_cause, state=process.state)
        server: ServerModel = process
        decider, knows = server.decider, None
        if decider is not None and self.world.replicas:
            form = canonical(decider.state())
            knows = self._numbers.setdefault(("decider", form), -len(self._numbers))
        return Facts(
            work=bool(server.io),
            leads=server.lead is not None,
            leader=server.leader,
            knows=knows,
            takes_part=server.takes_part,
            followers=tuple(server.followers.values()),
            unsent=server.lead is not None and bool(server.lead.order.unsent),
        )

    def _step(self, number: int, source: Pid | None, received: Message) -> tuple[int, tuple[Output, ...]]:
        """What a process becomes, and what it does."""
        key = (number, source, received)
        known = self._known.get(key)
        if known is None:
            process = copy_of(self._packed[number])
            try:
                outputs = process.handle(source, received)
                known = self._number(process), tuple(outputs)
            except Broken as broken:
                known = str(broken)
            except Exception as error:
                known = f"{type(error).__name__}: {error}"
            self._known[key] = known
        if isinstance(known, str):
            raise Broken(known)
        return known

    # --- the first state --------------------------------------------------------------------------

    def first(self) -> State:
        controller = ControllerModel(self.world)
        outputs = controller.begin()
        draft = _Draft(State(((CONTROLLER, self._number(controller)),), ()))
        self._do(draft, CONTROLLER, outputs)
        state, transitions = draft.state(), self.transitions
        while self.world.started and not self._has_started(state):
            state = self.next(state, self.living(state)[0])
        self.transitions = transitions
        return state

    def _has_started(self, state: State) -> bool:
        idle = not any(CONTROLLER in (source, to) for source, to, _ in state.channels)
        return idle and all(self._facts[number].joined for _, number in state.processes)

    def _spawn(self, draft: "_Draft", pid: Pid, how: Message) -> None:
        fresh, disk = how.kind == "FRESH", draft.disk
        key = (pid, how, disk if pid.role == "s" and not fresh else None)
        if key not in self._spawned:
            made: Any
            if pid.role == "w":
                made = WorkerModel(self.world, pid)
                outputs = made.handle(None, message("BEGIN"))
            else:
                saved = None
                if disk is not None and not fresh:
                    saved = Disk(disk.body["lead"], contents_from_json(disk.body["contents"]))
                made = ServerModel(self.world, pid, disk=saved, fresh=fresh)
                outputs = [*made.outputs]
                if fresh:
                    outputs = [Output(CONTROLLER, message("READY"))]
            self._spawned[key] = self._number(made), tuple(outputs)
        draft.processes[pid], outputs = self._spawned[key]
        self._do(draft, pid, outputs)

    # --- events -----------------------------------------------------------------------------------

    def events(self, state: State) -> list[Event]:
        """What may come next, deaths among it."""
        found = self.living(state)
        if state.crashes < self.world.crashes and not state.over:
            found = [*found, *self._crashes(state, found)]
        return found

    def living(self, state: State) -> list[Event]:
        """What may come next without a death. A worker that has its answer goes first: see `__init__`."""
        if state.over:
            return []
        processes = dict(state.processes)
        found: list[Event] = []
        waiting = {(source, to) for source, to, _ in state.channels}
        for pid, number in state.processes:
            wants = self._facts[number].wants if pid.role == "w" else None
            if wants is None:
                continue
            if wants[0] == "connect":
                found.append(Event("accept" if wants[1] in processes else "refuse", pid, wants[1]))
            elif (wants[1], pid) in waiting:
                return [Event("deliver", pid, wants[1])]
        for source, to, messages in state.channels:
            if to.role == "w":
                continue
            if messages[0].kind == "OFFER" and (CONTROLLER, to) in waiting:
                continue  # the controller has told the server that leads now before it told the worker
            if source.incarnation and any((older, to) in waiting for older in _earlier(source)):
                continue  # what the process before it had sent was there long before it came
            facts = self._facts[processes[to]]
            if source == CONTROLLER and facts.leader is not None and facts.leader not in processes:
                continue  # it reads first what the leader before has sent
            found.append(Event("deliver", to, source))
        for pid, number in state.processes:
            if pid.role == "s" and self._facts[number].work:
                found.append(Event("work", pid))
        if not found:  # timers are long: all that is on its way arrives before
            found = [Event("timer", pid) for pid, number in state.processes if self._has_timer(pid, number)]
        return found

    def _has_timer(self, pid: Pid, number: int) -> bool:
        """Whether something follows from a wait that is over."""
        facts = self._facts[number]
        if not (facts.work if pid == CONTROLLER else facts.leads):
            return False
        try:
            after, outputs = self._step(number, None, TIMER)
        except Broken:
            return True
        return after != number or bool(outputs)

    def _crashes(self, state: State, living: list[Event]) -> Iterator[Event]:
        """A process dies now, or when it has sent a part of what follows from an event."""
        for pid, _ in state.processes:
            if pid.role in self.world.victims:
                yield Event("crash", pid)
        for event in living:
            if event.of.role in self.world.victims and event.what != "timer":
                for kept in range(1, len(self._outputs(state, event))):
                    yield event._replace(kept=kept)

    def _outputs(self, state: State, event: Event) -> tuple[Output, ...]:
        try:
            return self._step(*self._input(_Draft(state), event))[1]
        except Broken:
            return ()

    def _input(self, draft: "_Draft", event: Event) -> tuple[int, Pid | None, Message]:
        number = draft.processes[event.of]
        if event.what == "deliver":
            assert event.source is not None
            return number, event.source, draft.take(event.source, event.of)
        if event.what in ("accept", "refuse"):
            return number, event.source, ACCEPTED if event.what == "accept" else REFUSED
        return number, None, TIMER if event.what == "timer" else WORK

    def next(self, state: State, event: Event) -> State:
        """The state that follows. Raises Broken."""
        self.transitions += 1
        draft = _Draft(state)
        if event.what == "crash":
            draft.crashes += 1
            self._end(draft, event.of, died=True)
            return draft.state()
        number, outputs = self._step(*self._input(draft, event))
        draft.processes[event.of] = number
        if event.kept >= 0:
            draft.crashes += 1
            self._do(draft, event.of, outputs[: event.kept])
            self._end(draft, event.of, died=True)
        else:
            self._do(draft, event.of, outputs)
        following = draft.state()
        self._check(following)
        return following

    def _do(self, draft: "_Draft", pid: Pid, outputs: Any) -> None:
        for to, sent, do in outputs:
            if not do:
                draft.put(pid, to, sent)
            elif do == "spawn":
                self._spawn(draft, to, sent)
            elif do == "kill":
                if to in draft.processes:
                    self._end(draft, to, died=sent.kind == "KILL")
                    if sent.kind == "STOP":
                        draft.put(to, CONTROLLER, message("EXITED"))
            elif do == "exit":
                self._end(draft, pid, died=False)
            elif do == "restart":
                draft.processes = {CONTROLLER: draft.processes.get(CONTROLLER, 0)}
                draft.channels = {}
                draft.acknowledged = draft.unapplied = frozenset()
            elif do == "commit":
                draft.disk = sent
            elif do == "acknowledged":
                draft.acknowledged |= {tuple(sent.body["push"])}
            elif do == "unapplied":
                draft.unapplied |= {(pid.rank, pid.incarnation, each) for each in sent.body["sequences"]}
            elif do == "over":
                draft.over = True

    def _end(self, draft: "_Draft", pid: Pid, *, died: bool) -> None:
        """A process ends: what it sent still comes, and then the ends of its links."""
        draft.processes.pop(pid, None)
        for key in [key for key in draft.channels if key[1] == pid]:
            del draft.channels[key]
        for other in draft.processes:
            if other == CONTROLLER:
                if died:
                    draft.put(pid, other, END)
            elif other.role == "s" or pid.role == "s":
                draft.put(pid, other, END)

    # --- what must hold ---------------------------------------------------------------------------

    def _check(self, state: State) -> None:
        facts = {pid: self._facts[number] for pid, number in state.processes}
        if (run := facts[CONTROLLER].state) in (RunState.FAILED, RunState.STOPPED):
            controller = copy_of(self._packed[dict(state.processes)[CONTROLLER]])
            raise Broken(f"the run fails: {controller.machine.error}")
        if state.over:
            self._check_end(state)
            return
        assert run is not None
        if self.world.replicas:
            self._check_followers(state, facts)

    def _check_followers(self, state: State, facts: dict[Pid, Facts]) -> None:
        """A follower that has heard all that its leader said knows the same."""
        channels = {(source, to) for source, to, _ in state.channels}
        for pid, each in facts.items():
            if each.leader is None or (lead := facts.get(each.leader)) is None or not lead.leads:
                continue
            if (each.leader, pid) in channels or (pid, each.leader) in channels or lead.unsent:
                continue
            heard = each.takes_part and pid in lead.followers
            if heard and each.knows is not None and each.knows != lead.knows:
                raise Broken(
                    f"{pid} has heard all that {each.leader} said, and its decider knows something else"
                )

    def _check_end(self, state: State) -> None:
        """Every sample is applied exactly once, and nothing that was acknowledged is lost."""
        if state.disk is None:
            raise Broken("the run ends without a checkpoint")
        saved = state.disk.body
        wanted = set(range(self.world.batches * self.world.epochs))
        held = {
            f"slice {i} of the last checkpoint": each
            for i, each in contents_from_json(saved["contents"]).items()
        }
        dropped: set[tuple[int, ...]] = set()
        leads = [(pid, self._facts[number]) for pid, number in state.processes if self._facts[number].leads]
        ordered = {each for pid, facts in leads for each in (pid, *facts.followers)}
        for pid, number in state.processes:
            server: ServerModel = copy_of(self._packed[number])
            if pid.role != "s" or pid not in ordered:
                continue
            dropped |= {(p.worker, p.incarnation, p.sequence) for p in server.shard.dropped}
            for i in server.shard.placement.held(server.rank):
                held[f"slice {i} of {pid}"] = server.shard.contents[i]
        for where, content in held.items():
            names = {each[:3] for each in content.pushes}
            applied = {at for each in content.pushes for at in each[3]}
            if applied != wanted and self.world.max_updates is None:
                raise Broken(
                    f"at the end {where} is made of the samples {sorted(applied)} of {sorted(wanted)}"
                )
            if wrong := state.unapplied & names:
                raise Broken(
                    f"the pushes {sorted(wrong)} are applied, and their workers were told that they are not"
                )
            lost = state.acknowledged - names - dropped
            if lost and (self.world.replicas or not state.crashes):
                raise Broken(f"at the end {where} lacks the pushes {sorted(lost)}, which were acknowledged")

    def check_stuck(self, state: State) -> None:
        """A state in which nothing may come next must be the end."""
        if state.over:
            return
        waits = []
        for pid, number in state.processes:
            if (wants := self._facts[number].wants) is not None:
                waits.append(f"{pid} waits for {wants[1]}")
        raise Broken(f"nothing can happen any more: {', '.join(waits) or 'the run does not end'}")


def _earlier(pid: Pid) -> Iterator[Pid]:
    """The processes in whose place one came."""
    return (pid._replace(incarnation=number) for number in range(pid.incarnation))


class _Draft:
    """A state in the making."""

    def __init__(self, state: State) -> None:
        self.processes = dict(state.processes)
        self.channels = {(source, to): messages for source, to, messages in state.channels}
        self.crashes, self.acknowledged, self.unapplied, self.disk, self.over = state[2:]

    def take(self, source: Pid, to: Pid) -> Message:
        first, *rest = self.channels[source, to]
        if rest:
            self.channels[source, to] = tuple(rest)
        else:
            del self.channels[source, to]
        return first

    def put(self, source: Pid, to: Pid, sent: Message) -> None:
        if to in self.processes:
            self.channels[source, to] = (*self.channels.get((source, to), ()), sent)

    def state(self) -> State:
        return State(
            tuple(sorted(self.processes.items())),
            tuple(sorted([(source, to, messages) for (source, to), messages in self.channels.items()])),
            self.crashes,
            self.acknowledged,
            self.unapplied,
            self.disk,
            self.over,
        )
