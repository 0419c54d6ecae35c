"""A server that follows: requests that it keeps, and from where in the order it takes part."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save

from paceline.comm import Kind
from paceline.comm.faults import Faults
from paceline.core.decider import Decider
from paceline.core.events import Heard, Push, Take
from paceline.core.modes import PushId, parse_mode
from paceline.core.placement import Placement
from paceline.core.sequencer import OrderLog
from paceline.core.server.follower_machine import FollowerMachine
from paceline.core.server.present import Present
from paceline.core.server.standby import Standby
from paceline.core.server.worker_requests import PullRequest, PushRequest, TakeRequest, WorkerRequest
from paceline.core.steps import AdmitStep, PlaceStep, ReduceStep
from paceline.observe.record.spans import NO_SPANS
from paceline.ps.attachments import Attachments
from paceline.ps.executor import Executor
from paceline.ps.follower import Follower
from tests.leading import two_slices


def machine(*, takes_part: bool = True, replicas: int = 1) -> FollowerMachine:
    made = FollowerMachine(Present(parse_mode("asp")), OrderLog(10))
    layout, decider = two_slices(), Decider(parse_mode("asp"))
    decider.begin(None, 1, None)
    standby = Standby(decider) if replicas else None
    made.adopt(layout, Placement.over(layout, [0, 1], replicas), 1, standby, takes_part=takes_part)
    made.attach(0, 0)
    return made


def push(number: int) -> PushRequest:
    return PushRequest(0, number, Push(PushId(0, 0, number - 1), 0, 4, (), False))


def test_a_request_is_kept_until_the_order_answers_it() -> None:
    follower = machine()
    assert follower.keeps_requests and follower.request(push(1))
    assert follower.owed == [0] and follower.unheard([]) == [push(1)]
    follower.hear([], [Heard(0, 1)], [])
    assert follower.owed == [0] and follower.unheard([]) == [], "the leader knows of it"
    follower.admitted(0)
    assert follower.owed == []


def test_a_pull_whose_answer_is_not_ordered_is_for_the_next_leader() -> None:
    """The leader had heard of it, and waited with the answer until a server was gone from the placement."""
    follower = machine()
    pull = PullRequest(0, 1, without=frozenset({1}))
    assert follower.request(pull)
    follower.hear([], [Heard(0, 1)], [])
    assert follower.unheard([]) == [pull]
    assert follower.unheard([AdmitStep(0, 0)]) == [], "it is answered by what is in the order"


def test_what_the_leader_alone_answers_is_for_the_next_leader() -> None:
    follower = machine()
    take: WorkerRequest = TakeRequest(Take(0, 0, 1, True, 1))
    assert follower.request(take)
    assert follower.owed == [] and follower.unheard([]) == [take]


def test_a_worker_that_left_is_owed_nothing() -> None:
    follower = machine()
    follower.request(push(1))
    follower.left(0, 0, finished=False)
    assert follower.owed == [] and follower.unheard([]) == [] and follower.present.attached == {}
    assert follower.standby is not None and follower.standby.gone == {0: (0, False)}
    follower.attach(0, 1)
    follower.left(0, 0, finished=False)
    assert follower.present.attached == {0: 1}, "a late notice of the process before"


def test_requests_before_its_place_in_the_order_are_answered_without_it() -> None:
    follower = machine(takes_part=False)
    follower.attach(1, 0)
    assert follower.request(push(3)) and follower.request(PullRequest(1, 7))
    placement = Placement(1, frozenset({0}), ((0,), (0,)))
    assert follower.begin_at(20, placement, {0: 3, 1: 6}, {0: 0, 1: 0}) == [push(3)]
    assert follower.takes_part and follower.log.position == 20 and follower.present.placement == placement
    assert follower.owed == [1]
    assert not follower.request(push(3)), "sent again over another socket"
    assert follower.request(push(4))
    follower.attach(0, 1)
    assert follower.request(push(1)), "another process, which counts from one"


def test_a_process_that_came_before_its_place_in_the_order_counts_anew() -> None:
    """The order's beginning tells of requests of the process that it replaces."""
    follower = machine(takes_part=False)
    follower.attach(0, 1)
    follower.attach(1, 1)
    placement = Placement(1, frozenset({0}), ((0,), (0,)))
    assert follower.begin_at(20, placement, {0: 3, 1: 6}, {0: 0}) == []
    assert follower.request(push(1))


