"""The decision to end a run early: the same answer to all that ask together, and nobody waits for ever."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.ballot import Ballot
from paceline.core.events import Push
from paceline.core.leases import LeaseBook
from paceline.core.modes import PushId, parse_mode
from tests.deciding import JsonDecider, copied, replay


def settled(ballot: Ballot, members=(0, 1), busy=(), *, together=True) -> list[tuple[int, bool]]:
    return ballot.settle({*members}, {*busy}, together=together)


@pytest.mark.parametrize(
    ("who", "wants", "stop"),
    [
        ("any", (False, True), True),
        ("any", (False, False), False),
        ("all", (False, True), False),
        ("all", (True, True), True),
        ("main", (False, True), False),
        ("main", (True, False), True),
    ],
)
def test_whose_condition_counts(who, wants, stop):
    ballot = Ballot()
    for worker, want in enumerate(wants):
        assert settled(ballot) == []
        ballot.vote(worker, 1, who, want)
    assert settled(ballot) == [(0, stop), (1, stop)]
    assert (ballot.reason is not None) == stop


def test_a_member_that_waits_for_a_round_is_not_waited_for():
    ballot = Ballot()
    ballot.vote(1, 1, "any", False)
    assert ballot.awaited({0, 1, 2}, {2}) == {0}
    assert settled(ballot, (0, 1, 2), busy=(0, 2)) == [(1, False)]


def test_without_rounds_each_is_answered_at_once_and_a_decision_holds():
    ballot = Ballot()
    ballot.vote(0, 1, "any", True)
    assert settled(ballot, together=False) == [(0, True)]
    ballot.vote(1, 1, "any", False)
    assert settled(ballot, together=False) == [(1, True)]


def test_all_counts_the_last_vote_of_every_member_also_when_one_leaves():
    ballot = Ballot()
    ballot.vote(0, 1, "all", True)
    assert settled(ballot, together=False) == [(0, False)]
    ballot.vote(1, 1, "all", False)
    assert settled(ballot, together=False) == [(1, False)]
    ballot.forget(1)
    ballot.vote(0, 2, "all", True)
    assert settled(ballot, (0,), together=False) == [(0, True)]


def test_without_worker_0_the_lowest_rank_is_the_main_one():
    ballot = Ballot()
    ballot.vote(1, 1, "main", True)
    ballot.vote(2, 1, "main", False)
    assert settled(ballot, (1, 2)) == [(1, True), (2, True)]


def test_a_vote_that_comes_again_changes_nothing_and_gets_the_answer_that_was_given():
    ballot = Ballot()
    ballot.vote(0, 7, "any", False)
    assert settled(ballot, (0,)) == [(0, False)]
    ballot.vote(0, 7, "any", True)
    assert not ballot.waiting and ballot.answer_to(0, 7) is False and ballot.answer_to(0, 8) is None


def test_the_first_reason_counts_and_answers_those_who_wait():
    ballot = Ballot()
    ballot.vote(0, 1, "any", False)
    ballot.stop("its time was up")
    ballot.stop("another reason")
    assert settled(ballot) == [(0, True)] and ballot.reason == "its time was up"


def test_a_replaced_worker_begins_anew():
    ballot = Ballot()
    ballot.vote(1, 5, "any", True)
    ballot.forget(1)
    ballot.vote(1, 1, "any", False)
    ballot.vote(0, 6, "any", False)
    assert settled(ballot) == [(0, False), (1, False)]


# --- in the decider, with scripts that do what scripts do ---------------------------------------------


class Script:
    """A worker's script: epochs of steps, with a vote after each epoch or each step."""

    def __init__(self, rank: int, rng: random.Random, *, every_step: bool, epochs: int) -> None:
        self.rank, self.rng = rank, rng
        self.every_step, self.epochs = every_step, epochs
        self.begin(0)

    def begin(self, incarnation: int) -> None:
        self.incarnation, self.epoch, self.sequence = incarnation, 0, 0
        self.leases: list[int] = []
        self.doing = "take"
        self.blocked = self.over = False
        self.version = self.calls = 0
        self.answers: list[bool] = []


