"""Every mode against its update rule as the papers have it, replayed from the run's own log.

A run writes down which samples each step of each worker used, which versions it saw, and (pushes.csv) in
which order the pushes were applied. A sequential reference in plain torch, with nothing of Paceline in it,
then makes the same pushes in that very order and must end at the same parameters: 1e-10 on a quadratic in
float64, 1e-5 on a small network for digits in float32. The rules: docs/modes.md.
"""

import contextlib
import csv
import itertools
import json
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.comm.faults import FAULTS
from paceline.params import OptimizerSpec, describe
from paceline.ps.shard import Gradients, Shard
from tests.speed import first

COMMON = """
class Bowl(nn.Module):
    # A quadratic: every sample has a place and a curvature of its own in every direction.
    def __init__(self):
        super().__init__()
        self.left = nn.Parameter(torch.full((4,), 0.5, dtype=torch.float64))
        self.right = nn.Parameter(torch.full((5,), -0.5, dtype=torch.float64))

    def loss(self, place, curvature):
        w = torch.cat([self.left, self.right])
        return (curvature * (w - place) ** 2).sum(1).mean() / 2


class Net(nn.Module):
    # The digits CNN, tiny.
    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(1, 3, 3)
        self.head = nn.Linear(108, 10)

    def loss(self, image, label):
        return nn.functional.cross_entropy(self.head(torch.tanh(self.features(image)).flatten(1)), label)


def make_bowl(samples):
    g = torch.Generator().manual_seed(5)
    places = torch.randn(samples, 9, generator=g, dtype=torch.float64)
    return TensorDataset(places, 0.5 + torch.rand(samples, 9, generator=g, dtype=torch.float64))


def make_digits(samples):
    from sklearn.datasets import load_digits  # here: importing it takes a second

    digits = load_digits()
    images = torch.from_numpy(digits.images[:samples]).float().div_(16).unsqueeze(1)
    return TensorDataset(images, torch.from_numpy(digits.target[:samples]).long())


def make_problem(name, samples):
    torch.manual_seed(0)
    return (Bowl(), make_bowl(samples)) if name == "bowl" else (Net(), make_digits(samples))


def make_groups(model, lr):
    # Two groups, so that two servers both have something; the second learns more slowly.
    first, *rest = model.named_children() if list(model.children()) else model.named_parameters()
    first = [first[1]] if isinstance(first[1], nn.Parameter) else list(first[1].parameters())
    ids = {id(p) for p in first}
    rest = [p for p in model.parameters() if id(p) not in ids]
    return [{"params": first, "lr": lr}, {"params": rest, "lr": lr / 2}]
"""

SOURCE = (
    COMMON
    + """
import random, time
from paceline.worker import current_session

o = {"problem": "bowl", "optimizer": "SGD", "settings": {}, "lr": 0.1, "samples": 23, "batch": 2,
     "epochs": 3, "dither": 0.0, "slower": 0, "shuffle": True}
o |= json.loads(sys.argv[1])
torch.set_num_threads(1)
model, data = make_problem(o["problem"], o["samples"])
optimizer = getattr(torch.optim, o["optimizer"])(make_groups(model, o["lr"]), **o["settings"])
data = TensorDataset(*data.tensors, torch.arange(o["samples"]))
loader = DataLoader(data, batch_size=o["batch"], shuffle=o["shuffle"])
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
client = current_session().client
chance = random.SystemRandom()
steps = []
for _ in range(o["epochs"]):
    for x, y, ids in loader:
        model.loss(x, y).backward()
        read, pushes = client.version, client.numbers.sequence
        by_sample = o["slower"] and len(ids) * (o["slower"] if RANK == 1 else 1)
        end = time.perf_counter() + o["dither"] * (by_sample or chance.random())
        while time.perf_counter() < end:
            pass  # works: a slow worker, another one each step
        optimizer.step()
        optimizer.zero_grad()
        steps.append([ids.tolist(), read, client.version, pushes, client.numbers.sequence])
result(steps)
"""
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- the reference: problems ------------------------------------------------------------------------


@dataclass
class Problem:
    """Parameters as one flat vector, in the order of the model's state_dict."""

    start: Tensor
    rates: Tensor
    """The learning rate of each element."""
    gradient: Callable[[Tensor, Sequence[int]], Tensor]
    """At these parameters, of the mean loss of these samples."""
    loss: Callable[[Tensor], float]
    """Of all samples."""
    names: tuple[str, ...]


def problem_of(name: str = "bowl", lr: float = 0.1, samples: int = 23) -> Problem:
    space: dict[str, Any] = {"torch": torch, "nn": nn, "TensorDataset": torch.utils.data.TensorDataset}
    exec(COMMON, space)
    made = SimpleNamespace(**space)
    model, data = made.make_problem(name, samples)
    x, y = data.tensors
    names = dict(model.named_parameters())
    rate_of = {id(p): group["lr"] for group in made.make_groups(model, lr) for p in group["params"]}
    start = flat(names)
    rates = torch.cat([torch.full((p.numel(),), rate_of[id(p)], dtype=p.dtype) for p in names.values()])

    def parts(w: Tensor) -> dict[str, Tensor]:
        pieces = w.split([p.numel() for p in names.values()])
        return {n: piece.view(p.shape) for (n, p), piece in zip(names.items(), pieces, strict=True)}

    def within(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"of.{name}": value for name, value in state.items()}

    def autograd(w: Tensor, ids: Sequence[int]) -> Tensor:
        there = {n: p.clone().requires_grad_() for n, p in parts(w).items()}
        chosen = list(ids)
        loss = torch.func.functional_call(Loss(model), within(there), (x[chosen], y[chosen]))
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(there.values()))])

    def by_hand(w: Tensor, ids: Sequence[int]) -> Tensor:
        chosen = list(ids)
        return (y[chosen] * (w - x[chosen])).mean(0)

    def loss(w: Tensor) -> float:
        with torch.no_grad():
            return float(torch.func.functional_call(Loss(model), within(parts(w)), (x, y)))

    return Problem(start, rates, by_hand if name == "bowl" else autograd, loss, tuple(names))


