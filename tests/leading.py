"""A LeadMachine with a run that goes on, and an executor that does at once what is ordered: for tests."""

from collections.abc import Iterator
from typing import Any

from paceline.core.decider import Decider
from paceline.core.events import Push, Take
from paceline.core.layout import Layout, TensorInfo
from paceline.core.leases import LeaseBook
from paceline.core.modes import PushId, parse_mode
from paceline.core.placement import Placement
from paceline.core.sequencer import OrderLog
from paceline.core.server.lead_actions import Action, Actions, Order
from paceline.core.server.lead_machine import LeadMachine
from paceline.core.server.lead_settings import LeadSettings
from paceline.core.server.present import Present
from paceline.core.server.start_gate import StartGate
from paceline.core.server.worker_requests import PushRequest, TakeRequest
from paceline.core.steps import AdmitStep, ModeStep, PlaceStep, Step
from paceline.core.totals import Applied


def two_slices() -> Layout:
    """A layout with a slice for each of two servers."""
    return Layout.build(
        TensorInfo(name=f"tensor {group}", shape=(4,), stride=(1,), dtype="float32", group=group)
        for group in (0, 1)
    )


class Led:
    """Server 0 leads servers 0 … servers-1, and its executor does at once what is ordered.

    Args:
        workers: number of workers that the run begins with.
        attached: number of workers that are here; None: all.
    """

    def __init__(
        self,
        mode: str,
        *,
        workers: int = 2,
        servers: int = 1,
        replicas: int = 0,
        samples: int = 32,
        attached: int | None = None,
        **settings: Any,
    ) -> None:
        spec = parse_mode(mode)
        self.decider = Decider(spec, clip_norm=settings.get("clip_norm"))
        book = LeaseBook(samples=samples, batch_size=4, drop_last=False, by_round=spec.by_round)
        self.decider.begin(book, 1, None)
        self.applied: list[Applied] = []
        settings = {"deadline_s": 60.0, **settings}
        self.machine = LeadMachine(
            LeadSettings(rank=0, workers=workers, servers=servers, replicas=replicas, **settings),
            self.decider,
            present=Present(spec),
            log=OrderLog(100),
            gate=StartGate(workers),
            applied=self.applied,
            directory_of=lambda version: f"directory-{version}",
        )
        self.now = 0.0
        self.steps: list[Step] = []
        self.all: Actions = []
        """All actions so far."""
        for server in range(1, servers):
            self.do(self.machine.follower_came(server))
        layout = two_slices()
        self.machine.adopt(layout, Placement.over(layout, range(servers), replicas), 1)
        for server in range(1, servers):
            self.do(self.machine.server_adopted(server))
        for worker in range(workers if attached is None else attached):
            self.do(self.machine.attach(worker, 0, self.now))

    def do(self, actions: Actions) -> None:
        """What the leader's process does."""
        self.perform_all(actions)
        while more := self.machine.settle(self.now):
            self.perform_all(more)

    def perform_all(self, actions: Actions) -> None:
        for action in actions:
            self.perform(action)

    def perform(self, action: Action) -> None:
        self.all.append(action)
        if not isinstance(action, Order):
            return
        for step in action.steps:
            self.steps.append(step)
            match step:
                case AdmitStep(worker, version):
                    if worker in self.machine.present.attached:
                        self.machine.admitted(worker, version, self.now)
                case ModeStep(mode):
                    self.perform_all(self.machine.mode_changed(parse_mode(mode)))
                case PlaceStep(placement):
                    self.perform_all(self.machine.placed(placement))

    @property
    def orders(self) -> list[Order]:
        """What followers were sent so far."""
        return [*self.of(Order)]

    def of(self, *kinds: type) -> Iterator[Any]:
        """Actions of these classes so far."""
        return (action for action in self.all if isinstance(action, kinds))

    def take(self, worker: int, number: int, *, limit: int = 8, wait: bool = True, epoch: int = 0) -> None:
        take = Take(worker, epoch, limit, wait, number)
        self.do(self.machine.request(TakeRequest(take), self.now))

    def push(self, worker: int, sequence: int, *leases: int, version: int | None = None) -> None:
        read = self.decider.version if version is None else version
        push = Push(PushId(worker, 0, sequence), read, 4, leases, False)
        self.do(self.machine.request(PushRequest(worker, sequence + 1, push), self.now))
