"""Placer: which servers take part in the run, and which of them holds which slices.

It follows servers that die, come and go. What it decides becomes a PlaceStep in the run's order.
"""

from paceline.core.decider_state import decider_state_to_json
from paceline.core.json_types import JsonObject
from paceline.core.placement import Placement
from paceline.core.placement_changes import PlacementChanges
from paceline.core.server.accusations import Accusations
from paceline.core.server.lead_actions import (
    EndFollower,
    FailRun,
    LeaveBehind,
    OutgoingActions,
    ReportProgress,
    TakeIn,
    Tell,
    TellUser,
    WriteLog,
)
from paceline.core.server.lead_reports import FullyReplicated, ServerEmptied, ServerUnreachable
from paceline.core.server.lead_settings import LeadSettings
from paceline.core.server.present import Present
from paceline.core.server.run_order import RunOrder
from paceline.core.server.start_gate import StartGate
from paceline.core.server.waits import Waits
from paceline.core.steps import AdmitStep
from paceline.exceptions import LinkError

__all__ = ["Placer"]

_ANNOUNCED = 1000
"""More placements than a leader announces without ordering them."""


class Placer:
    """One owner: the leader, whose other parts it uses.

    Args:
        changes: the placement to come, if servers come or go.
        present: the owner keeps it up to date.
        out: gets the actions that follow.
    """

    def __init__(
        self,
        settings: LeadSettings,
        order: RunOrder,
        changes: PlacementChanges,
        *,
        gate: StartGate,
        waits: Waits,
        present: Present,
        out: OutgoingActions,
    ) -> None:
        self.followers: set[int] = set()
        """Servers that execute the order."""
        self._settings, self._order, self._changes = settings, order, changes
        self._gate, self._waits, self._present, self._out = gate, waits, present, out
        self._accusations = Accusations()
        self._left_behind: set[int] = set()
        """Servers that hold nothing any more; they end when the controller says so."""

    # --- servers that come ------------------------------------------------------------------------

    def newcomer(self, server: int, address: JsonObject) -> None:
        """A server came to a run that goes on. It is being told of the model."""
        self._changes.newcomers[server] = address

    def adopted(self, server: int) -> None:
        """A server holds the model."""
        if server in self._changes.newcomers:
            self._changes.adopted.add(server)
            self._plan()
        else:
            self._gate.adopted(server)

    # --- servers that go --------------------------------------------------------------------------

    def depart(self, server: int) -> None:
        """The controller wants a server to leave. While the gate is closed it waits."""
        if self._gate.open:
            self._changes.departing.add(server)
            self._plan()
        else:
            self._gate.early.departing.add(server)

    def gate_opened(self) -> None:
        """All workers have joined: servers that were to come or to leave before can do so now."""
        self._changes.departing |= self._gate.early.departing
        self._plan()

    def succeed(self, gone: int) -> None:
        """This server leads in the place of one that is gone: other servers answer for its slices."""
        # The placements that the leader before announced may never come, and workers may know of them.
        self._changes.highest = self._present.placement.number + _ANNOUNCED
        placement = self._present.ordered.without(gone)
        if placement is None:
            text = f"{self._settings.name} lost server:{gone}, and no other server has its slices"
            self._out.put(FailRun(LinkError(text)))
        else:
            self._order.place(placement)

    def gone(self, server: int, reason: str) -> bool:
        """The link to another server ended. Returns whether a follower is gone, and the run goes on."""
        if server in self.followers:
            self.followers.discard(server)
            return self._do_without(server, reason)
        if server in self._left_behind:
            self._left_behind.discard(server)
        else:
            self._out.put(WriteLog(f"server:{server} is gone before it held anything: {reason}"))
            self._changes.gone(server)
            self._plan()
        return False

    def _do_without(self, server: int, reason: str) -> bool:
        """Other servers hold copies of its slices, or the run cannot go on."""
        placement = None
        if self._settings.replicates and self._gate.open and self._has_settled_without(server):
            placement = self._present.ordered.without(server)
        if placement is None:
            self._out.put(ReportProgress())  # the last that is known of what is lost
            self._out.put(FailRun(LinkError(f"{self._settings.name} lost server:{server}: {reason}")))
            return False
        self._out.put(WriteLog(f"server:{server}: {reason}; others answer for its slices"))
        self._changes.change = None
        self._changes.settling.discard(server)
        self._order.place(placement)
        self._plan()
        return True

    def _has_settled_without(self, server: int) -> bool:
        """Whether all servers but this one have the slices of the latest placement."""
        settling, present = self._changes.settling, self._present
        return not settling or (settling == {server} and present.placement.number == present.ordered.number)

    # --- the next placement -----------------------------------------------------------------------

    def _plan(self) -> None:
        """Let workers get ready for the servers that there are now."""
        latest, layout, mode = self._present.ordered, self._present.layout, self._present.mode
        if not self._gate.open or layout is None or not self._changes.needed(latest):
            return
        if mode.damping in ("dc", "gap"):
            self._out.put(
                TellUser(
                    f"servers cannot come or go while the run is in mode {mode}: what they need to know "
                    "of every worker's last parameters is not sent. The others go on without them."
                )
            )
            return
        self._changes.plan(layout, latest, self._present.attached)
        self.change_if_ready()

    def ready(self, worker: int, number: int) -> None:
        """A worker is ready for the placement of this number."""
        if self._changes.ready(worker, number):
            self.change_if_ready()

    def change_if_ready(self) -> None:
        """Order the planned placement, if all workers are ready for it and no update is under way."""
        order, changes = self._order, self._changes
        if changes.change is None or order.decider.pushes.holds or order.sequencer.waiting:
            return
        change = changes.take_ready(self._present.attached.keys())
        if change is None:
            return
        order.forward()  # events that the new servers learn from the decider's state
        for server in change.addresses:
            self._take_in(server)
        changes.settling = {*self.followers}
        order.place(change.placement)
        for server in sorted(self.followers - change.placement.servers):
            self._leave_behind(server)

    def _take_in(self, server: int) -> None:
        """A new server follows from here on."""
        owed, decider = self._waits.owed, self._order.decider
        answered = {worker: n - (worker in owed) for worker, n in decider.roster.requests.items()}
        state = decider_state_to_json(decider.state()) if self._settings.replicates else None
        # It may have adopted the model under an earlier placement.
        records = self._order.unwritten if self._settings.replicates else ()
        position = self._order.log.position
        incarnations = dict(decider.roster.incarnations)
        placement = self._present.ordered
        self._out.put(TakeIn(server, position, answered, placement, state, records, incarnations))
        self.followers.add(server)

    def _leave_behind(self, server: int) -> None:
        """A server is not in the placement that was just ordered."""
        self._changes.departing.discard(server)
        self.followers.discard(server)
        self._left_behind.add(server)
        self._out.put(LeaveBehind(server))

    def placed(self, placement: Placement) -> None:
        """This server has come to a placement in the order."""
        self._present.placement = placement
        self._changes.outdated = set(self._present.attached)
        for worker, fetch in self._accusations.settle(placement.servers):
            self.admit(worker, fetch=fetch)

    def placed_on(self, server: int, number: int) -> None:
        """A follower has come to a placement in the order, and has all its slices from there on."""
        if number != self._present.ordered.number:
            return
        settled = self._changes.placed(server, leaves=server in self._left_behind)
        self._let_depart()
        if settled and self._changes.complete(self._present.placement):
            self.tell_whole()

    def _let_depart(self) -> None:
        """Let servers end that hold nothing, when every worker has been told to do without them."""
        if self._gate.open:
            self._changes.release_idle(self._present.ordered)
        speaks = self._order.decider.groups.speaks
        for server in self._changes.free_to_end(self._present.attached.keys(), speaks):
            self._out.put(Tell(ServerEmptied(server)))
            self._changes.departed.discard(server)

    def tell_whole(self) -> None:
        """All slices have all the copies that they should have, if all servers of the placement are here: one
        may have gone before the first step."""
        servers = self._present.placement.servers
        if servers <= self.followers | {self._settings.rank}:
            self._out.put(Tell(FullyReplicated(tuple(sorted(servers)))))

    # --- workers ----------------------------------------------------------------------------------

    def pull(self, worker: int, without: frozenset[int], now: float, *, fetch: bool) -> None:
        """Answer a worker, once the placement does without servers that it cannot reach any more."""
        if lost := without & self._present.placement.servers:
            self._accusations.accuse(worker, lost, now, fetch=fetch)
        else:
            self.admit(worker, fetch=fetch)

    def admit(self, worker: int, *, fetch: bool) -> None:
        """The order answers a worker."""
        version = self._order.decider.version
        self._order.append([AdmitStep(worker, version, None if fetch else "keep")])

    def left(self, worker: int) -> None:
        """A worker is gone."""
        self._accusations.left(worker)
        self._changes.left(worker)

    # --- time -------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Part with servers that workers have not reached for a while; order and end what is ready."""
        for server in sorted(self._accusations.overdue(now) & self.followers):
            self._out.put(EndFollower(server))
            self._out.put(Tell(ServerUnreachable(server)))
        self.change_if_ready()
        self._let_depart()
