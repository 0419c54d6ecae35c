"""Seeded histories of a run's decider: every event, and all that follows from it, as one JSON line each.

python -m tests.golden.histories    writes traces.json anew (only when decisions are meant to change)
"""

import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.core.decider import Decider
from paceline.core.events import Answered, Event, event_from_json
from paceline.core.leases import Lease, LeaseBook
from paceline.core.modes import parse_mode, parse_schedule
from paceline.core.modes.lbfgs import num_answers
from paceline.core.rulings import Ruling
from paceline.core.steps import steps_to_json
from paceline.exceptions import PacelineError
from tests.deciding import said

RECORD = Path(__file__).parent / "traces.json"

CASES: dict[str, dict[str, Any]] = {
    "bsp": {},
    "bsp clipped": {"mode": "bsp", "clip_norm": 1.0},
    "bsp scheduled": {"mode": "bsp", "schedule": ("12=ssp:2", "30=asp")},
    "backup:1": {},
    "ssp:1": {},
    "ssp:1+batches=speed": {},
    "asp": {},
    "asp+quorum=2": {},
    "asp+damping=dc": {},
    "asp switched": {"mode": "asp", "switches": ["bsp", "ssp:1", "backup:1", "asp"]},
    "downpour:2,3": {},
    "easgd:3": {},
    "local:3": {},
    "hogwild": {},
    "sandblaster": {},
    "hybrid:asp": {"groups": ((0, 1), (2, 3))},
    "hybrid:bsp": {"groups": ((0, 1), (2, 3))},
    "asp without a loader": {"mode": "asp", "samples": 0},
    "bsp without a loader": {"mode": "bsp", "samples": 0},
    "bsp limited": {"mode": "bsp", "max_updates": 60},
    "bsp with two optimizers": {"mode": "bsp", "optimizers": 2},
}
_SILENT = (
    "heard",
    "retire",
    "count",
    "order",
    "give_back",
    "carry",
    "refuse",
    "skip",
    "spoiled",
    "vote",
    "call",
)
"""Events that nothing follows from at once."""
SEEDS = range(3)
EVENTS = 1200


def plain(value: Any) -> Any:
    """A result as JSON."""
    if isinstance(value, Lease):
        return [value.id, value.epoch, plain(value.ranges)]
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return value


class Subject:
    """The decider under test, spoken to in JSON."""

    def __init__(
        self,
        name: str,
        *,
        mode: str = "",
        samples: int = 40,
        schedule: tuple[str, ...] = (),
        optimizers: int = 1,
        **more: Any,
    ) -> None:
        spec = parse_mode(mode or name)
        self.lead = Decider(spec, norm_bound=50, schedule=parse_schedule(spec, schedule), **more)
        book = None
        if samples:
            book = LeaseBook(
                samples=samples, batch_size=4, drop_last=False, by_round=spec.by_round, copies=spec.copies
            )
        self.lead.begin(book, optimizers, None)
        self.optimizers = optimizers
        self.news: list[str] = []
        self.sick: list[int] = []

    def tell(self, event: list[Any]) -> Any:
        """What follows from an event: steps, or whom to answer what, as JSON."""
        happened = event_from_json(event)
        found = said(happened, self.decide(happened))
        return None if not found and event[0] in _SILENT else plain(found)

    def decide(self, event: Event) -> Ruling:
        ruling = self.lead.decide(event)
        self.news, self.sick = [*ruling.news], [*ruling.sick]
        return ruling

    def answered(self, parts: list[list[float]]) -> Any:
        """All servers have answered an `ask`."""
        return plain(steps_to_json(self.decide(Answered(tuple(map(tuple, parts)))).steps))

    def facts(self) -> list[Any]:
        """What else is to be the same."""
        lead, totals = self.lead, self.lead.totals
        counts = [totals.samples, totals.pushes, totals.dropped, totals.refused, totals.skipped]
        facts = [lead.version, lead.epoch, counts, self.news, self.sick, lead.ballot.reason]
        self.news, self.sick = [], []
        return facts