class Loss(nn.Module):
    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.of = of

    def forward(self, *batch: Tensor) -> Tensor:
        return self.of.loss(*batch)


def flat(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in state.values()])


# --- the reference: replaying a log -----------------------------------------------------------------


@dataclass
class Step:
    """A step of one worker: its samples, and which version and how many pushes it had before and after."""

    ids: list[int]
    read: int
    version: int
    pushes_before: int
    pushes: int
    rests: bool = False
    """It pushed what it had left before it rested."""


@dataclass
class Part:
    """What one push brings to an update."""

    value: Tensor
    read: Tensor
    """The parameters of the version that the log says it was computed from."""
    staleness: int
    samples: int


Worker = Generator[Tensor, tuple[Tensor, Tensor], None]
"""Yields what it pushes, and is sent the servers' parameters before and after that."""
WorkerRule = Callable[[list[Step], list[Tensor]], Worker]
ServerRule = Callable[[Tensor, list[Part]], Tensor]


def rows_of(ran: Any) -> list[dict[str, int]]:
    with (ran.run.path / "pushes.csv").open() as file:
        return [{k: int(v) for k, v in row.items()} for row in csv.DictReader(file)]


def steps_of(ran: Any) -> dict[int, list[Step]]:
    found = {rank: [Step(*step) for step in steps] for rank, steps in ran.results().items()}
    for steps in found.values():
        for step, after in itertools.pairwise(steps):
            step.rests = after.pushes_before > step.pushes
    return found


def replay(ran: Any, problem: Problem, worker: WorkerRule, server: ServerRule) -> Tensor:
    """Make all pushes again in the order of the log, and check that the log says what it must."""
    versions = [problem.start]
    workers = {rank: worker(steps, versions) for rank, steps in steps_of(ran).items()}
    answers: dict[int, Any] = dict.fromkeys(workers)
    pushes, dropped = dict.fromkeys(workers, 0), 0
    for version, rows in itertools.groupby(rows_of(ran), key=lambda row: row["version"]):
        assert version == len(versions), "an update is missing in the log"
        parts = []
        for row in rows:
            rank = row["worker"]
            assert row["sequence"] >= pushes[rank], "a push is in the log twice"
            dropped += row["sequence"] - pushes[rank]
            while pushes[rank] <= row["sequence"]:
                value = workers[rank].send(answers[rank])
                pushes[rank] += 1
            assert row["staleness"] == version - 1 - row["read_version"]
            part = Part(value, versions[row["read_version"]], row["staleness"], row["samples"])
            parts.append((rank, part))
        versions.append(server(versions[-1], [part for _, part in parts]))
        for rank, _ in parts:
            answers[rank] = (versions[-2], versions[-1])
    for rank, rest in workers.items():
        dropped += len(list(_drained(rest, answers[rank])))
    assert dropped == ran.status.dropped, "pushes are missing in the log"
    return versions[-1]


def _drained(worker: Worker, answer: Any) -> Iterator[Tensor]:
    """What the worker pushed after its last push in the log."""
    with contextlib.suppress(StopIteration):
        while True:
            yield worker.send(answer)


def go(run: Any, mode: str, *, workers: int = 1, job: dict[str, Any] | None = None, **options: Any) -> Any:
    more = {"servers": 2, "threads": 1, **(job or {})}
    ran = run(SOURCE, workers=workers, mode=mode, args=(json.dumps(options),), **more)
    assert ran.error is None
    samples, epochs = options.get("samples", 23), options.get("epochs", 3)
    assert ran.status.samples == samples * epochs
    assert sum(row["samples"] for row in rows_of(ran)) == samples * epochs
    if not ran.status.dropped:  # the samples of what it drops are used again
        used = sorted(i for steps in steps_of(ran).values() for step in steps for i in step.ids)
        assert used == sorted(list(range(samples)) * epochs), ran.status.messages  # each once an epoch
    return ran


