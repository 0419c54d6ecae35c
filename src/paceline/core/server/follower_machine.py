"""FollowerMachine: what a server that follows knows and decides, without sockets, clocks or tensors.

A follower executes the order that the leader sends. It answers a worker when the order says so, and keeps the
worker's request until then: if the leader dies, the next leader may not have heard of it.

A server that joins later takes part from a position in the order on. Requests that the order answered before
that position get no answer from this server.
"""

from collections.abc import Mapping, Sequence

from paceline.core.events import Event
from paceline.core.json_types import Json
from paceline.core.layout import Layout
from paceline.core.modes.mode_spec import ModeSpec
from paceline.core.placement import Placement
from paceline.core.sequencer import OrderLog
from paceline.core.server.present import Present
from paceline.core.server.standby import Standby
from paceline.core.server.worker_requests import (
    AssignRequest,
    OrderedRequest,
    PullRequest,
    PushRequest,
    WorkerRequest,
)
from paceline.core.steps import AdmitStep, PlaceStep, ReduceStep, Steps

__all__ = ["FollowerMachine"]

_ORDERED = (PushRequest, PullRequest, AssignRequest)


class FollowerMachine:
    """One owner: a follower's process.

    Args:
        log: the steps of the order that this server has heard of.
    """

    def __init__(self, present: Present, log: OrderLog) -> None:
        self.present = present
        self.log = log
        self.standby: Standby | None = None
        """None without replicas, or before there is a model."""
        self.takes_part = False
        """Whether this server executes the order. One that comes to a run which goes on waits to."""
        self.leader = 0
        """The server that leads, or led last."""
        self._leaderless_since: float | None = None
        self._answered_before: dict[int, int] = {}
        """Number of each worker's last request that was answered before this server took part."""
        self._unanswered: dict[int, WorkerRequest] = {}
        """The last request of each worker, until it is answered."""

    # --- the model --------------------------------------------------------------------------------

    def adopt(
        self,
        layout: Layout,
        placement: Placement,
        optimizers: int,
        standby: Standby | None,
        *,
        takes_part: bool,
    ) -> None:
        """This server holds its part of the model.

        Args:
            takes_part: whether it executes the order from its beginning on.
        """
        present = self.present
        present.layout, present.placement, present.optimizers = layout, placement, optimizers
        self.standby = standby
        self.takes_part = takes_part

    # --- workers ----------------------------------------------------------------------------------

    def attach(self, worker: int, incarnation: int) -> None:
        """A worker attached."""
        self.present.attached[worker] = incarnation
        self._answered_before.pop(worker, None)
        self._unanswered.pop(worker, None)

    def left(self, worker: int, incarnation: int, *, finished: bool) -> None:
        """A worker is gone, in order (`finished`) or not."""
        if self.standby is not None:
            self.standby.gone[worker] = (incarnation, finished)
        if self.present.attached.get(worker) == incarnation:
            del self.present.attached[worker]
            self._unanswered.pop(worker, None)

    @property
    def keeps_requests(self) -> bool:
        """Whether this server must know workers' requests: it may lead, or takes part from later on."""
        return self.standby is not None or bool(self._answered_before) or not self.takes_part

    def request(self, request: WorkerRequest) -> bool:
        """A worker made a request.

        Returns:
            Whether it concerns this server. If not, it was answered before this server took part.
        """
        if self._is_answered(request):
            self._unanswered.pop(request.worker, None)
            return False
        self._unanswered[request.worker] = request
        return True

    def _is_answered(self, request: WorkerRequest) -> bool:
        if not isinstance(request, _ORDERED):
            return False  # for the leader: the worker knows sooner than this server that it leads
        return request.number <= self._answered_before.get(request.worker, 0)

    def admitted(self, worker: int) -> None:
        """The order answers a worker's request."""
        self._unanswered.pop(worker, None)

    # --- the order --------------------------------------------------------------------------------

    def begin_at(
        self,
        position: int,
        placement: Placement,
        answered: Mapping[int, int],
        incarnations: Mapping[int, int],
    ) -> list[OrderedRequest]:
        """This server takes part from a position in the order on.

        Args:
            placement: the last one before.
            answered: number of each worker's last request that is answered before.
            incarnations: the processes that made those requests. One that came here in the place of such a
                process counts its requests anew.

        Returns:
            Requests of workers that came here and were answered without this server.
        """
        self.log.begin_at(position)
        self.present.placement = placement
        self.takes_part = True
        here = self.present.attached
        self._answered_before = {
            worker: number
            for worker, number in answered.items()
            if worker in incarnations and here.get(worker, incarnations[worker]) == incarnations[worker]
        }
        skipped = []
        for request in [*self._unanswered.values()]:
            if isinstance(request, _ORDERED) and self._is_answered(request):
                del self._unanswered[request.worker]
                skipped.append(request)
        return skipped

    def know(self, state: Json, records: Json) -> None:
        """Know what the leader's decider knows now, from JSON. Raises FrameError."""
        if self.standby is not None:
            self.standby.begin_here(state, records)

    def hear(self, steps: Steps, events: Sequence[Event], held: Steps) -> None:
        """The leader sent steps, the events that they follow from, and steps that it holds."""
        if self.standby is not None:
            self.standby.hear(steps, events, held)
        self.log.extend(steps)

    def mode_changed(self, mode: ModeSpec) -> None:
        """This server has come to another mode in the order."""
        self.present.mode = mode

    def placed(self, placement: Placement) -> None:
        """This server has come to a placement in the order."""
        self.present.placement = placement

    # --- the leader -------------------------------------------------------------------------------

    def leader_lost(self, now: float) -> bool:
        """The link to the leader ended. Returns whether another server can lead."""
        self._leaderless_since = now
        return self.standby is not None

    def leader_known(self) -> None:
        """The controller said which server leads."""
        self._leaderless_since = None

    def is_leaderless(self, now: float, limit_s: float) -> bool:
        """Whether there has been no leader for longer than this."""
        return self._leaderless_since is not None and now - self._leaderless_since > limit_s

    # --- promotion --------------------------------------------------------------------------------

    @property
    def owed(self) -> list[int]:
        """Workers with a request that the order has not answered."""
        return sorted(w for w, each in self._unanswered.items() if isinstance(each, _ORDERED))

    def unheard(self, queued: Steps) -> list[WorkerRequest]:
        """Unanswered requests that the next leader deals with as if they had just come: those that the
        leader has not told this server of, those that the leader alone answers, and pulls whose answer it
        has not ordered. (What else the leader has told of is in the decider, and is answered by it.)

        Args:
            queued: steps that this server has not executed yet.
        """
        assert self.standby is not None
        heard = self.standby.decider.roster.requests
        steps = (*queued, *self.standby.held)
        answered = {step.worker for step in steps if isinstance(step, AdmitStep)}
        return [
            request
            for worker, request in sorted(self._unanswered.items())
            if not isinstance(request, _ORDERED)
            or request.number > heard.get(worker, 0)
            or (isinstance(request, PullRequest) and worker not in answered)
        ]

    def last_ordered_placement(self, queued: Steps) -> Placement:
        """The last placement in the order.

        Args:
            queued: steps that this server has not executed yet.
        """
        held = [] if self.standby is None else self.standby.held
        ordered = [step.placement for step in (*queued, *held) if isinstance(step, PlaceStep)]
        return ordered[-1] if ordered else self.present.placement

    @staticmethod
    def half_done_update(reduced: int | None, queued: Steps) -> int | None:
        """Number of the update whose first half is in the order and whose second is not.

        Args:
            reduced: the update of which this server has done the first half.
            queued: steps that this server has not executed yet.
        """
        if reduced is not None:
            return reduced
        return next((step.number for step in queued if isinstance(step, ReduceStep)), None)
