"""RunOrder: makes the run's one order of steps from events.

An event goes to the decider. The steps that follow go through the sequencer, which holds steps back while an
update is half done, and inserts checkpoints behind updates. What may be executed now becomes an Order.
"""

from collections.abc import Iterable

from paceline.core.decider import Decider
from paceline.core.events import Answered, Event, Push
from paceline.core.health import QUARANTINE
from paceline.core.modes.lbfgs import Answer
from paceline.core.placement import Placement
from paceline.core.rulings import Ruling
from paceline.core.sequencer import OrderLog, Sequencer
from paceline.core.server.checkpoint_cuts import CheckpointCuts
from paceline.core.server.lead_actions import Order, OutgoingActions, Tell, TellUser, WriteLog
from paceline.core.server.lead_reports import ReplaceWorker
from paceline.core.server.lead_settings import LeadSettings
from paceline.core.server.present import Present
from paceline.core.steps import AdmitStep, PlaceStep, Steps
from paceline.core.totals import Applied

__all__ = ["RunOrder"]


class RunOrder:
    """One owner: the leader. Its parts order what they decide.

    Args:
        cuts: says when a checkpoint is due.
        present: the owner keeps it up to date.
        log: the last steps, for servers that lack some.
        out: gets the actions that follow.
        applied: gets the records of applied pushes.
    """

    def __init__(
        self,
        settings: LeadSettings,
        decider: Decider,
        sequencer: Sequencer,
        cuts: CheckpointCuts,
        *,
        present: Present,
        log: OrderLog,
        out: OutgoingActions,
        applied: list[Applied],
    ) -> None:
        self.decider = decider
        self.sequencer = sequencer
        self.log = log
        self._cuts, self._present, self._out, self._applied = cuts, present, out, applied
        self._replicates = settings.replicates
        self._bounds_norms = settings.bounds_norms
        self._events: list[Event] = []
        """Events that the followers have not been sent yet."""

    @property
    def unwritten(self) -> tuple[Applied, ...]:
        """Records of applied pushes that this server has not written yet."""
        return tuple(self._applied)

    @property
    def unsent(self) -> tuple[Event, ...]:
        """Events that the followers have not been sent yet: they go with the next Order."""
        return tuple(self._events)

    def happen(self, event: Event) -> Ruling:
        """Let something happen to the decider; the followers will hear of it with the next Order."""
        if self._replicates:
            self._events.append(event)
        ruling = self.decider.decide(event)
        if ruling.applied:
            self._applied += ruling.applied
        for text in ruling.news:
            self._out.put(TellUser(text))
        for worker in ruling.sick:
            self._quarantine(worker)
        if ruling.refused_norm is not None and isinstance(event, Push):
            norm, usual = ruling.refused_norm
            who = f"worker:{event.id.worker} pushed a gradient of norm {norm:.3g}"
            step = f"at step {event.id.sequence + 1}"
            self._out.put(WriteLog(f"{who} {step}, and {usual:.3g} is usual: refused (--norm-bound)"))
        return ruling

    def _quarantine(self, worker: int) -> None:
        what = "NaN or Inf" + (", or more than --norm-bound," if self._bounds_norms else "")
        reason = (
            f"worker:{worker} pushed {what} {QUARANTINE} times in a row while other workers did not: "
            "something is wrong with its process, its data or its device"
        )
        self._out.put(Tell(ReplaceWorker(worker, self._present.attached.get(worker), reason)))

    def append(self, steps: Steps) -> None:
        """Make steps part of the order: followers are sent them, then they are executed."""
        if not steps:
            return
        servers = len(self._present.ordered.servers)
        now, held = self.sequencer.order(steps, servers, self._cuts.cut_if_due)
        self.forward(now, held)
        descent = self.decider.descent
        if descent is not None and descent.news:
            self._out.put(TellUser(descent.news))

    def place(self, placement: Placement) -> None:
        """From here on in the order, slices are held as this says."""
        self._present.ordered = placement
        self.append([PlaceStep(placement)])

    def forward(self, steps: Steps | None = None, held: Steps | None = None) -> None:
        """Send steps and all events so far to the followers, and execute the steps.

        Without steps: before a worker or a server acts on what followed from the events.
        """
        steps, events = steps or [], self._events
        if steps or events or held:
            self._events = []
            self.log.extend(steps)
            self._out.put(Order(steps, events, held or []))

    def reduced(self, number: int, norms: Iterable[tuple[int, float]]) -> None:
        """A server has done the first half of an update. When all have, the second half is ordered."""
        assert self._present.layout is not None
        slices = len(self._present.layout.slices)
        steps = self.sequencer.reduced(number, norms, slices, self._cuts.cut_if_due)
        if steps is not None:
            self.append(steps)

    def vectors_answered(self, answers: list[Answer]) -> None:
        """A server has answered an ask. When all have, the decider's next steps are ordered."""
        if (complete := self.sequencer.answered(answers)) is not None:
            parts, held = complete
            ruling = self.happen(Answered(tuple(map(tuple, parts))))
            # Answers that were held come with the parameters that follow now.
            version = self.decider.version
            admits = [
                each._replace(version=version) if isinstance(each, AdmitStep) else each for each in held
            ]
            self.append([*ruling.steps, *admits])