def trained(ran: Any, problem: Problem) -> Tensor:
    model = ran.model
    return flat({name: model[name] for name in problem.names})


def assert_as_replayed(ran: Any, problem: Problem, worker: WorkerRule, server: ServerRule) -> None:
    expected = replay(ran, problem, worker, server)
    got = trained(ran, problem)
    bound = 1e-10 if expected.dtype == torch.float64 else 1e-5
    assert (got - expected).abs().max() <= bound
    # Not because nothing happened.
    assert problem.loss(got) < 0.95 * problem.loss(problem.start)


# --- the reference: workers -------------------------------------------------------------------------

Stepping = Callable[[Tensor, Tensor], Tensor]
"""An optimizer of a worker's own: parameters and gradient in, parameters out."""


def sgd(problem: Problem) -> Stepping:
    return lambda x, g: x - problem.rates * g


def adam(problem: Problem) -> Stepping:
    """Kingma & Ba, algorithm 1."""
    mean, square, t = torch.zeros_like(problem.start), torch.zeros_like(problem.start), 0

    def step(x: Tensor, g: Tensor) -> Tensor:
        nonlocal mean, square, t
        t += 1
        mean = 0.9 * mean + 0.1 * g
        square = 0.999 * square + 0.001 * g**2
        return x - problem.rates * (mean / (1 - 0.9**t)) / ((square / (1 - 0.999**t)).sqrt() + 1e-8)

    return step


def gradients(problem: Problem) -> WorkerRule:
    """Each step's gradient, at the version that it read."""

    def worker(steps: list[Step], versions: list[Tensor]) -> Worker:
        for step in steps:
            yield problem.gradient(versions[step.read], step.ids)

    return worker


def sums(problem: Problem, push: int, fetch: int, *, rounds: bool = False) -> WorkerRule:
    """Downpour's client (Dean 2012): accumulate, step, push every so often, fetch every so often.

    It also pushes before it rests at an epoch's end. In rounds it reads what came of its push.
    """

    def worker(steps: list[Step], versions: list[Tensor]) -> Worker:
        w, accumulated = versions[0], torch.zeros_like(versions[0])
        unsent = behind = 0
        rested = False
        for step in steps:
            if rested or (rounds and not unsent):
                w = versions[step.read]
            rested = step.rests
            g = problem.gradient(w, step.ids)
            accumulated = accumulated + g
            w = w - problem.rates * g
            unsent, behind = unsent + 1, behind + 1
            if unsent == push or step.rests:
                yield accumulated
                unsent, accumulated = 0, torch.zeros_like(w)
            if step.rests:
                behind = 0  # what it reads next is what came of that push, or is newer
            elif behind == fetch:
                w, behind = versions[step.version], 0
        if unsent:
            yield accumulated

    return worker


def deltas(problem: Problem, period: int, optimizer: Callable[[Problem], Stepping] = sgd) -> WorkerRule:
    """Local SGD and DiLoCo: how far the worker has moved in a period (or what an epoch has left of one)."""

    def worker(steps: list[Step], versions: list[Tensor]) -> Worker:
        own, old, w, unsent = optimizer(problem), versions[0], versions[0], 0
        for step in steps:
            if not unsent:
                old = w = versions[step.read]
            w = own(w, problem.gradient(w, step.ids))
            unsent += 1
            if unsent == period or step.rests:
                yield old - w
                unsent = 0
        if unsent:
            yield old - w

    return worker


def elastic(problem: Problem, period: int, optimizer: Callable[[Problem], Stepping] = sgd) -> WorkerRule:
    """EASGD in the authors' order: the gradient at the value before the elastic step."""

    def worker(steps: list[Step], versions: list[Tensor]) -> Worker:
        own, x = optimizer(problem), versions[0]
        for t, step in enumerate(steps):
            g = problem.gradient(x, step.ids)
            if t and t % period == 0:
                before, after = yield x
                x = x - (after - before)
            x = own(x, g)
            if step.rests:
                before, after = yield x
                x = x - (after - before)
        yield x

    return worker


def elastic_with_momentum(problem: Problem, period: int, momentum: float) -> WorkerRule:
    """EAMSGD: v = δv - η·g(x + δv); x = x + v."""

    def worker(steps: list[Step], versions: list[Tensor]) -> Worker:
        x, v = versions[0], torch.zeros_like(versions[0])
        for t, step in enumerate(steps):
            g = problem.gradient(x + momentum * v, step.ids)
            if t and t % period == 0:
                before, after = yield x
                x = x - (after - before)
            v = momentum * v - problem.rates * g
            x = x + v
            if step.rests:
                before, after = yield x
                x = x - (after - before)
        yield x

    return worker


# --- the reference: servers -------------------------------------------------------------------------


