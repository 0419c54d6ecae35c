"""A worker of a world: a script whose exchanges are made by the real Client, DirectExchange and Placements.

Between two exchanges a worker is its script's objects, packed. Within one it is those, and the answers so
far.
"""

from typing import Any

from paceline.causes import cause_of
from paceline.comm import Address, Kind
from paceline.comm.worker_messages import AdmitReply
from paceline.core.modes import parse_mode
from paceline.exceptions import PacelineError
from paceline.params import Placement
from paceline.worker.exchange.client import Client
from paceline.worker.exchange.direct_exchange import DirectExchange
from paceline.worker.exchange.payloads import Payloads
from paceline.worker.exchange.placements import Placements
from paceline.worker.exchange.run_news import RequestNumbers, RunNews, new_pull, new_push
from paceline.worker.exchange.server_links import LinkSettings, ServerLink, ServerLinks
from tests.explorer.beginnings import layout_of, place_of
from tests.explorer.links import (
    Blocked,
    ExploredCarrier,
    ExploredLane,
    ExploredMemory,
    Surroundings,
    around,
    computed_from,
    put,
    receive,
)
from tests.explorer.model import CONTROLLER, Broken, Message, Output, Pid, World, message
from tests.explorer.snapshots import canonical, copy_of, packed

__all__ = ["WorkerModel"]


def plain_carrier(link: ServerLink) -> Any:
    return ExploredCarrier("none")


def compressing_carrier(link: ServerLink) -> Any:
    return ExploredCarrier("topk:0.5")


class ToldPayloads(Payloads):
    """Payloads that pass on what becomes of pushes, as encoders would hear it."""

    def hear_fates(self, reply: AdmitReply) -> None:
        if reply.unapplied:
            put(None, message("UNAPPLIED", sequences=list(reply.unapplied)), do="unapplied")


