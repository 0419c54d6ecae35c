"""Switching modes in the middle of everything: what a run promises holds over random orders of events.

`World` plays workers against a decider, as the lead server does: they take leases, push, rest at an epoch's
end, die and come back, while the mode is switched at random points and by random schedules. Its account of
who reads what comes from the steps alone.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.events import Push
from paceline.core.leases import LeaseBook
from paceline.core.modes import ModeSpec, PushId, Schedule, parse_mode
from tests.deciding import JsonDecider

MODES = [
    "bsp",
    "backup:1",
    "ssp:0",
    "ssp:1",
    "ssp:3+damping=dynsgd",
    "asp",
    "asp+damping=dc",
    "asp+quorum=2",
    "ssp:1+quorum=2",
    "ssp:0+quorum=3+damping=staleness",
]


@dataclass
class Worker:
    incarnation: int
    told: ModeSpec
    """The mode that it was told of last: it says where it reads."""
    version: int
    epoch: int = 0
    sequence: int = 0
    waits: bool = False
    leases: list[int] = field(default_factory=list)
    samples: int = 0


class World:
    def __init__(self, seed: int, *, workers: int, switches: float, deaths: float, epochs: int = 3) -> None:
        self.rng = random.Random(seed)
        self.happened: Counter[str] = Counter()
        self.epochs = epochs
        self.switches, self.deaths = switches, deaths
        self.fitting = [m for m in map(parse_mode, MODES) if self._fits(m, workers)]
        start = self.rng.choice(self.fitting)
        versions = sorted(self.rng.sample(range(1, 40), self.rng.choice([0, 0, 1, 3])))
        schedule = Schedule(start, tuple((v, self.rng.choice(self.fitting)) for v in versions))
        self.samples = self.rng.randint(workers, 60)
        self.lead = JsonDecider(start, schedule=schedule)
        self.lead.book = LeaseBook(
            samples=self.samples,
            batch_size=self.rng.randint(1, 5),
            drop_last=False,
            by_round=start.by_round,
        )
        self.mode = start
        """As of the last step: what servers are in."""
        self.updates = 0
        self.workers: dict[int, Worker] = {}
        self.reads: dict[PushId, int] = {}
        self.held: set[PushId] = set()
        self.applied: set[PushId] = set()
        self.dropped: set[PushId] = set()
        self.void: set[PushId] = set()
        for rank in range(workers):
            self.join(rank, 0)

    @staticmethod
    def _fits(mode: ModeSpec, workers: int) -> bool:
        return (mode.spare or 0) < workers and mode.quorum <= workers

    # Events

    def join(self, rank: int, incarnation: int) -> None:
        self.act(self.lead.join(rank, incarnation))
        # The welcome comes behind the steps.
        self.workers[rank] = Worker(incarnation, self.mode, self.lead.version)

    def run(self, most: int = 20_000) -> None:
        for _ in range(most):
            if not self.workers:
                return
            self.event()
        raise AssertionError(f"no end in sight: {self.lead.mode}, {self.workers}")

    def event(self) -> None:
        chance = self.rng.random()
        if chance < self.switches:
            self.switch()
        elif chance < self.switches + self.deaths:
            self.die()
        else:
            able = [rank for rank, worker in self.workers.items() if not worker.waits]
            assert able, f"nobody can go on in {self.lead.mode}: {self.lead.machine.waiting}"
            self.go_on(self.rng.choice(able))

    def switch(self) -> None:
        waiting = sum(worker.waits for worker in self.workers.values())
        resting = len(self.workers.keys() - self.lead.machine.active)
        self.happened["switch while some wait"] += waiting > 0
        self.happened["switch while some rest"] += 0 < resting < len(self.workers)
        self.happened["switch while all rest"] += resting == len(self.workers)
        self.happened["switch while something is held"] += bool(self.held)
        self.act(self.lead.switch(self.rng.choice(self.fitting)))

    def die(self) -> None:
        rank = self.rng.choice(list(self.workers))
        worker = self.workers.pop(rank)
        self.happened["death"] += 1
        self.act(self.lead.leave(rank, worker.incarnation, finished=False))
        self.join(rank, worker.incarnation + 1)

    def go_on(self, rank: int) -> None:
        worker = self.workers[rank]
        if worker.leases:
            self.push(rank)
        elif worker.epoch == self.epochs:
            del self.workers[rank]
            self.act(self.lead.leave(rank, worker.incarnation, finished=True))
        else:
            self.take(rank, wait=self.rng.random() < 0.5)

    def push(self, rank: int) -> None:
        worker = self.workers[rank]
        push = PushId(rank, worker.incarnation, worker.sequence)
        void = self.rng.random() < 0.03
        if void:
            self.void.add(push)
        self.reads[push] = worker.version
        known = Push(
            id=push,
            read_version=worker.version,
            samples=worker.samples,
            leases=tuple(worker.leases),
            void=void,
        )
        worker.sequence += 1
        worker.leases, worker.samples, worker.waits = [], 0, True
        self.act(self.lead.push(known))

    def take(self, rank: int, *, wait: bool) -> None:
        worker = self.workers[rank]
        # From here on it does not read until it has its answer.
        worker.waits = True
        leases, steps = self.lead.take(rank, worker.epoch, self.rng.randint(1, 3), wait=wait)
        if leases is not None:
            self.granted(rank, leases, over=self.lead.over(worker.epoch), rested=wait)
        self.happened["rest"] += leases is None
        self.act(steps)

    # What the lead server does about the lead's answers

    def act(self, steps: list[list[Any]]) -> None:
        self.hear(steps)
        while True:
            answers, more = self.lead.granted(self.rng.randint(1, 4))
            if not answers and not more:
                return
            self.hear(more)
            for rank, leases, over in answers:
                self.granted(rank, leases, over=over, rested=True)

    def granted(self, rank: int, leases: Any, *, over: bool, rested: bool) -> None:
        worker = self.workers[rank]
        worker.waits = False
        worker.leases += [lease.id for lease in leases]
        worker.samples += sum(lease.samples for lease in leases)
        worker.epoch += over and not leases
        if rested or worker.told != self.mode:  # it has fetched
            worker.version = self.lead.version
        worker.told = self.mode

    def hear(self, steps: list[list[Any]]) -> None:
        for step in steps:
            match step:
                case ["mode", text]:
                    self.mode = parse_mode(text)
                    self.happened["switched"] += 1
                    self.happened[f"into {'rounds' if self.mode.spare is not None else 'clocks'}"] += 1
                case ["apply", parts]:
                    self.check_apply(parts)
                case ["hold", *push]:
                    assert PushId(*push) not in self.applied
                    self.held |= {PushId(*push)} - self.void
                case ["drop", *push]:
                    assert PushId(*push) not in self.applied
                    self.held.discard(PushId(*push))  # somebody else was first with its samples
                    self.dropped.add(PushId(*push))
                    self.happened["drop"] += 1
                case ["admit", rank, version]:
                    assert version == self.updates
                    worker = self.workers.get(rank)
                    if worker is not None:
                        worker.waits, worker.version, worker.told = False, version, self.mode
                case ["left", *_]:
                    pass
                case _:
                    raise AssertionError(f"a step that nobody expects: {step}")

    def check_apply(self, parts: list[list[Any]]) -> None:
        readers = [r for r, w in self.workers.items() if not w.waits and w.told.in_place]
        assert not readers, f"written while {readers} read it, in {self.mode}"
        for *push, weight, scale in parts:
            push = PushId(*push)
            assert push in self.reads and push not in self.applied | self.dropped | self.void
            staleness = self.updates - self.reads[push]
            assert staleness >= 0
            if self.mode.spare is not None and push not in self.held:
                assert staleness == 0, "in rounds everything is of the round's version"
            assert weight > 0 and 0 < scale <= 1
            self.applied.add(push)
            self.held.discard(push)
            self.happened["applied of the dead"] += not self.is_alive(push)
        self.updates += 1

    def is_alive(self, push: PushId) -> bool:
        worker = self.workers.get(push.worker)
        return worker is not None and worker.incarnation == push.incarnation

    # At the end

    def check_books(self) -> None:
        lead = self.lead
        accounts = lead.book.accounts()
        assert [a["samples"] for a in accounts] == [self.samples] * (self.epochs + 1)
        for account in accounts[:-1]:
            assert account["applied"] + account["refused"] == self.samples
            assert account["unused"] == 0
        assert accounts[-1] | {"epoch": 0} == {
            "epoch": 0,
            "samples": self.samples,
            "applied": 0,
            "refused": 0,
            "skipped": 0,
            "unused": 0,
        }
        assert lead.totals.samples == sum(a["applied"] for a in accounts)
        assert lead.totals.pushes == len(self.applied)
        assert not self.held, "held for ever"
        assert not lead.snapshot()["leases"]["pool"] or lead.book.remaining == self.samples
        assert lead.version == self.updates
        assert lead.mode == self.mode
        assert not lead.machine.members


def test_every_sample_counts_once_whatever_is_switched_when() -> None:
    happened: Counter[str] = Counter()

    @settings(max_examples=600)
    @given(
        st.integers(0, 2**64),
        st.integers(1, 5),
        st.sampled_from([0.0, 0.02, 0.2]),
        st.sampled_from([0.0, 0.03]),
    )
    def check(seed: int, workers: int, switches: float, deaths: float) -> None:
        world = World(seed, workers=workers, switches=switches, deaths=deaths)
        world.run()
        world.check_books()
        happened.update(world.happened)

    check()
    # The rare orders were among them.
    for event in (
        "into rounds",
        "into clocks",
        "switch while some wait",
        "switch while some rest",
        "switch while something is held",
        "death",
        "drop",
        "rest",
    ):
        assert happened[event] > 50, (event, happened)
    assert happened["applied of the dead"] > 5, happened


def lead_of(mode: str, *, workers: int = 3, samples: int = 60, **more: Any) -> JsonDecider:
    spec = parse_mode(mode)
    lead = JsonDecider(spec, **more)
    lead.book = LeaseBook(samples=samples, batch_size=2, drop_last=False, by_round=spec.by_round)
    for worker in range(workers):
        lead.join(worker, 0)
    return lead


def pushed(lead: JsonDecider, worker: int, sequence: int, version: int) -> list[list[Any]]:
    leases, _ = lead.take(worker, 0, 1, wait=False)
    assert leases
    return lead.push(
        Push(
            id=PushId(worker, 0, sequence),
            read_version=version,
            samples=leases[0].samples,
            leases=(leases[0].id,),
            void=False,
        )
    )


@pytest.mark.parametrize("to", ["asp", "ssp:1", "backup:1"])
def test_out_of_bsp_the_round_is_finished_first(to):
    """Workers read the servers' memory: nothing may be written there before all of them have pushed."""
    lead = lead_of("bsp")
    assert pushed(lead, 0, 0, 0) == []
    assert lead.switch(parse_mode(to)) == []
    assert pushed(lead, 1, 0, 0) == []
    steps = pushed(lead, 2, 0, 0)
    assert [step[0] for step in steps] == ["apply", "mode", "admit", "admit", "admit"]
    assert steps[1] == ["mode", to]
    assert [p[0] for p in steps[0][1]] == [0, 1, 2]
    assert lead.mode == parse_mode(to)


