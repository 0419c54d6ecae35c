"""Answers the requests of steppers: pushes and fetches, with what the servers must know about a push."""

import threading
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from paceline.comm.worker_messages import PushMessage
from paceline.core.json_types import JsonObject
from paceline.params import GroupSettings, as_json, settings_of
from paceline.worker.account import Account
from paceline.worker.exchange.client import Client
from paceline.worker.exchange.encoders import follow_settings
from paceline.worker.exchange.run_news import new_pull, new_push
from paceline.worker.exchange.sample_report import SampleReport
from paceline.worker.model_memory import ModelMemory
from paceline.worker.optimizer_side import OptimizerSide
from paceline.worker.steppers import Request, follows_rate
from paceline.worker.telemetry import Telemetry

__all__ = ["StepExchange"]


class StepExchange:
    """Exchanges with the servers for all optimizers of a script.

    Args:
        tells_norms: the run has a bound on the gradient's norm, which goes with every push.
    """

    def __init__(
        self,
        client: Client,
        memory: ModelMemory,
        sides: Sequence[OptimizerSide],
        account: Account,
        telemetry: Telemetry,
        *,
        tells_norms: bool,
    ) -> None:
        self.lock = threading.RLock()
        """Held by the thread that talks to the servers: in dogwild that is not only the script's."""
        self._client = client
        self._memory = memory
        self._sides = sides
        self._account = account
        self._traffic = telemetry.traffic
        self._norms = telemetry.norms
        self._tells_norms = tells_norms
        self._sent_settings: list[list[object]] = []
        """Values of all optimizers' settings, as the servers have them."""

    def answer(self, side: OptimizerSide, request: Request) -> None:
        """Answer a stepper's request."""
        client, memory = self._client, self._memory
        if request.push:
            push = self._push(side, request)
            if request.carries == "slot":
                memory.to_host(side)
            client.exchange(push, fetch=request.fetch)
        else:
            client.exchange(new_pull(), fetch=request.fetch)
        self._traffic.exchanged(client, memory.mode, request, side.layout)
        memory.follow_switch(self._sides)
        if request.fetch:
            side.version = client.news.version
            if not client.arrives_late:
                memory.fetched(side)

    def flush(self) -> None:
        """Push the steps that no push has covered."""
        with self.lock:
            for side in self._sides:
                for request in side.stepper.flush():
                    self.answer(side, replace(request, covers_step=False))  # no step is being made

    def send_settings_again(self) -> None:
        """The servers' settings were replaced by a state that was loaded."""
        self._sent_settings = []

    def _push(self, side: OptimizerSide, request: Request) -> PushMessage:
        push = new_push()
        leases, push.samples = self._account.cover(this_step=request.covers_step)
        push.leases = tuple(leases)
        if len(self._sides) > 1:
            self._name_optimizer(push, side)
        if self._settings_changed():
            groups = [group for each in self._sides for group in settings_of(each.served)]
            push.settings = tuple(map(_without_kernel_choice, groups))
        push.missing = tuple(side.tensors[i] for i in request.missing)
        push.void, push.carries = not request.finite, request.carries
        if request.carries == "slot" and request.finite and (self._tells_norms or self._norms.due):
            push.norm = self._norms.measured(side.stepper.slot_norm)
        push.refused = tuple(self._account.take_refused())
        report = SampleReport(logged=self._account.take_logged())
        if request.covers_step:  # else it may be another thread's, and the account is this one's
            report += self._account.take_skipped()
        report.complete(push)
        return push

    def _name_optimizer(self, push: PushMessage, side: OptimizerSide) -> None:
        """Say which optimizer a push is of, where there are several."""
        push.optimizer = side.index
        if side.weight != push.samples:
            push.weight = side.weight
        side.weight = 0
        # Local steps began from what this optimizer fetched; another one may have fetched since.
        if self._memory.mode.local and self._memory.mode.spare is None:
            push.read_version = side.version

    def _settings_changed(self) -> bool:
        """Whether a setting differs from what was sent last. Every step asks, so it must be cheap."""
        sides, encoders = self._sides, self._client.payloads.encoders
        if encoders is not None and encoders.spec.has_momentum:
            encoders.use_momentum([g["momentum"] for side in sides for g in side.optimizer.param_groups])
            for side in sides:
                follow_settings(side.served, side.optimizer)
        for side in sides:
            if follows_rate(self._memory.mode, side.optimizer):
                pairs = zip(side.served.param_groups, side.optimizer.param_groups, strict=True)
                for outer, group in pairs:
                    outer["lr"] = group["lr"]
        values = [
            [v for k, v in g.items() if k != "params"] for side in sides for g in side.served.param_groups
        ]
        if any(isinstance(v, Tensor) for group in values for v in group):
            values = [list(g.values()) for side in sides for g in settings_of(side.served)]
        if values == self._sent_settings:
            return False
        self._sent_settings = values
        return True


def _without_kernel_choice(group: GroupSettings) -> JsonObject:
    """What OptimizerSpec chose for `fused` on the servers stays."""
    return {name: as_json(value) for name, value in group.items() if name not in ("fused", "foreach")}