class Script:
    """What a worker's process does: joins, takes leases, pushes, ends. `run` goes on to where it waits."""

    def __init__(self, world: World, pid: Pid) -> None:
        self.world, self.pid = world, pid
        self.stage = "join"
        self.epoch = 0
        self.client: Client | None = None
        self.leases: list[tuple[int, list[int]]] = []
        """Leases that are granted and not read: their numbers, and the samples."""
        self.unsent: list[tuple[int, list[int]]] = []
        """Those that are read, and that no push has covered."""
        self.looked = False
        """Whether it has just found no lease, with steps that no push has covered."""
        self.fetched_ago = 0
        self.made = 0
        """Steps, without a loader."""

    @property
    def mode(self) -> Any:
        assert self.client is not None
        return self.client.news.mode

    def advance(self) -> None:
        """One stage."""
        getattr(self, f"_{self.stage}")()

    # --- joining ----------------------------------------------------------------------------------

    def _join(self) -> None:
        """See Entry.offer, Entry.attach and JoinedRun."""
        world, pid = self.world, self.pid
        put(CONTROLLER, message("JOINED"))
        start = receive(CONTROLLER).body
        settings = LinkSettings(
            rank=pid.rank, incarnation=pid.incarnation, secret=b"", deadline_s=1e9, patience_s=1e9
        )
        lead = Pid(*start["lead"])
        mode = parse_mode(world.mode)
        address = Address.from_json(place_of(lead))
        lane: Any = ExploredLane()
        links = ServerLinks(settings, mode, lead=lead.rank, address=address, lane=lane)
        first: Any = links.lead.connection
        first.send(Kind.OFFER, {})
        body = first.receive().body
        placement = Placement.from_json(body["placement"])
        links.replicated = body["replicated"]
        for rank in sorted(placement.servers - {lead.rank}):
            links.reach(rank, Address.from_json(body["servers"][str(rank)]))
        links.carry_with(plain_carrier if world.compress == "none" else compressing_carrier)
        layout = layout_of(world)
        memory: Any = ExploredMemory(layout)
        news, numbers = RunNews(parse_mode(body["mode"])), RequestNumbers()
        every = frozenset(piece.index for piece in layout.slices)
        direct = DirectExchange(
            links,
            memory,
            Placements(links, layout, placement),
            ToldPayloads(links, memory, [every], None),
            news,
            numbers,
            listens=None,
            spin_s=0.0,
            rest=int,
        )
        direct.attach_all()
        if pid.incarnation and len(links.each) > 1:
            direct.exchange(new_pull())
        self.client = Client(direct)
        self.epoch = body["epoch"]
        self.stage = "take" if world.batches else "step"
        if self.epoch >= world.epochs:
            self.stage = "finish"

    def _flush(self) -> None:
        """Push the steps that no push has covered."""
        covered, self.unsent, self.stage = self.unsent, [], "take"
        self._push(covered)
        self.looked = False

    # --- the loop ---------------------------------------------------------------------------------

    def _take(self) -> None:
        """See LeasedData.take."""
        client, world = self.client, self.world
        assert client is not None
        carry = [number for number, _ in self.unsent]
        # Nothing waits for a push of the next epoch: what is unsent is pushed before a worker rests.
        flushes = self.mode.local and bool(self.unsent) and not self.looked
        grant = client.take(self.epoch, 1, wait=not flushes, carry=() if flushes else carry)
        self.looked = flushes and not grant.leases
        if self.looked:
            self.stage = "flush"
            return
        self._after(save=grant.save)
        if self.stage != "take":
            return
        if grant.leases:
            for number, ranges in grant.leases:
                at = [self.epoch * world.batches + i for a, b in ranges for i in range(a, b)]
                self.leases.append((number, at))
            self.stage = "train"
        elif grant.over:
            self.epoch += 1
            if self.epoch >= world.epochs or client.news.stop_due:
                self.stage = "finish"

    def _train(self) -> None:
        """A step of the script."""
        lease, self.leases = self.leases[0], self.leases[1:]
        covered = [*self.unsent, lease]
        self.stage = "train" if self.leases else "take"
        if self._is_due(len(covered)):
            self.unsent = []
            self._push(covered)
        else:
            self.unsent = covered

    def _is_due(self, steps: int) -> bool:
        return bool(self.mode.own_threads or steps >= self.mode.push_every)

    @property
    def _mates(self) -> list[Pid]:
        """The workers of this one's group, the root first; only this one, if the mode has no groups."""
        group = next((group for group in self.world.groups if self.pid.rank in group), (self.pid.rank,))
        return [Pid("w", rank, self.pid.incarnation) for rank in sorted(group)]

    def _step(self) -> None:
        """A step of a script without a loader."""
        self.made += 1
        if self.made == self.world.steps:
            self.stage = "finish"
        self._push([])

    def _push(self, covered: list[tuple[int, list[int]]]) -> None:
        """See StepExchange and the steppers. In a group the root pushes when it has all gradients."""
        root, *others = self._mates
        if root != self.pid:
            put(root, message("PART"))
            receive(root)
            self._after()
            return
        for mate in others:
            receive(mate)
        self._push_own(covered)
        for mate in others:
            put(mate, message("STEP"))

    def _push_own(self, covered: list[tuple[int, list[int]]]) -> None:
        client = self.client
        assert client is not None
        mode = self.mode
        positions = [at for _, many in covered for at in many]
        push = new_push()
        push.samples, push.leases = len(positions) or 1, tuple(number for number, _ in covered)
        computed_from(positions)
        self.fetched_ago += mode.push_every
        fetch = (
            not (mode.needs_memory or mode.serverless or mode.by_epoch)
            and self.fetched_ago >= mode.fetch_every
        )
        if fetch:
            self.fetched_ago = 0
        if mode.serverless:
            push.carries = "parameters" if client.news.cut_next else "nothing"
        number = client.numbers.sequence
        client.exchange(push, fetch=fetch)
        put(None, message("PUSHED", push=[*self.pid[1:], number]), do="acknowledged")
        self._after()

    def _after(self, *, save: bool = False) -> None:
        client = self.client
        assert client is not None
        if save or client.save_due():
            client.settle()
            client.save({}, 0)
        if client.news.leave_due:
            self.stage = "finish"

    def _finish(self) -> None:
        """See RunSession.finish."""
        client = self.client
        assert client is not None
        if self.unsent and self._is_due(self.mode.push_every):
            covered, self.unsent = self.unsent, []
            self._push(covered)
            return
        client.settle()
        client.save({}, 0)
        client.bye()
        put(CONTROLLER, message("FINISHED"))
        put(None, message("EXIT"), do="exit")
        self.stage = "done"

    def fail(self, error: PacelineError) -> None:
        """See run_worker: it reports its error, and ends."""
        cause = cause_of(error).value
        put(CONTROLLER, message("ERROR", cause=cause, error=type(error).__name__, message=str(error)))
        put(None, message("EXIT"), do="exit")
        self.stage = "done"


class WorkerModel:
    """One worker process."""

    def __init__(self, world: World, pid: Pid) -> None:
        self.pid = pid
        self.script = packed(Script(world, pid))
        self.script_form = canonical(copy_of(self.script))
        self.inputs: tuple[Message, ...] = ()
        self.sent = 0
        """Messages that the present stage has sent."""
        self.wants: tuple[str, Pid] | None = None
        self.has_joined = False

    @property
    def form(self) -> Any:
        """Equal for workers that will do the same."""
        return (self.script_form, self.inputs, self.wants)

    def handle(self, source: Pid | None, received: Message) -> list[Output]:
        """Go on with what it was waiting for. (`source` None: begin.)"""
        if source is not None:
            self.inputs = (*self.inputs, received)
        outputs: list[Output] = []
        while True:
            script: Script = copy_of(self.script)
            here = Surroundings(self.pid, self.inputs)
            around(here)
            try:
                script.advance()
            except Blocked as blocked:
                self.wants = blocked.wants
                outputs += here.outputs[self.sent :]
                self.sent = len(here.outputs)
                return outputs
            except Broken:
                raise
            except PacelineError as error:
                script.fail(error)
            if here.inputs:
                raise Broken(f"{self.pid} got {here.inputs[0]}, and expected nothing")
            outputs += here.outputs[self.sent :]
            self.script, self.inputs, self.sent, self.wants = packed(script), (), 0, None
            self.script_form = canonical(script)
            self.has_joined = True
            if script.stage == "done":
                return outputs