def mean_of(parts: list[Part], scale: Callable[[int], float] = lambda staleness: 1.0) -> Tensor:
    """By samples, each contribution damped by itself."""
    total = sum(part.samples for part in parts)
    return sum((scale(p.staleness) * p.samples / total * p.value for p in parts), torch.zeros(()))


def applied_with_sgd(problem: Problem, scale: Callable[[int], float] = lambda staleness: 1.0) -> ServerRule:
    return lambda w, parts: w - problem.rates * mean_of(parts, scale)


def shortened(parts: list[Part]) -> float:
    """How much of its length an update of these parts keeps by default."""
    total = sum(part.samples for part in parts)
    return sum(part.samples / total / (part.staleness + 1) for part in parts)


def applied_with_less_momentum(problem: Problem, momentum: float = 0.0) -> ServerRule:
    """The default: 1 - momentum grows with the staleness, and once it is 1 the rate shrinks."""
    velocity: Tensor | float = 0.0

    def server(w: Tensor, parts: list[Part]) -> Tensor:
        nonlocal velocity
        decay = (1 - momentum) / shortened(parts) if momentum else 1.0
        velocity = max(0.0, 1 - decay) * velocity + mean_of(parts)
        rate = 1 / max(1.0, decay) if momentum else shortened(parts)
        return w - problem.rates * rate * velocity

    return server


def applied_with_adagrad(problem: Problem, *, plain: bool = False) -> ServerRule:
    """η_i = γ / √(Σ g²), by default divided by the staleness and one."""
    squares = torch.zeros_like(problem.start)

    def server(w: Tensor, parts: list[Part]) -> Tensor:
        nonlocal squares
        g = mean_of(parts)
        squares = squares + g**2
        return w - problem.rates * (1 if plain else shortened(parts)) * g / (squares.sqrt() + 1e-10)

    return server


def averaged() -> ServerRule:
    return lambda w, parts: w - mean_of(parts)


def applied_with_nesterov(lr: float = 0.7, momentum: float = 0.9) -> ServerRule:
    """An outer step; DiLoCo's own unless told otherwise."""
    velocity: Tensor | float = 0.0

    def server(w: Tensor, parts: list[Part]) -> Tensor:
        nonlocal velocity
        delta = mean_of(parts)
        velocity = momentum * velocity + delta
        return w - lr * (delta + momentum * velocity)

    return server


def applied_with_what_fits_4_steps() -> ServerRule:
    part = math.log(4) / math.log(500)
    return applied_with_nesterov(1 - 0.3 * part, 0.9 * part)


def drawn_together(alpha: float) -> ServerRule:
    return lambda centre, parts: centre + alpha * (parts[0].value - centre)


def delay_compensated(problem: Problem) -> ServerRule:
    """DC-ASGD (Zheng 2017), λ = 0.04."""

    def server(w: Tensor, parts: list[Part]) -> Tensor:
        ((g, backup),) = ((part.value, part.read) for part in parts)
        return w - problem.rates * (g + 0.04 * g * g * (w - backup))

    return server


def gap_aware(problem: Problem) -> ServerRule:
    """Divided by 1 + |w - w_pulled| / C, where C is the mean length of a step so far."""
    lengths: list[Tensor] = []

    def server(w: Tensor, parts: list[Part]) -> Tensor:
        (part,) = parts
        gap = (w - part.read).abs()
        if lengths:
            typical = torch.stack(lengths).mean(0)
            gap = torch.where(gap > 0, gap / typical, 0.0)
        new = w - problem.rates * part.value / (1 + gap)
        lengths.append((new - w).abs())
        return new

    return server


DAMPED: dict[str, Callable[[Problem], ServerRule]] = {
    "none": applied_with_sgd,
    "momentum": applied_with_less_momentum,
    "staleness": lambda problem: applied_with_sgd(problem, lambda tau: 1 / tau if tau else 1.0),
    "dynsgd": lambda problem: applied_with_sgd(problem, lambda tau: 1 / (tau + 1)),
    "dc": delay_compensated,
    "gap": gap_aware,
}

SLOW = {"dither": 0.003}
DIGITS = {"problem": "digits", "lr": 0.2, "samples": 60, "batch": 8}
LINKS = [{"link": "shm"}, {"link": "tcp"}]
by_link = pytest.mark.parametrize("job", first(1, LINKS, ["shm", "tcp"]))


def digits() -> Problem:
    return problem_of("digits", lr=0.2, samples=60)


def staleness_of(ran: Any) -> set[int]:
    return {row["staleness"] for row in rows_of(ran)}


# --- asynchronous gradients -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damping", "job"),
    first(3, [*((damping, LINKS[0]) for damping in DAMPED), ("dc", LINKS[1]), ("gap", LINKS[1])]),
    ids=lambda value: value if isinstance(value, str) else value["link"],
)
def test_asp_with_damping_is_its_rule_in_the_order_of_the_log(run, damping, job):
    ran = go(run, f"asp+damping={damping}", workers=3, job=job, **SLOW)
    assert max(staleness_of(ran)) >= 2, "nothing was stale"
    problem = problem_of()
    assert_as_replayed(ran, problem, gradients(problem), DAMPED[damping](problem))