class Run:
    """All of them with a JsonDecider: one random event after the other, until all have ended."""

    def __init__(self, mode: str, seed: int, *, who: str, every_step: bool, faults: bool) -> None:
        self.rng = random.Random(seed)
        self.faults, self.who = faults, who
        self.lead = JsonDecider(parse_mode(mode))
        self.lead.book = LeaseBook(
            samples=14, batch_size=2, drop_last=False, by_round=self.lead.mode.by_round
        )
        self.scripts = {rank: Script(rank, self.rng, every_step=every_step, epochs=4) for rank in range(3)}
        self.together: list[set[int]] = []
        self.after_stop = 0
        for rank in self.scripts:
            self.tell("join", rank, 0)

    def tell(self, *event):
        said = replay(self.lead, json.loads(json.dumps([*event])))
        if event[0] in ("verdicts", "granted"):
            return said
        steps = said[1] if event[0] == "take" else said or []
        self.admit(steps)
        if self.lead.ballot.waiting:
            answers = self.tell("verdicts")
            assert len({stop for _, stop in answers}) <= 1, "asked together, answered differently"
            for rank, stop in answers:
                script = self.scripts[rank]
                script.blocked = False
                script.answers.append(stop)
                script.doing = "end" if stop else "take"
        if self.lead.parks:
            answers, more = self.tell("granted", 1)
            for rank, leases, over in answers:
                self.granted(self.scripts[rank], leases, over)
            self.admit(more)
        return said

    def admit(self, steps):
        for step in steps:
            if step[0] == "admit":
                script = self.scripts[step[1]]
                if script.doing == "push":
                    script.blocked, script.version = False, step[2]
                    script.doing = "vote" if script.every_step else "take"
                    if self.lead.ballot.reason is not None:
                        script.doing = "vote"  # its loop ends before the next batch

    def granted(self, script, leases, over):
        script.blocked = False
        if leases:
            script.leases, script.doing, script.version = (
                [lease.id for lease in leases],
                "push",
                self.lead.version,
            )
        elif over:
            script.epoch += 1
            script.doing = "end" if script.every_step and script.epoch == script.epochs else "take"
            if not script.every_step:
                script.doing = "vote"

    def step(self, script):
        rank = script.rank
        if self.faults and self.rng.random() < 0.03 and script.incarnation < 2:
            self.tell("leave", rank, script.incarnation, False)
            script.begin(script.incarnation + 1)
            script.epoch = self.lead.epoch
            self.tell("join", rank, script.incarnation)
        elif script.doing == "push":
            assert self.lead.ballot.reason is None or self.after_stop < 100
            self.after_stop += self.lead.ballot.reason is not None
            script.blocked, script.sequence = True, script.sequence + 1
            facts = [script.version, 2, script.leases, False, None, True]
            self.tell("push", rank, script.incarnation, script.sequence, *facts)
        elif script.doing == "take":
            if script.epoch >= script.epochs:
                script.doing = "end"
                return
            script.blocked = True
            leases, _ = self.tell("take", rank, script.epoch, 1, True, 0)
            if leases is not None:
                self.granted(script, leases, self.lead.over(script.epoch))
        elif script.doing == "vote":
            script.blocked, script.calls = True, script.calls + 1
            self.tell("vote", rank, script.calls, self.who, self.rng.random() < 0.1)
        elif script.doing == "end":
            script.blocked, script.doing = True, "ended"
            self.tell("leave", rank, script.incarnation, True)

    def play(self) -> None:
        for _ in range(5000):
            ready = [s for s in self.scripts.values() if not s.blocked]
            if not ready:
                break
            self.step(self.rng.choice(ready))
        stuck = {s.rank: s.doing for s in self.scripts.values() if s.doing != "ended"}
        assert not stuck, f"waits for ever: {stuck}"


MODES = ["bsp", "backup:1", "local:2", "ssp:1", "asp", "asp+quorum=2"]


@given(st.sampled_from(MODES), st.sampled_from(["any", "all", "main"]), st.booleans(), st.integers(0, 10**6))
def test_no_script_waits_for_ever_whoever_leaves_and_joins(mode, who, every_step, seed):
    Run(mode, seed, who=who, every_step=every_step, faults=True).play()


@given(st.sampled_from(["bsp", "local:2"]), st.sampled_from(["any", "all", "main"]), st.integers(0, 10**6))
def test_in_rounds_the_same_call_has_the_same_answer_on_every_worker(mode, who, seed):
    run = Run(mode, seed, who=who, every_step=False, faults=False)
    run.play()
    answers = [script.answers for script in run.scripts.values()]
    assert answers[0] == answers[1] == answers[2] and answers[0]


def test_a_follower_knows_the_votes_and_decides_the_same():
    lead = JsonDecider(parse_mode("bsp"))
    for rank in (0, 1):
        lead.join(rank, 0)
    replay(lead, ["vote", 0, 1, "any", True])
    other = copied(lead.decider)
    for each in (lead, other):
        assert each.verdicts() == []
        replay(each, ["vote", 1, 1, "any", False])
        assert each.verdicts() == [(0, True), (1, True)]
        assert each.ballot.answer_to(1, 1) is True


def test_after_the_last_update_loops_are_over_and_those_who_wait_for_leases_hear_it():
    lead = JsonDecider(parse_mode("bsp"), max_updates=1)
    lead.book = LeaseBook(samples=3, batch_size=1, drop_last=False, by_round=True)
    for rank in (0, 1):
        lead.join(rank, 0)
    (lease,), _ = lead.take(0, 0, 1, wait=False)
    (other,), _ = lead.take(1, 0, 1, wait=False)
    for rank, given_ in ((0, lease), (1, other)):
        lead.push(Push(id=PushId(rank, 0, 0), read_version=0, samples=1, leases=(given_.id,), void=False))
    assert lead.ballot.reason == "it made 1 updates (--max-updates)"
    assert lead.take(0, 0, 1, wait=True) == ((), []) and lead.over(0)


def test_the_update_that_reaches_the_samples_is_the_last():
    lead = JsonDecider(parse_mode("asp"), max_samples=5)
    lead.book = LeaseBook(samples=30, batch_size=2, drop_last=False, by_round=False)
    lead.join(0, 0)
    for sequence in range(3):
        assert lead.ballot.reason is None
        (lease,), _ = lead.take(0, 0, 1, wait=False)
        lead.push(Push(id=PushId(0, 0, sequence), read_version=0, samples=2, leases=(lease.id,), void=False))
    assert lead.ballot.reason == "it trained on 5 samples (--max-samples)"