class History:
    """Workers come, take leases, push, vote, call, rest and go, by chance."""

    def __init__(self, subject: Subject, seed: int, workers: int, switches: list[str]) -> None:
        self.subject = subject
        self.rng = random.Random(seed)
        self.workers = workers
        self.switches = switches
        self.sequences = dict.fromkeys(range(workers), 0)
        self.numbers = dict.fromkeys(range(workers), 0)
        self.incarnations = dict.fromkeys(range(workers), 0)
        self.leases: dict[int, list[int]] = {}
        self.here: set[int] = set()
        self.lines: list[str] = []
        self.ill = seed % 2 == 1
        """Whether many pushes of worker 1 are not finite."""

    def tell(self, *event: Any) -> Any:
        sent = json.loads(json.dumps([*event]))
        try:
            found = self.subject.tell(sent)
        except PacelineError as error:
            found = {"error": str(error)}
        self.lines.append(json.dumps([sent, found, self.subject.facts()], allow_nan=False))
        self.answer_asks(found)
        return found

    def answer_asks(self, found: Any) -> None:
        for step in steps_in(found):
            if step[0] == "ask":
                parts = [[self.rng.uniform(0.1, 1) for _ in range(num_answers(step[1]))] for _ in range(2)]
                found = self.subject.answered(parts)
                self.lines.append(json.dumps([parts, found, self.subject.facts()], allow_nan=False))

    def settle(self) -> None:
        """What a server does after every message."""
        lead = self.subject.lead
        if lead.ballot.waiting:
            self.tell("verdicts")
        while lead.parks:
            answers, more = self.tell("granted", 4)
            for worker, leases, _ in answers:
                self.leases[worker] = [lease[0] for lease in leases]
            if not answers and not more:
                break
        if lead.collectives.callers:
            self.tell("answers")

    def run(self, events: int) -> Iterator[str]:
        for _ in range(events):
            self.one()
            self.settle()
            yield from self.lines
            self.lines.clear()
        yield json.dumps(self.subject.lead.snapshot())

    def one(self) -> None:
        rng, lead = self.rng, self.subject.lead
        if len(self.here) < self.workers and rng.random() < 0.3:
            worker = min({*range(self.workers)} - self.here)
            self.here.add(worker)
            self.leases[worker] = []
            self.sequences[worker] = 0
            self.tell("join", worker, self.incarnations[worker])
            return
        if not self.here:
            return
        worker = rng.choice(sorted(self.here))
        incarnation, chance = self.incarnations[worker], rng.random()
        if chance < 0.03:
            self.here.discard(worker)
            self.incarnations[worker] += 1
            self.tell("leave", worker, incarnation, rng.random() < 0.3)
            return
        busy = {*lead.machine.waiting, *lead.ballot.voters, *lead.collectives.callers}
        if worker in busy or worker in lead.missing_assigns:
            return
        self.numbers[worker] += 1
        number = self.numbers[worker]
        if chance < 0.05:
            self.tell("vote", worker, number, rng.choice(["any", "all", "main"]), rng.random() < 0.02)
        elif chance < 0.07:
            self.tell("call", worker, number, rng.choice(["a", "b"]), str(number))
        elif chance < 0.08:
            self.tell("load", worker, incarnation, number)
        elif chance < 0.09:
            self.tell("retire", rng.randrange(self.workers))
        elif chance < 0.10:
            self.tell("count", 3)
        elif chance < 0.11:
            self.tell("order", worker, lead.epoch, rng.choice(["f", "f", "f", "g"]), "S")
        elif chance < 0.12 and self.switches:
            self.tell("switch", rng.choice(self.switches))
        elif chance < 0.13:
            self.tell("spoiled", worker)
        elif chance < 0.16 and self.leases[worker]:
            name = rng.choice(["give_back", "carry", "refuse", "skip"])
            more = [2] if name == "skip" else []
            self.tell(name, worker, [self.leases[worker].pop()], *more)
        elif chance < 0.18:
            self.sequences[worker] += 1
            self.tell("heard", worker, number)
            self.tell("assign", worker, incarnation, self.sequences[worker])
        elif not self.leases[worker] and (lead.book is not None or rng.random() < 0.1):
            wait = rng.random() < 0.7
            found = self.tell("take", worker, lead.epoch, 2, wait, number)
            if isinstance(found, list):
                self.leases[worker] = [lease[0] for lease in found[0] or ()]
        else:
            self.push(worker, incarnation)

    def push(self, worker: int, incarnation: int) -> None:
        rng, lead = self.rng, self.subject.lead
        if rng.random() < 0.95:
            self.sequences[worker] += 1
        leases = [self.leases[worker].pop() for _ in range(min(1, len(self.leases[worker])))]
        late = rng.random() < 0.2
        void = rng.random() < (0.4 if worker == 1 and self.ill else 0.002)
        norm = rng.choice([0.5, 1.0, 1e6 if rng.random() < 0.1 else 2.0])
        facts = [max(0, lead.version - late), 4, leases, void, norm, rng.random() < 0.8]
        if self.subject.optimizers > 1:
            facts += [rng.randrange(2), 4]
        self.tell("push", worker, incarnation, self.sequences[worker], *facts)


def steps_in(found: Any) -> list[Any]:
    """The steps in what follows from an event."""
    if not isinstance(found, list):
        return []
    if found and isinstance(found[0], str):
        return [found]
    return [step for each in found for step in steps_in(each)]


def trace(name: str, seed: int) -> Iterator[str]:
    """One history, line by line."""
    options = dict(CASES[name])
    switches = options.pop("switches", [])
    workers = 4 if "groups" in options else 3
    return History(Subject(name, **options), seed, workers, switches).run(EVENTS)


def digest(lines: Iterator[str]) -> dict[str, Any]:
    """What is kept of a history: how many lines it has, and a hash of each tenth."""
    kept = [*lines]
    cuts = [len(kept) * i // 10 for i in range(11)]
    tenths = ["\n".join(kept[a:b]) for a, b in itertools.pairwise(cuts)]
    return {"lines": len(kept), "tenths": [hashlib.sha256(t.encode()).hexdigest()[:16] for t in tenths]}


if __name__ == "__main__":
    found = {name: [digest(trace(name, seed)) for seed in SEEDS] for name in CASES}
    rows = [
        f"{json.dumps(name)}: [\n  " + ",\n  ".join(map(json.dumps, d)) + "]" for name, d in found.items()
    ]
    RECORD.write_text("{\n" + ",\n".join(rows) + "\n}\n")