def test_consgd_is_asp_with_steps_divided_by_the_number_of_workers(run):
    ran = go(run, "asp+damping=consgd", workers=3, **SLOW)
    assert max(staleness_of(ran)) >= 2, "nothing was stale"
    problem = problem_of()
    assert_as_replayed(ran, problem, gradients(problem), applied_with_sgd(problem, lambda tau: 1 / 3))


@pytest.mark.parametrize("mode", first(1, ["asp", "ssp:2"]))
@pytest.mark.parametrize("momentum", first(1, [0.9, 0.5]))
def test_by_default_staleness_takes_from_the_scripts_momentum(run, mode, momentum):
    ran = go(run, mode, workers=3, settings={"momentum": momentum}, lr=0.02, **SLOW)
    assert max(staleness_of(ran)) >= 1, "nothing was stale"
    problem = problem_of(lr=0.02)
    assert_as_replayed(ran, problem, gradients(problem), applied_with_less_momentum(problem, momentum))


@pytest.mark.parametrize("damping", first(1, ["dc", "gap"]))
def test_asp_with_damping_on_digits(run, damping):
    ran = go(run, f"asp+damping={damping}", workers=2, **DIGITS, **SLOW)
    assert max(staleness_of(ran)) >= 1
    assert_as_replayed(ran, digits(), gradients(digits()), DAMPED[damping](digits()))


@pytest.mark.parametrize("optimizer", first(1, ["SGD", "Adam"]))
def test_delay_compensation_and_gap_without_staleness_are_asp_to_the_bit(run, optimizer):
    plain, *damped = (
        go(run, f"asp+damping={damping}", optimizer=optimizer, lr=0.05).model
        for damping in ("none", "momentum", "dc", "gap", "staleness", "dynsgd")
    )
    for model in damped:
        assert all(torch.equal(model[name], plain[name]) for name in plain)


@by_link
@pytest.mark.parametrize("mode", ["ssp:1+quorum=2", "asp+quorum=2+damping=none"])
def test_a_quorum_makes_an_update_of_the_mean_of_so_many(run, mode, job):
    ran = go(run, mode, workers=3, job=job, **SLOW)
    sizes = [len(list(rows)) for _, rows in itertools.groupby(rows_of(ran), key=lambda row: row["version"])]
    assert set(sizes) <= {1, 2} and sizes.count(2) > 10
    problem = problem_of()
    server = DAMPED["none" if "damping=none" in mode else "momentum"](problem)
    assert_as_replayed(ran, problem, gradients(problem), server)


@pytest.mark.parametrize("damping", ["staleness", "dynsgd"])
def test_damping_weighs_each_contribution_of_a_quorum_by_itself(run, damping):
    ran = go(run, f"asp+quorum=2+damping={damping}", workers=3, **SLOW)
    updates = [list(rows) for _, rows in itertools.groupby(rows_of(ran), key=lambda row: row["version"])]
    assert any(len({row["staleness"] for row in rows}) == 2 for rows in updates), "all equally stale"
    problem = problem_of()
    assert_as_replayed(ran, problem, gradients(problem), DAMPED[damping](problem))


@by_link
def test_a_run_that_is_switched_is_each_modes_rule_in_turn(run, job):
    """Whatever memory a worker reads in a mode, it holds the version that the log says."""
    schedule = [
        "6=asp+damping=none",
        "14=bsp",
        "20=ssp:1",  # damped, without saying so
        "28=backup:1",
        "34=asp+damping=dc",
        "46=bsp",
        "50=asp+quorum=2+damping=none",
    ]
    ran = go(run, "bsp", workers=3, epochs=9, job={**job, "schedule": schedule}, **SLOW)
    assert ran.status.mode == "asp+quorum=2+damping=none"
    assert {0, 1} <= staleness_of(ran)
    problem = problem_of()
    plain, compensated = applied_with_sgd(problem), delay_compensated(problem)
    shorter = applied_with_less_momentum(problem)
    versions = itertools.count(1)

    def server(w: Tensor, parts: list[Part]) -> Tensor:
        version = next(versions)
        rule = compensated if 34 < version <= 46 else shorter if 20 < version <= 28 else plain
        return rule(w, parts)

    assert_as_replayed(ran, problem, gradients(problem), server)


@by_link
def test_ssp_with_batches_by_speed_counts_every_sample_the_same(run, job):
    """Batches of up to 8; worker 1 takes ten times as long for a sample."""
    options = {"workers": 2, "samples": 160, "batch": 8, "epochs": 3, "dither": 0.0002, "slower": 10}
    ran = go(run, "ssp:1+batches=speed", job=job, **options)
    problem = problem_of(samples=160)

    def server(w: Tensor, parts: list[Part]) -> Tensor:
        (part,) = parts
        return w - problem.rates * part.value * part.samples / 8 / (part.staleness + 1)

    assert_as_replayed(ran, problem, gradients(problem), server)
    smallest = {rank: min(len(step.ids) for step in steps) for rank, steps in steps_of(ran).items()}
    assert smallest[1] < 8
    assert sum(row["samples"] for row in rows_of(ran) if row["worker"] == 1) < 160


