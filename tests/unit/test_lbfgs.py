"""L-BFGS by vector operations: against torch's own, and what its search promises."""

import json
import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.core.modes.lbfgs import Answer, Lbfgs, Move, Ops, merge_answers, num_answers
from paceline.exceptions import UsageError

Function = Callable[[Tensor], Tensor]


class VectorOps:
    """Servers that hold vectors. Vectors that were never written do not exist, as the driver must know."""

    def __init__(self, start: Tensor, shards: int) -> None:
        self.shards = [{"w": part.clone()} for part in start.tensor_split(shards)]
        self.answered = 0

    def run(self, ops: Ops) -> list[Answer]:
        ops = json.loads(json.dumps(ops, allow_nan=False))
        parts = [self._on_one(ops, vectors) for vectors in self.shards]
        self.answered += bool(num_answers(ops))
        return merge_answers(ops, json.loads(json.dumps(parts, allow_nan=False)))

    def __getitem__(self, name: str) -> Tensor:
        return torch.cat([vectors[name] for vectors in self.shards])

    def __setitem__(self, name: str, value: Tensor) -> None:
        parts = value.tensor_split(len(self.shards))
        for vectors, part in zip(self.shards, parts, strict=True):
            vectors[name] = part.clone()

    def _on_one(self, ops: Ops, vectors: dict[str, Tensor]) -> list[Answer]:
        answers = []
        for op in ops:
            match op:
                case ["copy", x, z]:
                    vectors[z] = vectors[x].clone()
                case ["scale", a, z]:
                    vectors[z].mul_(a)
                case ["combine", z, [[a, x], *rest]]:
                    assert z not in (x, *(name for _, name in rest))
                    total = vectors[x] * a
                    for b, y in rest:
                        total.add_(vectors[y], alpha=b)
                    vectors[z] = total
                case ["dot", x, y]:
                    answers.append(float(vectors[x].double() @ vectors[y].double()))
                case ["abs_sum", x]:
                    answers.append(float(vectors[x].abs().sum()))
                case ["abs_max", x]:
                    answers.append(float(vectors[x].abs().max()))
                case _:
                    raise AssertionError(f"unknown operation {op}")
        return [answer if math.isfinite(answer) else None for answer in answers]


class Minimisation:
    """A driver, its servers, and the function that the workers evaluate."""

    def __init__(self, function: Function, start: Tensor, *, shards: int = 1, **options: Any) -> None:
        self.function = function
        self.servers = VectorOps(start, shards)
        self.driver = Lbfgs(**options)
        self.accepted: list[float] = []
        self.outcomes: Counter[str] = Counter()

    def step(self) -> Move:
        w = self.servers["w"].requires_grad_()
        value = self.function(w)
        (gradient,) = torch.autograd.grad(value, w)
        self.servers["g"] = gradient
        move = self.driver.tell(self.servers.run(self.driver.ask()))
        assert num_answers(move.ops) == 0
        self.servers.run(move.ops)
        self.outcomes[move.outcome] += 1
        if move.outcome in ("moved", "converged"):
            self.accepted.append(value.item())
        return move

    def run(self, steps: int) -> float:
        """The value at the last accepted point."""
        for _ in range(steps):
            if self.step().outcome == "converged":
                break
        return self.accepted[-1]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def quadratic(size: int, condition: float, seed: int = 0) -> Function:
    turn, _ = torch.linalg.qr(normal(size, size, seed=seed))
    matrix = turn @ torch.diag(torch.logspace(0, math.log10(condition), size, dtype=torch.float64)) @ turn.T
    return lambda w: 0.5 * w @ (matrix.to(w.dtype) @ w)


def logistic(seed: int = 0) -> tuple[Function, Tensor]:
    inputs, truth = normal(80, 12, seed=seed), normal(12, seed=seed + 1)
    labels = torch.sign(inputs @ truth + normal(80, seed=seed + 2))
    return (
        lambda w: torch.nn.functional.softplus(-labels * (inputs @ w)).mean() + 1e-2 * w @ w,
        torch.zeros(12, dtype=torch.float64),
    )


def rosenbrock(w: Tensor) -> Tensor:
    return (100 * (w[1:] - w[:-1] ** 2) ** 2 + (1 - w[:-1]) ** 2).sum()