def test_out_of_bsp_when_all_rest_nothing_is_waited_for():
    lead = lead_of("bsp", workers=2, samples=4)
    for worker in (0, 1):
        pushed(lead, worker, 0, 0)
    # Worker 0 leaves its loop early and waits for the next epoch; worker 1 has finished this one.
    lead.take(0, 1, 1, wait=True)
    lead.take(1, 1, 1, wait=True)
    assert lead.switch(parse_mode("asp")) == [["mode", "asp"]]


def test_into_bsp_what_was_computed_from_an_older_version_is_dropped_and_its_samples_go_back():
    lead = lead_of("asp", workers=2, samples=8)
    assert pushed(lead, 0, 0, 0)[0][0] == "apply"
    before = lead.book.remaining
    assert lead.switch(parse_mode("bsp")) == [["mode", "bsp"]]
    assert pushed(lead, 1, 0, 0) == [["drop", 1, 0, 0], ["admit", 1, 1]]
    assert lead.book.remaining == before


def test_into_bsp_what_is_held_makes_an_update_before_anybody_is_told():
    lead = lead_of("asp+quorum=3")
    assert pushed(lead, 0, 0, 0) == [["hold", 0, 0, 0], ["admit", 0, 0]]
    steps = lead.switch(parse_mode("bsp"))
    assert [step[0] for step in steps] == ["mode", "apply"]
    assert steps[1][1][0][:3] == [0, 0, 0]