# --- downpour and periods ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "push, fetch, workers", first(2, [(2, 3, 2), (1, 1, 2), (2, 2, 2), (2, 3, 1), (3, 1, 2)])
)
@pytest.mark.parametrize("outer", ["", "+outer=own", "+damping=none"])
def test_downpour(run, push, fetch, outer, workers):
    own, plain = "own" in outer, "none" in outer
    lr = 0.05 if own else 0.2
    ran = go(run, f"downpour:{push},{fetch}{outer}", workers=workers, lr=lr, **(SLOW if workers > 1 else {}))
    problem = problem_of(lr=lr)
    server = applied_with_less_momentum(problem) if own else applied_with_adagrad(problem, plain=plain)
    assert_as_replayed(ran, problem, sums(problem, push, fetch), server)


def test_downpour_over_tcp(run):
    ran = go(run, "downpour:2,3", workers=2, lr=0.2, job={"link": "tcp"}, **SLOW)
    problem = problem_of(lr=0.2)
    assert_as_replayed(ran, problem, sums(problem, 2, 3), applied_with_adagrad(problem))


@pytest.mark.slow
@pytest.mark.parametrize("link", first(1, ["tcp", "shm"]))
def test_downpour_over_links_that_break_again_and_again(run, monkeypatch, link):
    """Some of its requests bring nothing back and some carry nothing, and orders overtake them."""
    faults = [f"{kind} {role}:*@1-1000:30%" for kind in ("drop", "hangup") for role in ("worker", "server")]
    monkeypatch.setenv(FAULTS, "; ".join(faults))
    ran = go(run, "downpour:2,3", workers=2, lr=0.2, job={"link": link}, **SLOW)
    problem = problem_of(lr=0.2)
    assert_as_replayed(ran, problem, sums(problem, 2, 3), applied_with_adagrad(problem))
    assert ran.status.restarts == 0
    assert "is back over another socket" in ran.log("server", 0) + ran.log("server", 1)


@pytest.mark.slow
def test_downpour_on_digits(run):
    ran = go(run, "downpour:2,2+outer=own", workers=2, **{**DIGITS, "lr": 0.1}, **SLOW)
    problem = problem_of("digits", lr=0.1, samples=60)
    assert_as_replayed(ran, problem, sums(problem, 2, 2), applied_with_less_momentum(problem))


@by_link
@pytest.mark.parametrize("samples", [23, 17], ids=["even", "one-rests"])
def test_bsp_with_a_period_applies_the_mean_of_sums(run, job, samples):
    """With 17 samples one worker makes a step more an epoch, while the other rests."""
    ran = go(run, "bsp+period=2", workers=2, samples=samples, job=job, **SLOW)
    problem = problem_of(samples=samples)
    assert_as_replayed(ran, problem, sums(problem, 2, 2, rounds=True), applied_with_sgd(problem))
    assert ran.status.dropped == 0


@pytest.mark.parametrize(
    "mode",
    first(
        2,
        [
            "asp+period=3+damping=dynsgd",
            "backup:1+period=2",
            "ssp:1+period=2",
            "asp+period=2+damping=dc",
            "asp+period=2+damping=gap",
            "asp+period=2+quorum=2",
        ],
    ),
)
def test_other_modes_with_a_period(run, mode):
    ran = go(run, mode, workers=2, **SLOW)
    period = 3 if "=3" in mode else 2
    problem = problem_of()
    default = "none" if mode.startswith("backup") else "momentum"
    server = DAMPED[mode.partition("damping=")[2] or default](problem)
    worker = sums(problem, period, period, rounds=mode.startswith("backup"))
    assert_as_replayed(ran, problem, worker, server)


# --- elastic averaging ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", first(1, [2, 1]))
@pytest.mark.parametrize("period", first(1, [3, 1]))
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_easgd(run, period, optimizer, workers):
    dither = SLOW if workers > 1 else {}
    ran = go(run, f"easgd:{period}", workers=workers, optimizer=optimizer, **dither)
    problem = problem_of()
    own = {"SGD": sgd, "Adam": adam}[optimizer]
    assert_as_replayed(ran, problem, elastic(problem, period, own), drawn_together(0.9 / workers))


def test_easgd_over_tcp_with_a_beta_of_its_own(run):
    ran = go(run, "easgd:2,0.5", workers=2, job={"link": "tcp"}, **SLOW)
    problem = problem_of()
    assert_as_replayed(ran, problem, elastic(problem, 2), drawn_together(0.25))


