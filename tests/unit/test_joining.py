"""A server that joins a run which goes on: from where in the order it takes part, and what it waits for."""

from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save

from paceline.comm import Kind
from paceline.comm.faults import Faults
from paceline.core.sequencer import OrderLog
from paceline.observe.record.spans import NO_SPANS
from paceline.params import Placement
from paceline.ps.attachments import Attachments
from paceline.ps.executor import Executor
from paceline.ps.server import Server


class Holding(Executor):
    """Holds slices of which only the placement is known."""

    def __init__(self) -> None:
        config: Any = SimpleNamespace(rank=2, mode="bsp")
        super().__init__(config, Faults.parse(""), NO_SPANS)
        self.placement = Placement(0, frozenset({0, 1}), ((0, 1), (1, 0)))
        self.shard: Any = "parameters"
        self.placed: list[int] = []

    def _place(self, placement: Placement) -> None:
        self.placed.append(placement.number)


class Newcomer(Server):
    """server:2, which adopted the model when servers 0 and 1 had it."""

    def __init__(self) -> None:
        self._executor = self.holding = Holding()
        hub: Any = None
        self._attachments = Attachments(self.holding, hub, NO_SPANS)
        self._standby = None
        self._log = OrderLog(4)


def frame(kind: Kind, **body: Any) -> Any:
    return SimpleNamespace(kind=kind, body=body)


def test_it_waits_for_those_who_own_the_slices_now_not_when_it_adopted_the_model() -> None:
    """Server 1 died meanwhile: all comes from server 0, in one gift."""
    server = Newcomer()
    before = Placement(1, frozenset({0}), ((0,), (0,)))
    link: Any = SimpleNamespace(peer="server:0", read_blob=lambda _, limit: save({"slice": torch.zeros(1)}))
    order = frame(Kind.ORDER, position=7, answered={}, placement=before.to_json(), steps=[])
    order.body["steps"] = [["place", *Placement(2, frozenset({0, 2}), ((2, 0), (0, 2))).to_json()]]
    server._on_lead(link, order)
    assert server._log.position == 8 and server.holding.placed == []
    server._on_lead(link, frame(Kind.STATE, number=2))
    assert server.holding.placed == [2]
