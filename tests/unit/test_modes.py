"""Modes by example: the text forms, and each rule of each machine in its smallest case."""

import json

import pytest

from paceline.core.modes import Admit, Apply, Drop, Hold, Machine, ModeSpec, PushId, parse_mode
from paceline.exceptions import UsageError

# Text forms


@pytest.mark.parametrize(
    ("text", "bound", "spare", "name"),
    [
        ("bsp", 0, 0, "bsp"),
        ("backup:2", 0, 2, "backup"),
        ("ssp:3", 3, None, "ssp"),
        ("ssp:0", 0, None, "ssp"),
        ("asp", None, None, "asp"),
    ],
)
def test_text_and_back(text: str, bound: int | None, spare: int | None, name: str) -> None:
    spec = parse_mode(text)
    assert (spec.bound, spec.spare, spec.name, str(spec)) == (bound, spare, name, text)
    assert spec.in_place == spec.by_round == (text == "bsp")


@pytest.mark.parametrize(
    ("text", "meaning"),
    [("0", "bsp"), ("-1", "asp"), ("3", "ssp:3"), (0, "bsp"), (-1, "asp"), (" SSP:2 ", "ssp:2")],
)
def test_other_spellings(text: str | int, meaning: str) -> None:
    assert str(parse_mode(text)) == meaning


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("bulk", "no such mode"),
        ("", "no such mode"),
        ("-2", "no such mode"),
        ("1.5", "no such mode"),
        ("bsp:1", "bsp takes no number"),
        ("asp:", "asp takes no number"),
        ("ssp", "ssp needs a whole number of at least 0, got none"),
        ("ssp:", "got none"),
        ("ssp:-1", "got '-1'"),
        ("ssp:1_0", "got '1_0'"),
        ("ssp:٣", "ssp needs a whole number"),
        ("ssp:" + "9" * 5000, "ssp needs a whole number"),
        ("backup:0", "backup needs a whole number of at least 1, got '0'"),
        ("backup:x", "got 'x'"),
    ],
)
def test_refused_texts_name_the_text_the_reason_and_the_forms(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_mode(text)
    message = str(refused.value)
    assert repr(text) in message
    assert reason in message
    assert "bsp, backup:B with B >= 1, ssp:S with S >= 0, asp" in message


@pytest.mark.parametrize(("bound", "spare"), [(-1, None), (0, -1), (1, 0), (None, 1)])
def test_impossible_knobs_are_refused(bound: int | None, spare: int | None) -> None:
    with pytest.raises(UsageError):
        ModeSpec(bound=bound, spare=spare)


def test_check_of_the_number_of_workers() -> None:
    parse_mode("bsp").check(1)
    parse_mode("backup:3").check(4)
    with pytest.raises(UsageError, match=r"at least one worker, got workers=0"):
        parse_mode("asp").check(0)
    with pytest.raises(UsageError, match=r"backup:4 .* 5 workers, got workers=4; .* backup:3"):
        parse_mode("backup:4").check(4)
    with pytest.raises(UsageError, match=r"or use bsp"):
        parse_mode("backup:1").check(1)


# Machines


def machine_of(mode: str, workers: int) -> Machine:
    machine = parse_mode(mode).machine()
    for worker in range(workers):
        assert machine.joined(worker, 0) == []
    return machine


def push(worker: int, sequence: int = 0, incarnation: int = 0) -> PushId:
    return PushId(worker, incarnation, sequence)


def test_bsp_applies_all_in_rank_order_whatever_the_order_of_arrival() -> None:
    machine = machine_of("bsp", 3)
    assert machine.pushed(push(2), 0) == []
    assert machine.pushed(push(0), 0) == []
    assert machine.waiting == {0: {1}, 2: {1}}
    assert machine.pushed(push(1), 0) == [
        Apply((push(0), push(1), push(2))),
        Admit(0),
        Admit(1),
        Admit(2),
    ]
    assert machine.version == 1
    assert machine.clocks == {0: 1, 1: 1, 2: 1}
    assert machine.waiting == {}


@pytest.mark.parametrize("event", ["left", "rested"])
def test_bsp_round_is_completed_by_who_goes(event: str) -> None:
    machine = machine_of("bsp", 2)
    machine.pushed(push(0), 0)
    assert getattr(machine, event)(1) == [Apply((push(0),)), Admit(0)]
    assert machine.active == {0}


def test_a_leaver_takes_its_pending_push_with_it() -> None:
    machine = machine_of("bsp", 3)
    machine.pushed(push(0), 0)
    machine.pushed(push(1), 0)
    assert machine.left(0) == [Drop(push(0))]
    assert machine.pushed(push(2), 0) == [Apply((push(1), push(2))), Admit(1), Admit(2)]
    assert machine.pushed(push(0, 1), 1) == [Drop(push(0, 1))]
    assert machine.members == {1, 2}


def test_a_new_incarnation_replaces_the_old_and_its_pending_push() -> None:
    machine = machine_of("bsp", 2)
    machine.pushed(push(1), 0)
    assert machine.joined(1, 1) == [Drop(push(1))]
    assert machine.pushed(push(1, 1), 0) == [Drop(push(1, 1))]
    assert machine.pushed(push(0), 0) == []
    assert machine.waiting == {0: {1}}
    fresh = push(1, 0, incarnation=1)
    assert machine.pushed(fresh, 0) == [Apply((push(0), fresh)), Admit(0), Admit(1)]


def test_old_news_of_a_join_changes_nothing() -> None:
    machine = machine_of("bsp", 1)
    machine.joined(0, 2)
    assert machine.joined(0, 2) == machine.joined(0, 1) == []
    assert machine.pushed(push(0, 0, incarnation=1), 0) == [Drop(push(0, 0, incarnation=1))]
    machine.left(0)
    machine.joined(0, 1)
    assert machine.members == set()


def test_who_comes_back_under_the_same_incarnation_is_not_applied_twice() -> None:
    machine = machine_of("asp", 1)
    machine.pushed(push(0, 5), 0)
    machine.left(0)
    machine.joined(0, 0)
    assert machine.pushed(push(0, 5), 0) == [Drop(push(0, 5)), Admit(0)]
    assert machine.pushed(push(0, 6), 1) == [Apply((push(0, 6),)), Admit(0)]


@pytest.mark.parametrize("mode", ["bsp", "backup:1", "ssp:1", "asp"])
def test_a_repeated_push_is_dropped_and_answered(mode: str) -> None:
    machine = machine_of(mode, 1)
    assert machine.pushed(push(0), 0) == [Apply((push(0),)), Admit(0)]
    assert machine.pushed(push(0), 0) == [Drop(push(0)), Admit(0)]
    assert machine.version == 1


def test_a_worker_that_waits_is_not_admitted_by_pushing_again() -> None:
    rounds = machine_of("bsp", 2)
    rounds.pushed(push(0), 0)
    assert rounds.pushed(push(0), 0) == []  # the very push that is pending: it stays so
    assert rounds.pushed(push(0, 1), 0) == [Drop(push(0, 1))]
    clocks = machine_of("ssp:0", 2)
    clocks.pushed(push(0), 0)
    assert clocks.pushed(push(0), 0) == [Drop(push(0))]
    assert clocks.pushed(push(0, 1), 0) == [Drop(push(0, 1))]
    assert clocks.clocks == {0: 1, 1: 0}


def test_a_push_wakes_its_worker() -> None:
    machine = machine_of("bsp", 2)
    machine.rested(0)
    machine.rested(1)
    assert machine.active == set()
    assert machine.pushed(push(1), 0) == [Apply((push(1),)), Admit(1)]
    assert machine.active == {1}


def test_a_rest_while_waiting_begins_when_admitted() -> None:
    machine = machine_of("bsp", 2)
    machine.pushed(push(0), 0)
    assert machine.rested(0) == []
    assert machine.active == {0, 1}
    assert machine.pushed(push(1), 0) == [Apply((push(0), push(1))), Admit(0), Admit(1)]
    assert machine.active == {1}
    assert machine.pushed(push(1, 1), 1) == [Apply((push(1, 1),)), Admit(1)]


def test_a_rest_while_waiting_can_be_taken_back() -> None:
    machine = machine_of("bsp", 2)
    machine.pushed(push(0), 0)
    machine.rested(0)
    machine.woke(0)
    machine.pushed(push(1), 0)
    assert machine.active == {0, 1}


def test_backup_goes_on_without_the_slowest_and_drops_what_comes_late() -> None:
    machine = machine_of("backup:1", 3)
    assert machine.pushed(push(2), 0) == []
    assert machine.pushed(push(0), 0) == [Apply((push(0), push(2))), Admit(0), Admit(2)]
    assert machine.pushed(push(1), 0) == [Drop(push(1)), Admit(1)]
    assert machine.pushed(push(1, 1), 1) == []
    assert machine.pushed(push(0, 1), 1) == [Apply((push(0, 1), push(1, 1))), Admit(0), Admit(1)]
    assert machine.version == 2
    assert machine.clocks == {0: 2, 1: 2, 2: 1}


def test_backup_with_fewer_left_than_spare_needs_one() -> None:
    machine = machine_of("backup:2", 3)
    machine.left(0)
    machine.left(1)
    assert machine.pushed(push(2), 0) == [Apply((push(2),)), Admit(2)]


def test_ssp_holds_who_leads_by_more_than_the_bound() -> None:
    machine = machine_of("ssp:1", 3)
    assert machine.pushed(push(0), 0) == [Apply((push(0),)), Admit(0)]
    assert machine.pushed(push(0, 1), 1) == [Apply((push(0, 1),))]
    assert machine.waiting == {0: {1, 2}}
    assert machine.pushed(push(1), 0) == [Apply((push(1),)), Admit(1)]
    assert machine.waiting == {0: {2}}
    assert machine.pushed(push(2), 0) == [Apply((push(2),)), Admit(0), Admit(2)]
    assert machine.clocks == {0: 2, 1: 1, 2: 1}


@pytest.mark.parametrize("event", ["left", "rested"])
def test_ssp_frees_the_held_when_the_slowest_goes(event: str) -> None:
    machine = machine_of("ssp:0", 3)
    machine.pushed(push(0), 0)
    machine.pushed(push(2), 0)
    assert getattr(machine, event)(1) == [Admit(0), Admit(2)]


def test_ssp_frees_the_held_when_the_slowest_is_replaced() -> None:
    machine = machine_of("ssp:0", 2)
    machine.pushed(push(0), 0)
    assert machine.joined(1, 1) == [Admit(0)]
    assert machine.clocks == {0: 1, 1: 1}


def test_ssp_admits_the_held_who_rest_when_nobody_else_is_left() -> None:
    machine = machine_of("ssp:0", 2)
    machine.pushed(push(0), 0)
    assert machine.rested(0) == []
    assert machine.left(1) == [Admit(0)]
    assert machine.active == set()
    machine.joined(2, 0)
    machine.woke(0)
    assert machine.clocks == {0: 1, 2: 1}


def test_joiners_and_wakers_start_with_the_slowest() -> None:
    machine = machine_of("ssp:2", 2)
    machine.rested(1)
    for sequence in range(5):
        machine.pushed(push(0, sequence), sequence)
    assert machine.clocks == {0: 5, 1: 0}
    machine.joined(2, 0)
    machine.woke(1)
    assert machine.clocks == {0: 5, 1: 5, 2: 5}
    machine.pushed(push(0, 5), 5)
    machine.rested(0)
    machine.woke(0)
    assert machine.clocks == {0: 6, 1: 5, 2: 5}


def test_asp_never_waits() -> None:
    machine = machine_of("asp", 2)
    for sequence in range(100):
        assert machine.pushed(push(0, sequence), 0) == [Apply((push(0, sequence),)), Admit(0)]
    assert machine.waiting == {}


@pytest.mark.parametrize("mode", ["bsp", "backup:1", "ssp:1", "asp"])
def test_strangers_are_harmless(mode: str) -> None:
    machine = machine_of(mode, 1)
    assert machine.pushed(push(7), 0) == [Drop(push(7))]
    assert machine.left(7) == machine.rested(7) == machine.woke(7) == []
    assert machine.members == machine.active == {0}


@pytest.mark.parametrize("mode", ["bsp", "backup:1", "ssp:1", "asp"])
def test_a_snapshot_survives_json_and_keeps_version_and_clocks(mode: str) -> None:
    machine = machine_of(mode, 1)
    for sequence in range(3):
        machine.pushed(push(0, sequence), sequence)
    restored = parse_mode(mode).machine()
    restored.restore(json.loads(json.dumps(machine.snapshot())))
    assert (restored.version, restored.clocks) == (3, {0: 3})
    assert restored.members == restored.active == set()
    restored.joined(0, 0)
    restored.joined(1, 0)
    assert restored.clocks == {0: 3, 1: 3}
    assert restored.snapshot()["version"] == 3


def test_nobody_is_held_after_a_restore() -> None:
    machine = machine_of("ssp:1", 2)
    machine.pushed(push(0), 0)
    machine.pushed(push(0, 1), 1)
    assert machine.waiting == {0: {1}}
    machine.restore(machine.snapshot())
    machine.joined(1, 0)
    machine.joined(0, 0)
    assert machine.clocks == {0: 2, 1: 1}
    assert machine.waiting == {}


# Quorum


def test_a_quorum_is_applied_together_in_order_of_arrival_and_nobody_waits_for_it() -> None:
    machine = machine_of("asp+quorum=3", 4)
    assert machine.pushed(push(2), 0) == [Hold(push(2)), Admit(2)]
    assert machine.pushed(push(0), 0) == [Hold(push(0)), Admit(0)]
    assert (machine.version, machine.waiting) == (0, {})
    assert machine.pushed(push(2, 1), 0) == [Apply((push(2), push(0), push(2, 1))), Admit(2)]
    assert machine.version == 1
    assert machine.clocks == {0: 1, 1: 0, 2: 2, 3: 0}


def test_a_held_push_counts_for_the_bound() -> None:
    machine = machine_of("ssp:0+quorum=3", 3)
    assert machine.pushed(push(0), 0) == [Hold(push(0))]
    assert machine.waiting == {0: {1, 2}}
    assert machine.pushed(push(1), 0) == [Hold(push(1))]
    assert machine.pushed(push(2), 0) == [
        Apply((push(0), push(1), push(2))),
        Admit(0),
        Admit(1),
        Admit(2),
    ]


def test_no_more_is_waited_for_than_there_are_active_workers() -> None:
    machine = machine_of("asp+quorum=4", 4)
    machine.pushed(push(0), 0)
    machine.pushed(push(1), 0)
    assert machine.rested(3) == []
    assert machine.left(2) == [Apply((push(0), push(1)))]
    assert machine.pushed(push(0, 1), 1) == [Hold(push(0, 1)), Admit(0)]
    assert machine.rested(0) == [Apply((push(0, 1),))]
    assert machine.pushed(push(1, 1), 2) == [Apply((push(1, 1),)), Admit(1)]


def test_nothing_stays_held_when_all_rest() -> None:
    machine = machine_of("asp+quorum=2", 2)
    machine.rested(1)
    machine.woke(1)
    machine.pushed(push(0), 0)
    assert machine.rested(1) == [Apply((push(0),))]
    machine.woke(1)
    machine.pushed(push(0, 1), 1)
    assert machine.rested(0) == [Apply((push(0, 1),))]


def test_a_held_push_outlives_its_worker_and_is_never_dropped() -> None:
    machine = machine_of("asp+quorum=3", 4)
    machine.pushed(push(0), 0)
    assert machine.pushed(push(0), 0) == [Hold(push(0)), Admit(0)]  # its answer was lost
    assert machine.left(0) == []
    assert machine.pushed(push(0), 0) == [Hold(push(0))]
    assert machine.joined(0, 1) == []
    assert machine.pushed(push(0), 0) == [Hold(push(0))]
    machine.pushed(push(1), 0)
    assert machine.pushed(push(2), 0) == [Apply((push(0), push(1), push(2))), Admit(2)]
    assert machine.pushed(push(0), 0) == [Drop(push(0))]


def test_a_held_push_sent_again_by_a_worker_that_waits() -> None:
    machine = machine_of("ssp:0+quorum=2", 2)
    machine.pushed(push(0), 0)
    assert machine.pushed(push(0), 0) == [Hold(push(0))]
    assert machine.pushed(push(1), 0) == [Apply((push(0), push(1))), Admit(0), Admit(1)]


def test_who_rests_once_admitted_completes_a_quorum() -> None:
    machine = machine_of("ssp:0+quorum=3", 3)
    machine.rested(2)
    machine.woke(2)
    machine.pushed(push(0), 0)
    machine.pushed(push(1), 0)
    machine.rested(0)
    assert machine.left(2) == [Apply((push(0), push(1))), Admit(0), Admit(1)]
    assert machine.active == {1}


# Switching


def switched(machine: Machine, mode: str) -> tuple[Machine, list[object]]:
    after, instructions = machine.switch(parse_mode(mode))
    assert (after.members, after.clocks.keys()) == (machine.members, machine.clocks.keys())
    return after, list(instructions)


def test_pushes_of_an_unfinished_round_are_applied_one_by_one() -> None:
    machine = machine_of("bsp", 3)
    machine.pushed(push(2), 0)
    machine.pushed(push(0), 0)
    machine, instructions = switched(machine, "asp")
    assert instructions == [Apply((push(0),)), Apply((push(2),)), Admit(0), Admit(2)]
    assert (machine.version, machine.clocks) == (2, {0: 1, 1: 0, 2: 1})
    assert machine.pushed(push(1), 0) == [Apply((push(1),)), Admit(1)]
    assert machine.pushed(push(2), 0) == [Drop(push(2)), Admit(2)]  # known to have been applied


def test_pushes_of_an_unfinished_round_become_part_of_a_quorum() -> None:
    machine = machine_of("bsp", 4)
    for worker in (3, 2, 0):
        machine.pushed(push(worker), 0)
    machine, instructions = switched(machine, "asp+quorum=2")
    assert instructions == [
        Hold(push(0)),
        Apply((push(0), push(2))),
        Hold(push(3)),
        Admit(0),
        Admit(2),
        Admit(3),
    ]
    assert machine.pushed(push(1), 0) == [Apply((push(3), push(1))), Admit(1)]


def test_who_may_not_go_on_in_the_new_mode_waits_on() -> None:
    machine = machine_of("bsp", 3)
    machine.pushed(push(0), 0)
    machine, instructions = switched(machine, "ssp:0")
    assert instructions == [Apply((push(0),))]
    assert machine.waiting == {0: {1, 2}}
    machine, instructions = switched(machine, "ssp:0")
    assert (instructions, machine.waiting) == ([], {0: {1, 2}})
    machine, instructions = switched(machine, "ssp:1")
    assert (instructions, machine.waiting) == ([Admit(0)], {})


def test_into_rounds_the_held_are_one_update_and_old_pushes_are_late() -> None:
    machine = machine_of("ssp:0+quorum=3", 3)
    machine.pushed(push(1), 0)
    machine.pushed(push(0), 0)
    machine, instructions = switched(machine, "bsp")
    assert instructions == [Apply((push(1), push(0))), Admit(0), Admit(1)]
    assert machine.version == 1
    assert machine.pushed(push(2), 0) == [Drop(push(2)), Admit(2)]
    for worker, sequence in ((0, 1), (1, 1)):
        assert machine.pushed(push(worker, sequence), 1) == []
    assert machine.pushed(push(2, 1), 1) == [
        Apply((push(0, 1), push(1, 1), push(2, 1))),
        Admit(0),
        Admit(1),
        Admit(2),
    ]


def test_a_round_goes_on_with_other_spares() -> None:
    machine = machine_of("bsp", 4)
    for worker in (0, 1, 2):
        machine.pushed(push(worker), 0)
    all_three = [Apply((push(0), push(1), push(2))), Admit(0), Admit(1), Admit(2)]
    assert switched(machine, "backup:2")[1] == all_three  # more than needed, and none is thrown away
    machine, instructions = switched(machine, "bsp")
    assert instructions == []
    machine.pushed(push(0), 0)
    assert machine.waiting == {0: {3}, 1: {3}, 2: {3}}


def test_a_wide_spread_of_clocks_comes_under_a_bound() -> None:
    machine = machine_of("asp", 3)
    for sequence in range(9):
        machine.pushed(push(0, sequence), sequence)
    machine, instructions = switched(machine, "ssp:2")
    assert instructions == []
    assert machine.clocks == {0: 9, 1: 7, 2: 7}
    assert machine.pushed(push(0, 9), 9) == [Apply((push(0, 9),))]
    assert machine.waiting == {0: {1, 2}}
    machine.pushed(push(1), 0)
    assert machine.pushed(push(2), 0) == [Apply((push(2),)), Admit(0), Admit(2)]


def test_a_tighter_bound_keeps_those_waiting_who_lead_by_a_step_too_many() -> None:
    machine = machine_of("ssp:3", 3)
    for sequence in range(4):
        machine.pushed(push(0, sequence), 0)
    machine.pushed(push(1), 0)
    assert machine.waiting == {0: {2}}
    machine, instructions = switched(machine, "ssp:1")
    assert instructions == []
    assert machine.clocks == {0: 4, 1: 2, 2: 2}
    assert machine.waiting == {0: {1, 2}}


def test_a_resting_leader_does_not_break_the_bound_when_it_wakes() -> None:
    machine = machine_of("asp", 2)
    for sequence in range(9):
        machine.pushed(push(0, sequence), sequence)
    machine.rested(0)
    machine, _ = switched(machine, "ssp:1")
    machine.woke(0)
    assert machine.clocks == {0: 9, 1: 8}


def test_a_rest_that_waits_survives_a_switch() -> None:
    machine = machine_of("bsp", 2)
    machine.pushed(push(0), 0)
    machine.rested(0)
    machine, instructions = switched(machine, "asp")
    assert instructions == [Apply((push(0),)), Admit(0)]
    assert machine.active == {1}


def test_a_rest_that_a_switch_begins_frees_those_it_held_back() -> None:
    machine = machine_of("asp", 3)
    for sequence in range(6):
        machine.pushed(push(1, sequence), sequence)
        machine.pushed(push(2, sequence), sequence)
    machine, _ = switched(machine, "bsp")
    machine.pushed(push(0), 12)
    machine.pushed(push(1, 6), 12)
    machine.rested(0)
    machine, instructions = switched(machine, "ssp:1")
    assert instructions == [Apply((push(0),)), Apply((push(1, 6),)), Admit(0), Admit(1)]
    assert (machine.clocks, machine.active) == ({0: 5, 1: 7, 2: 6}, {1, 2})


def test_a_switch_leaves_the_old_machine_alone_and_keeps_incarnations() -> None:
    old = machine_of("asp", 2)
    old.joined(0, 5)
    old.pushed(push(0, 0, incarnation=5), 0)
    new, _ = old.switch(parse_mode("bsp"))
    assert new.pushed(push(0), 0) == [Drop(push(0))]
    assert new.pushed(push(0, 0, incarnation=5), 0) == [Drop(push(0, 0, incarnation=5)), Admit(0)]
    new.left(0)
    assert old.members == {0, 1}
    assert new.snapshot().keys() == old.snapshot().keys()
