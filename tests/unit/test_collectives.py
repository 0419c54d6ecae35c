"""Small collectives: the same answer to all that call together, and nobody waits for ever."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.core.collective_calls import CollectiveCalls
from paceline.core.events import Answers, Push
from paceline.core.leases import LeaseBook
from paceline.core.modes import PushId, parse_mode
from paceline.exceptions import UsageError
from paceline.worker.gathered_values import MOST_BYTES, from_text, mean_of, to_text
from tests.deciding import JsonDecider, copied, replay

# --- the state machine ------------------------------------------------------------------------------


def called(*calls: tuple[int, str], late: tuple[int, ...] = ()) -> CollectiveCalls:
    found = CollectiveCalls()
    for worker in late:
        found.joined(worker, late=True)
    for worker, place in calls:
        found.call(worker, 1, place, f"v{worker}")
    return found


def test_all_that_call_together_get_all_values_by_rank():
    calls = called((1, "x"), (0, "x"))
    assert calls.settle({0, 1, 2}, set()) == []
    calls.call(2, 1, "x", "v2")
    assert calls.settle({0, 1, 2}, set()) == [0, 1, 2]
    assert [calls.answer_to(worker, 1) for worker in range(3)] == [["v0", "v1", "v2"]] * 3
    assert calls.left_out == [] and not calls.callers


def test_who_waits_for_something_else_is_left_out_and_named():
    calls = called((0, "x"))
    assert calls.awaited({0, 1, 2}, {1}) == {2}
    assert calls.settle({0, 1, 2}, {1, 2}) == [0]
    assert calls.answer_to(0, 1) == ["v0"] and calls.left_out == [("x", 1), ("x", 2)]


def test_a_call_under_is_main_is_answered_first_and_its_caller_comes_to_the_others():
    calls = called((1, "y"), (0, "under is_main"))
    assert calls.settle({0, 1}, set()) == [0]
    assert calls.settle({0, 1}, set()) == []
    calls.call(0, 2, "y", "again")
    assert calls.settle({0, 1}, set()) == [0, 1]
    assert calls.answer_to(0, 2) == calls.answer_to(1, 1) == ["again", "v1"]


def test_of_two_places_the_one_with_fewer_callers_or_where_all_never_called_is_answered_first():
    calls = called((0, "y"), (1, "x"), (2, "y"))
    assert calls.settle({0, 1, 2}, set()) == [1]
    calls = called((0, "y"), (1, "y"))
    calls.settle({0, 1}, set())
    calls.call(0, 2, "y", "v0")
    calls.call(1, 2, "x", "v1")
    assert calls.settle({0, 1}, set()) == [1]


def test_who_joins_late_is_answered_at_once_and_takes_part_from_its_first_step_on():
    calls = called((0, "x"))
    assert calls.settle({0}, set()) == [0]
    calls.joined(1, late=True)
    calls.call(1, 1, "x", "v1")
    calls.call(0, 2, "y", "w0")
    assert calls.settle({0, 1}, set()) == [0, 1], "neither waits for the other"
    assert calls.answer_to(1, 1) == ["v0"], "the last answer at that place"
    calls.call(1, 2, "z", "own")
    assert calls.settle({0, 1}, set()) == [1] and calls.answer_to(1, 2) == ["own"]
    calls.stepped(1)
    calls.call(0, 3, "x", "w0")
    assert calls.settle({0, 1}, set()) == []
    calls.call(1, 3, "x", "w1")
    assert calls.settle({0, 1}, set()) == [0, 1] and calls.answer_to(1, 3) == ["w0", "w1"]


def test_one_that_leaves_is_not_waited_for_and_its_value_goes_with_it():
    calls = called((0, "x"), (1, "x"))
    calls.forget(1)
    assert calls.settle({0}, set()) == [0] and calls.answer_to(0, 1) == ["v0"]


def test_a_call_that_is_said_again_changes_nothing():
    calls = called((0, "x"))
    calls.call(0, 1, "x", "other")
    calls.settle({0}, set())
    calls.call(0, 1, "x", "other")
    assert not calls.callers and calls.answer_to(0, 1) == ["v0"]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["call", "call", "call", "leave", "join", "step", "busy", "ready"]),
        st.integers(0, 3),
        st.sampled_from("xyz"),
    ),
    max_size=60,
)


@given(events=EVENTS)
def test_whatever_happens_answers_are_whole_and_nobody_waits_for_nobody(events):
    calls = CollectiveCalls()
    members, busy, late = {0, 1, 2, 3}, set(), set()
    pending: dict[int, tuple[int, str]] = {}
    numbers = dict.fromkeys(range(4), 0)
    for kind, worker, place in events:
        if kind == "leave" and worker in members:
            members.discard(worker)
            for known in (busy, late):
                known.discard(worker)
            pending.pop(worker, None)
            calls.forget(worker)
        elif kind == "join" and worker not in members:
            members.add(worker)
            late.add(worker)
            numbers[worker] = 0
            calls.joined(worker, late=True)
        elif worker not in members or worker in pending:
            continue
        elif kind == "call" and worker not in busy:
            numbers[worker] += 1
            pending[worker] = (numbers[worker], place)
            calls.call(worker, numbers[worker], place, f"{worker}/{numbers[worker]}")
        elif kind == "step":
            late.discard(worker)
            calls.stepped(worker)
        elif kind in ("busy", "ready"):
            (busy.add if kind == "busy" else busy.discard)(worker)
        while answered := calls.settle(members, busy):
            assert len(set(answered)) == len(answered) and set(answered) <= pending.keys()
            together = [w for w in answered if w not in late]
            assert len({pending[w][1] for w in together}) <= 1
            expected = [f"{w}/{pending[w][0]}" for w in together]
            for w in together:
                assert calls.answer_to(w, pending[w][0]) == expected
            for w in answered:
                del pending[w]
        assert set(calls.callers) == pending.keys()
        assert not pending or calls.awaited(members, busy), "whoever waits, waits for somebody"
        assert not any(w in late for w in pending), "who came late is answered at once"


@given(order=st.permutations([worker for worker in range(3) for _ in range(4)]))
def test_workers_that_run_the_same_script_always_get_all_values(order):
    """Whatever the order in which they come: the k-th call of one is answered with the k-th of the others."""
    calls = CollectiveCalls()
    turns, numbers = dict.fromkeys(range(3), 0), dict.fromkeys(range(3), 0)
    answers: dict[int, list[list[str]]] = {worker: [] for worker in range(3)}

    def go_on(worker):
        if turns[worker] and worker not in calls.callers:
            place = "abcd"[numbers[worker]]
            turns[worker] -= 1
            numbers[worker] += 1
            calls.call(worker, numbers[worker], place, f"{worker}{place}")

    for worker in order:
        turns[worker] += 1
        go_on(worker)
        while answered := calls.settle({0, 1, 2}, set()):
            for each in answered:
                answers[each].append(calls.last_answer(each))
            for each in answered:
                go_on(each)
    expected = [[f"{w}{place}" for w in range(3)] for place in "abcd"]
    assert all(each == expected for each in answers.values()), answers
    assert calls.left_out == []


# --- in a decider --------------------------------------------------------------------------------------


def lead_of(mode: str) -> JsonDecider:
    lead = JsonDecider(parse_mode(mode))
    lead.book = LeaseBook(samples=8, batch_size=4, drop_last=False, by_round=lead.mode.by_round)
    for worker in range(2):
        lead.join(worker, 0)
    return lead


def test_in_bsp_one_that_waits_for_the_callers_step_is_not_waited_for():
    lead = lead_of("bsp")
    replay(lead, ["call", 0, 1, "gather() at train.py:9", "v0"])
    assert replay(lead, ["answers"]) == [] and lead.awaited_callers == {1}
    lead.push(Push(PushId(1, 0, 0), 0, 2, (), False))
    ruling = lead.decide(Answers())
    assert [reply.worker for reply in ruling.replies] == [0]
    assert "gather() at train.py:9 was answered without worker:1" in ruling.news[0]


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_a_vote_and_a_call_do_not_wait_for_each_other(mode):
    lead = lead_of(mode)
    replay(lead, ["vote", 0, 1, "any", False])
    replay(lead, ["call", 1, 1, "x", "v1"])
    assert lead.verdicts() == [(0, False)]
    assert replay(lead, ["answers"]) == [], "worker 0 goes on, and may come"
    replay(lead, ["call", 0, 2, "x", "v0"])
    assert replay(lead, ["answers"]) == [0, 1]


def test_one_that_replaces_another_is_waited_for_after_its_first_step():
    lead = lead_of("asp")
    lead.push(Push(PushId(1, 0, 0), 0, 2, (), False))
    lead.join(1, 1)
    replay(lead, ["call", 0, 1, "x", "v0"])
    assert replay(lead, ["answers"]) == [0]
    lead.push(Push(PushId(1, 1, 0), 0, 2, (), False))
    replay(lead, ["call", 0, 2, "x", "v0"])
    assert replay(lead, ["answers"]) == [] and lead.awaited_callers == {1}


def test_a_lead_that_takes_over_knows_who_called():
    lead = lead_of("bsp")
    replay(lead, ["call", 0, 1, "x", "v0"])
    other = copied(lead.decider)
    replay(other, ["call", 1, 1, "x", "v1"])
    assert replay(other, ["answers"]) == [0, 1]
    assert other.collectives.answer_to(0, 1) == ["v0", "v1"]


# --- values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, 0.1, -math.inf, "ü\n", [], [1, [2.5, "x"]], (1, (2,)), {"a": 1, 2: [None]}),
        2**80,
    ],
)
def test_a_value_comes_back_as_it_was(value):
    found = from_text(to_text(value, "gather"))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_come_back_with_their_dtype_and_shape(dtype):
    tensor = torch.arange(6).reshape(2, 3).t().to(dtype)
    found = from_text(to_text({"t": [tensor, torch.tensor(1.5)]}, "gather"))["t"]
    assert torch.equal(found[0], tensor) and found[0].dtype == dtype and found[1].shape == ()


def test_nan_comes_back():
    assert math.isnan(from_text(to_text(float("nan"), "gather")))


@pytest.mark.parametrize("value", [object(), {1, 2}, [b"x"], torch.eye(2).to_sparse()])
def test_values_of_other_kinds_are_refused_with_what_is_taken(value):
    with pytest.raises(UsageError, match=r"paceline.mean\(\) got a value with a .* in it. It takes numbers"):
        to_text(value, "mean")


@pytest.mark.parametrize("value", ["x" * MOST_BYTES, torch.zeros(MOST_BYTES), list(range(20_000))])
def test_large_values_are_refused_with_their_size(value):
    with pytest.raises(UsageError, match=r"got a value of [\d,]+ bytes, and takes 65,536"):
        to_text(value, "gather")


def test_a_value_that_holds_itself_is_refused():
    value: list = []
    value.append(value)
    with pytest.raises(UsageError, match="nested too deeply"):
        to_text(value, "gather")


def test_means_are_weighted_and_of_every_number():
    values = [{"loss": 1.0, "t": torch.tensor([1, 2])}, {"loss": 4.0, "t": torch.tensor([3, 5])}]
    found = mean_of(values, [1.0, 3.0])
    assert found["loss"] == 3.25 and torch.equal(found["t"], torch.tensor([2.5, 4.25]))
    assert mean_of([0.1], [0.3]) == 0.1 and mean_of([0.1] * 4, [3.0] * 4) == 0.1
    assert mean_of([(1, [2])], [5.0]) == (1.0, [2.0])
    assert math.isnan(mean_of([math.inf, -math.inf], [1.0, 1.0]))


@pytest.mark.parametrize("values", [["a", "b"], [1, "b"], [[1], [1, 2]], [{"a": 1}, {"b": 1}], [None, 1]])
def test_what_has_no_mean_is_refused(values):
    with pytest.raises(UsageError, match=r"paceline.mean\(\) got .* same shape on every worker"):
        mean_of(values, [1.0, 1.0])


# --- alone ------------------------------------------------------------------------------------------


def test_alone_every_collective_is_of_one():
    assert paceline.gather({"a": 1}) == [{"a": 1}]
    assert paceline.mean([1, 3.5], weight=0.3) == [1.0, 3.5]
    assert paceline.broadcast("x", source=3) == "x"
    paceline.barrier()
    for weight in (-1, math.nan, math.inf):
        with pytest.raises(UsageError, match="finite number"):
            paceline.mean(1.0, weight=weight)
    with pytest.raises(UsageError, match="weights of all workers are 0"):
        paceline.mean(1.0, weight=0)