def test_out_of_backup_whoever_waits_goes_on_at_once():
    lead = lead_of("backup:1")
    assert pushed(lead, 0, 0, 0) == []
    steps = lead.switch(parse_mode("asp"))
    assert [step[0] for step in steps] == ["mode", "apply", "admit"]


def test_a_switch_to_the_mode_it_is_in_is_nothing():
    lead = lead_of("asp")
    assert lead.switch(parse_mode("asp")) == []
    assert pushed(lead, 0, 0, 0)[0][0] == "apply"


def test_a_switch_back_before_the_round_is_over_takes_the_first_one_back():
    lead = lead_of("bsp", workers=2)
    pushed(lead, 0, 0, 0)
    lead.switch(parse_mode("asp"))
    lead.switch(parse_mode("bsp"))
    assert [step[0] for step in pushed(lead, 1, 0, 0)] == ["apply", "admit", "admit"]
    assert lead.mode == parse_mode("bsp")


@pytest.mark.parametrize(("start", "chosen"), [("bsp", "backup:1"), ("asp", "bsp")])
def test_a_persons_choice_stands_until_the_schedules_next_turn(start, chosen):
    turns = ((2, parse_mode("ssp:1")), (5, parse_mode("asp+damping=dc")))
    lead = lead_of(start, workers=2, schedule=Schedule(parse_mode(start), turns))
    lead.leave(1, 0, finished=False)
    seen = {0: str(lead.mode)}
    for sequence in range(6):
        if lead.version == 3:
            assert lead.switch(parse_mode(chosen)) == [["mode", chosen]]
        pushed(lead, 0, sequence, lead.version)
        seen[lead.version] = str(lead.mode)
    assert seen == {
        0: start,
        1: start,
        2: "ssp:1",
        3: "ssp:1",
        4: chosen,
        5: "asp+damping=dc",
        6: "asp+damping=dc",
    }