@pytest.mark.slow
def test_easgd_on_digits(run):
    ran = go(run, "easgd:3", workers=2, **DIGITS, **SLOW)
    assert_as_replayed(ran, digits(), elastic(digits(), 3), drawn_together(0.45))


@pytest.mark.parametrize("workers", first(1, [2, 1]))
@pytest.mark.parametrize("momentum", first(1, [0.0, 0.8], ["the-papers-0.99", "0.8"]))
def test_eamsgd_takes_the_gradient_ahead_of_the_worker(run, momentum, workers):
    """Against the paper's form: torch's Nesterov is another parametrisation of it."""
    lr = 0.01
    more = {"settings": {"momentum": momentum}, "lr": lr, **(SLOW if workers > 1 else {})}
    ran = go(run, "eamsgd:2", workers=workers, **more)
    problem = problem_of(lr=lr)
    worker = elastic_with_momentum(problem, 2, momentum or 0.99)
    assert_as_replayed(ran, problem, worker, drawn_together(0.9 / workers))


# --- local steps, in rounds -------------------------------------------------------------------------

ROUNDS = {
    "local:4": averaged,
    "diloco:4": applied_with_what_fits_4_steps,
    "diloco:4+outer=nesterov": applied_with_nesterov,
}


@by_link
@pytest.mark.parametrize("samples", first(1, [17, 23], ["one-rests", "even"]))
@pytest.mark.parametrize("mode", ROUNDS)
def test_local_and_diloco(run, mode, samples, job):
    """With 17 samples one worker makes a step more an epoch, and pushes it while the other rests."""
    ran = go(run, mode, workers=2, samples=samples, lr=0.05, job=job, **SLOW)
    if samples == 17:
        assert {len(steps) for steps in steps_of(ran).values()} == {12, 15}
        assert 1 in [
            len(list(rows)) for _, rows in itertools.groupby(rows_of(ran), key=lambda row: row["version"])
        ]
    problem = problem_of(lr=0.05, samples=samples)
    assert_as_replayed(ran, problem, deltas(problem, 4), ROUNDS[mode]())
    assert ran.status.dropped == 0


@pytest.mark.parametrize("mode", ROUNDS)
def test_local_and_diloco_with_adam_inside(run, mode):
    ran = go(run, mode, workers=2, optimizer="Adam", lr=0.02)
    problem = problem_of(lr=0.02)
    assert_as_replayed(ran, problem, deltas(problem, 4, adam), ROUNDS[mode]())


@pytest.mark.slow
def test_diloco_on_digits(run):
    ran = go(run, "diloco:4", workers=2, **{**DIGITS, "lr": 0.1})
    problem = problem_of("digits", lr=0.1, samples=60)
    assert_as_replayed(ran, problem, deltas(problem, 4), applied_with_what_fits_4_steps())


@pytest.mark.parametrize("samples", first(1, [17, 23], ["one-rests", "even"]))
def test_local_1_is_bsp(run, samples):
    problem = problem_of(samples=samples)
    one, two = (trained(go(run, mode, workers=2, samples=samples), problem) for mode in ("local:1", "bsp"))
    assert (one - two).abs().max() <= 1e-14
    assert not torch.equal(one, problem.start)


# --- hogwild ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer, more", [("SGD", {"momentum": 0.9}), ("Adam", {})])
def test_hogwild_with_one_worker_is_plain_pytorch_to_the_bit(run, optimizer, more):
    ran = go(run, "hogwild", optimizer=optimizer, settings=more, lr=0.02)
    problem = problem_of(lr=0.02)
    w = [p.clone().requires_grad_() for p in problem.start.split([4, 5])]
    groups = [{"params": [w[0]], "lr": 0.02}, {"params": [w[1]], "lr": 0.01}]
    plain = getattr(torch.optim, optimizer)(groups, **more, fused=True)
    space: dict[str, Any] = {"torch": torch, "nn": nn, "TensorDataset": torch.utils.data.TensorDataset}
    exec(COMMON, space)
    x, y = space["make_bowl"](23).tensors
    for step in steps_of(ran)[0]:
        plain.zero_grad()
        (y[step.ids] * (torch.cat(w) - x[step.ids]) ** 2).sum(1).mean().div(2).backward()
        plain.step()
    assert torch.equal(trained(ran, problem), torch.cat(w))
    assert staleness_of(ran) == {0}


def test_hogwild_with_two_workers_learns(run):
    """Updates may get lost, so there is nothing to compare with but the loss."""
    ran = go(run, "hogwild", workers=2, **SLOW)
    problem = problem_of()
    best = problem.loss(torch.linalg.lstsq(torch.eye(9, dtype=torch.float64), optimum(problem)).solution)
    start, end = problem.loss(problem.start), problem.loss(trained(ran, problem))
    assert end - best < 0.2 * (start - best)


def optimum(problem: Problem) -> Tensor:
    """Where the gradient of all samples is zero: on a quadratic, one Newton step away."""
    everyone = range(23)
    zero = torch.zeros_like(problem.start)
    slope = problem.gradient(zero + 1, everyone) - problem.gradient(zero, everyone)
    return -problem.gradient(zero, everyone) / slope