def waves(w: Tensor) -> Tensor:
    """Curved upwards here and downwards there."""
    return (torch.cos(2 * w) + 0.1 * w**2).sum() + 0.3 * torch.sin(w[:-1] * w[1:]).sum()


def pseudo_huber(w: Tensor) -> Tensor:
    """Convex, bent near its minimum and almost straight elsewhere: there a full step leads far beyond it."""
    scales = torch.logspace(0, 3, len(w), dtype=w.dtype)
    return (torch.sqrt(1 + scales * w**2) - 1).sum()


def path_of_torch(function: Function, start: Tensor, steps: int, **options: Any) -> list[Tensor]:
    w = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([w], max_iter=1, **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = function(w)
        value.backward()
        return value

    path = []
    for _ in range(steps):
        optimizer.step(closure)
        path.append(w.detach().clone())
    return path


# torch as the reference

PROBLEMS = {
    "quadratic": (quadratic(15, 50.0), normal(15), 35),
    "logistic": (*logistic(), 40),
    "rosenbrock": (rosenbrock, normal(6, seed=3), 30),
    "waves": (waves, normal(9, seed=1) * 2, 25),
    "started at the minimum": (quadratic(5, 2.0), torch.zeros(5, dtype=torch.float64), 3),
}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("options", [{"history": 4}, {"history": 10, "lr": 0.5}, {"history": 1}])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_step_is_that_of_torch(problem: str, options: dict[str, Any], shards: int) -> None:
    function, start, steps = PROBLEMS[problem]
    lr, history = options.get("lr", 1.0), options["history"]
    expected = path_of_torch(function, start, steps, lr=lr, history_size=history)
    ours = Minimisation(function, start, shards=shards, line_search=None, **options)
    for point in expected:
        ours.step()
        torch.testing.assert_close(ours.servers["w"], point, rtol=1e-6, atol=1e-6)


def test_the_reference_meets_every_case() -> None:
    """Those paths reach a full history, steps that curve downwards, and the minimum."""
    function, start, steps = PROBLEMS["waves"]
    ours = Minimisation(function, start, line_search=None, history=4)
    pairs = []
    for _ in range(steps):
        ours.step()
        pairs.append([pair["slot"] for pair in ours.driver.snapshot()["pairs"]])
    assert any(before == after and len(before) == 4 for before, after in pairwise(pairs))
    assert {slot for slots in pairs for slot in slots} == {0, 1, 2, 3, 4}
    function, start, _ = PROBLEMS["quadratic"]
    ours = Minimisation(function, start, line_search=None)
    for _ in range(80):
        ours.step()
    assert ours.outcomes["converged"] > 1 and ours.outcomes["moved"] > 20


def test_shards_do_not_change_the_path() -> None:
    start = normal(10, seed=2)
    one, three = (Minimisation(rosenbrock, start, shards=n) for n in (1, 3))
    for _ in range(40):
        assert one.step().outcome == three.step().outcome
        torch.testing.assert_close(one.servers["w"], three.servers["w"], rtol=1e-6, atol=1e-6)
    assert one.outcomes["searching"] > 3


# What it costs


def test_one_round_trip_for_each_gradient() -> None:
    ours = Minimisation(rosenbrock, normal(8), history=5)
    asked = []
    for _ in range(50):
        asked.append(num_answers(ours.driver.ask()))
        ours.step()
    assert ours.servers.answered == 50
    assert max(asked) == 3 + 4 * (5 + 1)
    names = {f"{kind}{slot}" for kind in "sy" for slot in range(6)} | {"w", "g", "x", "p"}
    assert ours.servers.shards[0].keys() == names


def test_asking_again_does_no_harm() -> None:
    once, twice = (Minimisation(rosenbrock, normal(5, seed=1)) for _ in range(2))
    for _ in range(20):
        twice.servers["g"] = normal(5)
        if twice.outcomes:
            twice.servers.run(twice.driver.ask())
        once.step()
        twice.step()
    assert torch.equal(once.servers["w"], twice.servers["w"])


# The search


@settings(max_examples=40)
@given(st.integers(2, 30), st.floats(0, 7), st.integers(0, 1000), st.integers(1, 12))
def test_it_never_goes_up_on_a_convex_quadratic(size: int, decades: float, seed: int, history: int) -> None:
    function = quadratic(size, 10**decades, seed)
    ours = Minimisation(function, normal(size, seed=seed) * 10, shards=2, history=history)
    ours.run(50)
    assert all(after <= before * (1 + 1e-12) + 1e-15 for before, after in pairwise(ours.accepted))
    assert ours.outcomes["restarted"] == 0


@pytest.mark.parametrize("seed", range(4))
def test_it_converges_where_full_steps_diverge(seed: int) -> None:
    start = normal(20, seed=seed) * 5
    full = path_of_torch(pseudo_huber, start, 150)
    assert not pseudo_huber(full[-1]) < 1e6 * pseudo_huber(start)
    assert Minimisation(pseudo_huber, start).run(300) < 1e-6


@pytest.mark.parametrize("size", [2, 5, 10])
@pytest.mark.parametrize("seed", range(4))
def test_it_gets_through_a_curved_valley(size: int, seed: int) -> None:
    ours = Minimisation(rosenbrock, normal(size, seed=seed))
    assert ours.run(200) < 1e-8 or (
        size > 3 and ours.run(1) == pytest.approx(4, abs=0.1)
    )  # its other minimum
    assert ours.outcomes["converged"] and not ours.outcomes["restarted"]


def test_a_badly_scaled_quadratic_is_solved_in_about_as_many_gradients() -> None:
    function, start = quadratic(30, 1e3), normal(30)
    ours, full = (Minimisation(function, start, line_search=how) for how in ("backtrack", None))
    assert ours.run(300) < 1e-6 and full.run(300) < 1e-6
    assert ours.outcomes["searching"] > 0
    assert ours.outcomes.total() < 1.3 * full.outcomes.total()


def test_vectors_may_be_of_single_precision() -> None:
    function, start = quadratic(40, 1e3), normal(40).float()
    assert Minimisation(function, start, shards=3).run(300) < 1e-4 * function(start).item()


def test_a_point_without_a_finite_gradient_is_too_far() -> None:
    """A first step of length 50 leads beyond the wall at 1."""
    ours = Minimisation(lambda w: (-torch.sqrt(1 - w) - w).sum(), torch.zeros(2).double(), lr=100.0)
    assert [ours.step().outcome for _ in range(3)] == ["moved", "searching", "searching"]
    ours.driver.lr = 1.0
    ours.run(30)
    torch.testing.assert_close(ours.servers["w"], torch.full((2,), 0.75).double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("line_search", ["backtrack", None])
def test_so_is_one_for_which_samples_were_refused(line_search: Any) -> None:
    ours = Minimisation(rosenbrock, normal(4), line_search=line_search)
    ours.step()
    start, first = ours.servers["x"], ours.servers["w"]
    ours.servers["g"] = torch.zeros(4).double()  # what is left of it would look like a minimum
    move = ours.driver.tell(ours.servers.run(ours.driver.ask()), whole=False)
    ours.servers.run(move.ops)
    assert move.outcome == "searching"
    torch.testing.assert_close(ours.servers["w"] - start, (first - start) / 10)


def test_a_line_is_given_up_after_so_many_trials() -> None:
    ours = Minimisation(rosenbrock, normal(4), max_trials=3)
    for _ in range(5):
        ours.step()
    while ours.step().outcome != "moved":
        pass
    start = ours.servers["x"]
    nothing: list[Answer] = [None] * num_answers(ours.driver.ask())
    moves = [ours.driver.tell(nothing) for _ in range(3)]
    assert [move.outcome for move in moves] == ["searching", "searching", "restarted"]
    ours.servers.run(moves[-1].ops)
    assert torch.equal(ours.servers["w"], start)
    assert ours.driver.vectors == ()
    assert ours.run(200) < 1e-8


def test_a_start_without_a_finite_gradient_is_stuck() -> None:
    ours = Minimisation(lambda w: torch.log(w).sum(), torch.zeros(2).double())
    move = ours.step()
    assert (move.outcome, move.ops) == ("stuck", [])


def test_a_history_that_rounding_has_spoilt_is_dropped() -> None:
    ours = Minimisation(quadratic(6, 10.0), normal(6))
    for _ in range(5):
        ours.step()
    snapshot = ours.driver.snapshot()
    snapshot["trial"] = None
    snapshot["diagonal"] = -1.0
    ours.driver.restore(snapshot)
    assert ours.step().outcome == "moved"
    assert ours.driver.snapshot()["pairs"] == []
    assert ours.run(100) < 1e-8


# State


@pytest.mark.parametrize("line_search", ["backtrack", None])
def test_a_restored_driver_goes_on_bitwise(line_search: Any) -> None:
    """After every step: scalars through JSON, and of the vectors only those that it says it needs."""
    start = normal(7, seed=5)
    whole, cut = (Minimisation(rosenbrock, start, history=3, line_search=line_search) for _ in range(2))
    for _ in range(40):
        assert whole.step().outcome == cut.step().outcome
        assert torch.equal(whole.servers["w"], cut.servers["w"])
        snapshot = json.loads(json.dumps(cut.driver.snapshot(), allow_nan=False))
        cut.driver = Lbfgs(history=3, line_search=line_search)
        cut.driver.restore(snapshot)
        kept = {"w", *cut.driver.vectors}
        cut.servers.shards = [
            {n: v for n, v in vectors.items() if n in kept} for vectors in cut.servers.shards
        ]
        assert cut.driver.snapshot() == snapshot
        assert len(kept) <= 2 * 3 + 4
    assert whole.driver.iterations == cut.driver.iterations > 10


@pytest.mark.parametrize("history", [2, 20])
def test_another_history_may_go_on(history: int) -> None:
    ours = Minimisation(rosenbrock, normal(7, seed=5), history=6)
    for _ in range(20):
        ours.step()
    snapshot = ours.driver.snapshot()
    before = json.dumps(snapshot)
    ours.driver = Lbfgs(history=history)
    ours.driver.restore(snapshot)
    assert len(ours.driver.snapshot()["pairs"]) == min(history, 6)
    assert ours.run(300) < 1e-6
    assert json.dumps(snapshot) == before


def test_rewinding_ends_at_the_last_accepted_point() -> None:
    ours = Minimisation(rosenbrock, normal(5))
    for _ in range(25):
        ours.step()
    ours.servers.run(ours.driver.rewind())
    assert rosenbrock(ours.servers["w"]).item() == ours.accepted[-1]
    assert ours.driver.rewind() == []
    assert ours.driver.vectors and "x" not in ours.driver.vectors
    assert ours.run(200) < 1e-8


def test_parameters_set_from_outside_are_a_new_start() -> None:
    ours = Minimisation(rosenbrock, normal(5))
    for _ in range(10):
        ours.step()
    ours.servers["w"] = normal(5, seed=9)
    ours.driver.restart()
    fresh = Minimisation(rosenbrock, normal(5, seed=9))
    for _ in range(10):
        ours.step()
        fresh.step()
    assert torch.equal(ours.servers["w"], fresh.servers["w"])


# Answers


def test_answers_of_shards_are_merged_in_any_order() -> None:
    ops: Ops = [
        ["copy", "a", "b"],
        ["dot", "a", "b"],
        ["abs_max", "a"],
        ["scale", 2.0, "a"],
        ["abs_sum", "b"],
    ]
    parts: list[list[Answer]] = [[0.1, 3.0, 1e16], [0.2, 5.0, 1.0], [0.3, 4.0, -1e16]]
    merged = merge_answers(ops, parts)
    assert merged == merge_answers(ops, parts[::-1])
    assert merged[1] == 5.0 and merged[0] == pytest.approx(0.6)
    assert merge_answers(ops, [[0.1, None, 1.0], [0.2, 5.0, 1.0]]) == [pytest.approx(0.3), None, 2.0]
    with pytest.raises(ValueError):
        merge_answers(ops, [[0.1, 3.0, 1.0], [0.2, 5.0]])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"history": 0}, "history=0"),
        ({"lr": 0.0}, "lr=0.0"),
        ({"lr": math.nan}, "lr=nan"),
        ({"line_search": "strong_wolfe"}, "got 'strong_wolfe'"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Lbfgs(**options)
