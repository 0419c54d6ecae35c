"""The order: what the decider decides, forwarded to followers and executed here. A part of the leader."""

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any, assert_never

from paceline.comm import Connection, Kind
from paceline.comm.messages import LeadReport, ModeEntered, RunEndsEarly, SwitchRefused, UserNote
from paceline.core.decider import Decider
from paceline.core.events import Answered, Answers, Event, Granted, Switch, Verdicts, events_to_json
from paceline.core.leases import Lease
from paceline.core.modes import parse_mode
from paceline.core.modes.lbfgs import Answer
from paceline.core.rulings import CallAnswer, LeaseGrant, Reply, Ruling, Verdict
from paceline.core.sequencer import Sequencer
from paceline.core.steps import Steps, steps_to_json
from paceline.exceptions import LinkError
from paceline.ps.adoption import Adoption
from paceline.ps.checkpoints import CheckpointCoordinator
from paceline.ps.config import undealt
from paceline.ps.peers import WorkerPeer
from paceline.ps.push_record import PushRecord
from paceline.ps.server import Server

__all__ = ["Ordering"]

log = logging.getLogger("paceline.server")

LEASES_AT_ONCE = 8


class Ordering(Server):
    """A server that runs the decider. What it does about leases and checkpoints is in its subclasses."""

    def _begin_ordering(self, decider: Decider, adoption: Adoption, gate: set[int] | None) -> None:
        self._decider = decider
        self._adoption = adoption
        self._gate = gate
        """Workers that wait for the others to come; None once training has begun."""
        self._replicates = self.config.replicas > 0
        self._events: list[Event] = []
        """What the followers have not been told yet."""
        self._followers: dict[int, Connection] = {}
        self._request: str | None = None
        """Whose switch is to take effect, at the end of a round."""
        self._untold: set[int] = set()
        """Workers that have not been told of the present mode."""
        self._taking: set[int] = set()
        """Workers that wait for leases from us: one that asked the lead before us will ask again."""
        self._voting: set[int] = set()
        """Workers that wait for our answer whether the run ends early."""
        self._calling: dict[int, str] = {}
        """Workers that wait for our answer to a collective: its place in the script."""
        self._told_ending = False
        """Whether the controller knows that the run ends early."""
        self._held_since: dict[int, float] = {}
        self._acting = -1
        """The worker whose message is being dealt with."""
        self._norms_told: list[tuple[int, float]] = []
        """Norms of gradients that workers told, and the controller has not heard of."""
        self._sequencer = Sequencer(self.config.clip_norm)
        self._checkpoints: CheckpointCoordinator
        self._said: set[str] = set()
        self._news: list[str] = []
        """What the user should read, and has not been told yet."""
        self._sick: list[int] = []
        """Workers that are to be replaced."""
        self._record: PushRecord

    def _grant(self, peer: WorkerPeer, leases: tuple[Lease, ...], *, over: bool) -> None:
        """Answer a worker that waits for leases."""
        raise NotImplementedError

    def _tell_verdict(self, peer: WorkerPeer) -> None:
        """Answer a worker that asked whether the run ends early."""
        raise NotImplementedError

    def _tell_answer(self, peer: WorkerPeer) -> None:
        """Answer a worker that waits in a collective."""
        raise NotImplementedError

    def _switch(self, text: str, request: str) -> None:
        """The controller wants another mode, and has seen that the run can carry it."""
        mode = parse_mode(text)
        adopted = self._executor.shard is not None
        reason = self._decider.mode.switch_refusal(mode) or (
            undealt(mode, self._decider.book) if adopted else None
        )
        if self._executor.optimizers > 1:
            reason = reason or mode.one_optimizer_reason()
        if reason is not None:
            self._refuse_switch(request, reason)
            return
        if self._request is not None:
            self._refuse_switch(self._request, f"a switch to {mode} came before it took effect")
        self._request = request
        self._act(self._do(Switch(str(mode))).steps)
        if self._request == request and self._decider.mode == mode:
            self._tell_mode()  # it is in it already, and what was to come was taken back

    def _refuse_switch(self, request: str, reason: str) -> None:
        with contextlib.suppress(LinkError):
            self._controller.tell(SwitchRefused(request, reason))

    def _tell_mode(self) -> None:
        request, self._request = self._request, None
        with contextlib.suppress(LinkError):
            self._controller.tell(ModeEntered(str(self._decider.mode), self._decider.version, request))

    def _do(self, event: Event) -> Ruling:
        """Let something happen to the decider; the followers will hear of it with the next order."""
        if self._replicates:
            self._events.append(event)
        ruling = self._decider.decide(event)
        self._news += ruling.news
        self._sick += ruling.sick
        self._record.pending += ruling.applied
        return ruling

    def _act(self, steps: Steps) -> None:
        """Make steps part of the order, then answer workers that wait for leases, a verdict or each other."""
        self._order(steps)
        if self._decider.ballot.waiting:
            self._reply(self._do(Verdicts()).replies)
        if self._news or self._decider.ballot.reason is not None:
            self._tell_news()
        self._grant_all()
        if self._decider.collectives.callers:
            self._reply(self._do(Answers()).replies)
            if self._news:
                self._tell_news()

    def _grant_all(self) -> None:
        """Answer workers that wait for leases."""
        while True:
            if not self._decider.parks:
                return
            ruling = self._do(Granted(LEASES_AT_ONCE))
            if not ruling.replies and not ruling.steps:
                return
            self._order(ruling.steps)
            self._reply(ruling.replies)

    def _reply(self, replies: Sequence[Reply]) -> None:
        """Answer workers, if they asked us: one that asked the lead before us will ask again."""
        for reply in replies:
            match reply:
                case LeaseGrant(worker, leases, over):
                    if worker in self._taking:
                        self._grant(self._executor.peers[worker], leases, over=over)
                case Verdict(worker):
                    if worker in self._voting:
                        self._tell_verdict(self._executor.peers[worker])
                case CallAnswer(worker):
                    if worker in self._calling:
                        self._tell_answer(self._executor.peers[worker])
                case _:
                    assert_never(reply)

    def _tell_news(self) -> None:
        """Tell the controller, once, that the run ends early, and what else the user should read."""
        news, self._news = self._news, []
        for text in news:
            self._say_once(text)
        if self._decider.ballot.reason is not None and not self._told_ending:
            self._told_ending = True
            log.info("the run ends early: %s", self._decider.ballot.reason)
            with contextlib.suppress(LinkError):
                self._controller.tell(RunEndsEarly(self._decider.ballot.reason))

    def _order(self, steps: Steps) -> None:
        """Forward steps to the followers, then execute them."""
        if not steps:
            return
        servers = len(self._executor.placement.servers)
        now, held = self._sequencer.order(steps, servers, self._checkpoints.cut_if_due)
        self._forward(now, held)
        if not now:
            return
        self._executor.queue.extend(now)
        self._advance()
        if self._decider.descent is not None and self._decider.descent.news:
            self._say_once(self._decider.descent.news)

    def _forward(self, steps: Steps, held: Steps | None = None) -> None:
        """Send steps to the followers, who is next in line to lead first."""
        self._log.extend(steps)
        events: list[Event] = []
        if self._replicates:
            events, self._events = self._events, []
        if not self._followers or not (steps or events or (held and self._replicates)):
            return
        body: dict[str, Any] = {"steps": steps_to_json(steps)}
        if self._replicates:
            body |= {"events": events_to_json(events), "held": steps_to_json(held or [])}
        for link in self._followers.values():
            with contextlib.suppress(LinkError):  # on_end says so
                link.send(Kind.ORDER, body)

    def _released(self, worker: int, body: dict[str, Any]) -> None:
        """A worker is answered: if somebody else's message brought it about, it has waited for that one."""
        since = self._held_since.pop(worker, None)
        if since is not None and self._acting not in (-1, worker):
            body["on"], body["held"] = self._acting, round(time.monotonic() - since, 6)

    def _add_norms(self, number: int, norms: list[Any]) -> None:
        """A server has done the first half of an update. When all have, order the second."""
        assert self._executor.layout is not None
        slices = len(self._executor.layout.slices)
        steps = self._sequencer.reduced(number, norms, slices, self._checkpoints.cut_if_due)
        if steps is not None:
            self._order(steps)

    def _answered(self, answers: list[Answer]) -> None:
        """A server has answered an ask. When all have, order what comes of it."""
        if (complete := self._sequencer.answered(answers)) is not None:
            parts, held = complete
            self._act([*self._do(Answered(tuple(map(tuple, parts)))).steps, *held])

    def _stats(self) -> LeadReport:
        totals, book, layout = self._decider.totals, self._decider.book, self._executor.layout
        norms, self._norms_told = self._norms_told, []
        return LeadReport(
            version=self._decider.version,
            epoch=self._decider.epoch,
            samples=totals.samples,
            pushes=totals.pushes,
            dropped=totals.dropped,
            dropped_of=dict(totals.dropped_of),
            refused=totals.refused,
            norms=tuple(norms),
            skipped=totals.skipped,
            lost=self._executor.lost,
            update_s=round(self._executor.update_s, 6),
            staleness={k: totals.staleness[k] for k in sorted(totals.staleness)[:64]},
            data=self._adoption.model.data if self._adoption.model else None,
            leases=tuple(book.accounts()) if book else (),
            earlier_epochs=book.earlier() if book else {},
            parameters=layout.numel if layout else 0,
        )

    def _write_pushes(self) -> None:
        try:
            self._record.write(self._decider.totals.pushes)
        except OSError as error:
            self._say_once(
                f"pushes.csv in {self.config.run_dir} cannot be written: {error.strerror or error}. Training "
                "goes on, but this record has gaps: make room there, or use another --run-dir next time."
            )

    def _say_once(self, text: str) -> None:
        """Tell the user something that training does not stop for."""
        if text not in self._said:
            self._said.add(text)
            log.warning("%s", text)
            with contextlib.suppress(LinkError):
                self._controller.tell(UserNote(text))