def test_a_restored_lead_does_not_repeat_turns_that_were_before_its_checkpoint():
    schedule = Schedule(parse_mode("bsp"), ((2, parse_mode("asp")), (4, parse_mode("ssp:1"))))
    lead = lead_of("bsp", workers=1, schedule=schedule)
    for sequence in range(3):
        pushed(lead, 0, sequence, lead.version)
    snapshot = lead.snapshot()
    assert snapshot["mode"] == "asp"
    # A person chose bsp for the rest: the turn at 2 is past.
    again = lead_of("bsp", workers=0, schedule=schedule)
    again.restore(snapshot)
    again.join(0, 0)
    assert pushed(again, 0, 0, 3)[1] == ["mode", "ssp:1"]


def test_leases_are_dealt_as_the_mode_of_the_moment_wants():
    """By rounds in rank order in bsp, so that a run is repeatable; to whoever comes in asp."""
    lead = lead_of("asp", workers=2, samples=16)

    def first_of(worker: int) -> int:
        leases, _ = lead.take(worker, 0, 1, wait=False)
        return leases[0].ranges[0][0]

    assert first_of(1) == 0
    lead.switch(parse_mode("bsp"))
    assert (first_of(1), first_of(0)) == (4, 2)
    assert first_of(1) == 8  # 6 is kept for worker 0
    lead.book.deal_by_round(False)
    assert first_of(1) == 6  # and is anybody's again
