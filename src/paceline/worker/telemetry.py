"""What a worker records about itself: spans, logged values, its ledger of steps and bytes, reports."""

from torch import nn

from paceline.collective import Group
from paceline.comm import Connection
from paceline.comm.device_time import time_marks_of
from paceline.comm.transfer import Transfer
from paceline.observe.record.ledger import LedgerKeeper
from paceline.observe.record.phase import Phase
from paceline.observe.record.spans import NO_SPANS, Recorder
from paceline.observe.record.values import ValueWriter
from paceline.worker.exchange.client import Client
from paceline.worker.phase_hooks import watch_backward, watch_forward
from paceline.worker.reporter import NormSampling, Reporter
from paceline.worker.traffic import Traffic

__all__ = ["Telemetry"]


class Telemetry:
    """The recorders of one worker process. They live as long as the process does."""

    def __init__(
        self,
        controller: Connection,
        transfer: Transfer,
        spans: Recorder = NO_SPANS,
        values: ValueWriter | None = None,
        ledger: LedgerKeeper | None = None,
    ) -> None:
        self.spans, self.lane = spans, spans.main
        self.values = values or ValueWriter()
        self.ledger = ledger or LedgerKeeper()
        self.traffic = Traffic(self.ledger, transfer)
        self.norms = NormSampling()
        self.reporter = Reporter(controller, spans, self.values)
        self._watched: list[nn.Module] = []

    def watch(self, models: list[nn.Module], device: str | None = None) -> None:
        """Record forward and backward of these models, on their GPU, too. Training begins now.

        Args:
            device: the job's.
        """
        if self.spans.on:
            for model in models:
                if not any(model is watched for watched in self._watched):
                    watch_forward(model, self.lane)
            if not self._watched:
                watch_backward(self.lane)
            self.lane.enter(Phase.OTHER)  # what came before is no part of the training
            parameter = next((p for model in models for p in model.parameters()), None)
            marks = None if parameter is None else time_marks_of(parameter.device, device)
            if marks is not None:
                self.spans.follow_device(marks)
        self._watched = models

    def report(self, client: Client, group: Group | None, clock: int) -> None:
        """Tell the controller how this worker does."""
        waited_s = client.wait_s + (group.waited_s if group is not None else 0.0)
        self.traffic.look(client)
        self.reporter.report(clock, wait_s=waited_s, ledger=self.ledger.told())