# --- what the elastic update conserves --------------------------------------------------------------


class Centre:
    """A shard of two slices that holds these parameters, and a worker's memory for it."""

    def __init__(self, centre: Tensor, worker: Tensor) -> None:
        half = len(centre) // 2
        model = nn.ParameterList([nn.Parameter(centre[:half]), nn.Parameter(centre[half:])])
        optimizer = torch.optim.SGD([{"params": [p]} for p in model], lr=1.0)
        layout, _ = describe(model, optimizer)
        assert len(layout.slices) == 2
        self._base, self._memory = (torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(2))
        self.shard = Shard(layout, OptimizerSpec.of(optimizer), layout.slices, self._base)
        self.values = Gradients(self._memory, layout, layout.slices)
        self.reply = self.shard.flats(torch.zeros(layout.nbytes, dtype=torch.uint8))
        for flats, values in ((self.shard.flats(self._base), centre), (self.values.flat, worker)):
            for view, part in zip(flats, (values[:half], values[half:]), strict=True):
                view.copy_(part)

    def mix(self, alpha: float) -> tuple[Tensor, Tensor]:
        """An exchange: the centre and the worker's parameters after it."""
        self.shard.mix(3, self.values, alpha, [self.reply])
        return self.parameters, torch.cat(self.reply)

    @property
    def parameters(self) -> Tensor:
        return torch.cat(self.shard.flats(self._base))


numbers = st.floats(-1e6, 1e6, width=32)
pairs = st.lists(st.tuples(numbers, numbers), min_size=2, max_size=12)
precisions = st.sampled_from([torch.float32, torch.float64])


def columns(rows: list[tuple[float, float]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    centre, worker = zip(*rows, strict=True)
    return torch.tensor(centre, dtype=dtype), torch.tensor(worker, dtype=dtype)


@settings(max_examples=150)
@given(pairs, st.floats(0.0, 1.0), precisions)
def test_an_elastic_exchange_moves_both_sides_by_the_same_difference(rows, alpha, dtype):
    """So it conserves their sum, and takes neither beyond the other."""
    centre, worker = columns(rows, dtype)
    new_centre, new_worker = Centre(centre, worker).mix(alpha)
    scale = torch.maximum(centre.abs(), worker.abs())
    exact = 4 * torch.finfo(dtype).eps * scale
    assert torch.all(((new_centre + new_worker) - (centre + worker)).abs() <= exact)
    difference = alpha * (worker - centre)
    assert torch.all((new_centre - (centre + difference)).abs() <= exact)
    assert torch.all((new_worker - (worker - difference)).abs() <= exact)
    assert torch.all((new_centre - new_worker).abs() <= (centre - worker).abs() + exact)


@settings(max_examples=150)
@given(pairs, st.sampled_from(["nan", "inf", "-inf"]), st.data())
def test_an_elastic_exchange_with_nan_leaves_the_centre_alone(rows, bad, data):
    """The slice with it is refused, and the worker gets the centre there; the other slice is mixed."""
    centre, worker = columns(rows, torch.float64)
    place = data.draw(st.integers(0, len(rows) - 1))
    broken = worker.clone()
    broken[place] = float(bad)
    mixed = Centre(centre, broken)
    new_centre, new_worker = mixed.mix(0.5)
    half = len(rows) // 2
    spoilt, sound = (slice(half), slice(half, None)) if place < half else (slice(half, None), slice(half))
    assert torch.equal(new_centre[spoilt], centre[spoilt])
    assert torch.equal(new_worker[spoilt], centre[spoilt])
    as_if_sound = Centre(centre, worker).mix(0.5)
    assert torch.equal(new_centre[sound], as_if_sound[0][sound])
    assert torch.equal(new_worker[sound], as_if_sound[1][sound])
    assert mixed.shard.take_refusals() == {3: 1}


def test_an_elastic_exchange_whose_difference_overflows_leaves_the_centre_alone():
    centre, worker = torch.tensor([1e308, 1.0]).double(), torch.tensor([-1e308, 2.0]).double()
    centre[0], worker[0] = 1.5e308, -1.5e308
    mixed = Centre(centre, worker)
    new_centre, new_worker = mixed.mix(0.5)
    assert new_centre.tolist() == [1.5e308, 1.5]
    assert new_worker.tolist() == [1.5e308, 1.5]
    assert mixed.shard.take_refusals() == {3: 1}


def test_an_elastic_exchange_without_values_gives_the_worker_the_centre():
    centre = torch.tensor([1.0, 2.0, 3.0]).double()
    mixed = Centre(centre, torch.zeros(3).double())
    mixed.shard.mix(3, None, 0.5, [mixed.reply])
    assert torch.equal(mixed.parameters, centre)
    assert torch.equal(torch.cat(mixed.reply), centre)