def test_without_replicas_nothing_is_kept() -> None:
    follower = machine(replicas=0)
    assert not follower.keeps_requests
    assert not follower.leader_lost(0.0)


def test_it_waits_for_a_leader_only_so_long() -> None:
    follower = machine()
    assert not follower.is_leaderless(1e9, 5.0)
    assert follower.leader_lost(10.0)
    assert not follower.is_leaderless(15.0, 5.0) and follower.is_leaderless(15.1, 5.0)
    follower.leader_known()
    assert not follower.is_leaderless(1e9, 5.0)


def test_what_it_finds_in_the_order_when_it_is_promoted() -> None:
    follower = machine()
    first, second = (Placement(n, frozenset({0}), ((0,), (0,))) for n in (1, 2))
    queued = [PlaceStep(first), ReduceStep((), 7), AdmitStep(0, 1)]
    assert follower.last_ordered_placement([]).number == 0
    assert follower.last_ordered_placement(queued) == first
    follower.hear([], [], [PlaceStep(second)])
    assert follower.last_ordered_placement(queued) == second, "it is held"
    assert follower.half_done_update(None, queued) == 7
    assert follower.half_done_update(5, queued) == 5
    assert follower.half_done_update(None, []) is None


class Holding(Executor):
    """Holds slices of which only the placement is known."""

    def __init__(self) -> None:
        config: Any = SimpleNamespace(rank=2, mode="bsp")
        super().__init__(config, Faults.parse(""), NO_SPANS)
        self.placement = Placement(0, frozenset({0, 1}), ((0, 1), (1, 0)))
        self.shard: Any = SimpleNamespace(take_refusals=dict)
        self.placed: list[int] = []

    def _place(self, placement: Placement) -> None:
        self.placed.append(placement.number)


class Newcomer(Follower):
    """server:2, which adopted the model when servers 0 and 1 had it."""

    def __init__(self) -> None:
        self._executor = self.holding = Holding()
        hub: Any = None
        self._attachments = Attachments(self.holding, hub, NO_SPANS)
        self.machine = FollowerMachine(Present(parse_mode("bsp")), OrderLog(4))

    def hear(self, kind: Kind, **body: Any) -> None:
        link: Any = SimpleNamespace(peer="server:0", read_blob=lambda _, limit: save({"s": torch.zeros(1)}))
        frame: Any = SimpleNamespace(kind=kind, body=body)
        self._on_leader(link, frame)


def test_it_waits_for_those_who_own_the_slices_now_not_when_it_adopted_the_model() -> None:
    """Server 1 died meanwhile: all comes from server 0, in one gift."""
    server = Newcomer()
    before = Placement(1, frozenset({0}), ((0,), (0,)))
    place = ["place", *Placement(2, frozenset({0, 2}), ((2, 0), (0, 2))).to_json()]
    server.hear(Kind.ENTER_ORDER, position=7, answered={}, incarnations={}, placement=before.to_json())
    server.hear(Kind.ORDER, steps=[place])
    assert server.machine.log.position == 8 and server.holding.placed == []
    server.hear(Kind.SLICES, to=2, number=2)
    assert server.holding.placed == [2]


@pytest.mark.parametrize("body", [{"steps": [["nonsense"]]}, {"steps": [], "events": [["nonsense"]]}])
def test_nonsense_in_an_order_is_refused(body: dict[str, Any]) -> None:
    from paceline.exceptions import FrameError

    with pytest.raises(FrameError):
        Newcomer().hear(Kind.ORDER, **body)
