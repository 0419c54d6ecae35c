"""A shard's named vectors: one list of operations, whatever the cut; and what a checkpoint keeps of them."""

import json

import pytest
import torch
from torch import Tensor, nn

from paceline.core.modes.lbfgs import merge_answers
from paceline.exceptions import FrameError
from paceline.params import OptimizerSpec, StateBook, describe, partition
from paceline.ps.shard import Contribution, Gradients, Shard
from paceline.ps.vectors import run_on

OPS = [
    ["copy", "w", "x"],
    ["scale", 0.5, "x"],
    ["combine", "z", [[2.0, "x"], [-1.0, "g"]]],
    ["combine", "w", [[1.0, "w0"], [0.25, "z"]]],
    ["dot", "z", "g"],
    ["abs_sum", "w"],
    ["abs_max", "z"],
]


class Net(nn.Module):
    """Of two dtypes, and tensors that leave gaps between them; large enough to be cut for three servers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.odd = nn.Parameter(torch.randn(3, 7, dtype=torch.float64))
        self.large = nn.Parameter(torch.randn(150, 201, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(5, 9).t())
        self.number = nn.Parameter(torch.tensor(0.7))


class Servers:
    """A model and gradients for it, dealt to shards."""

    def __init__(self, count: int) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        self.layout, parameters = describe(model, optimizer, servers=count)
        self.base, self.slot = (torch.zeros(self.layout.nbytes, dtype=torch.uint8) for _ in range(2))
        torch.manual_seed(4)
        for t, p in zip(self.layout.tensors, parameters, strict=True):
            for memory, value in ((self.base, p.detach()), (self.slot, torch.randn(p.shape, dtype=p.dtype))):
                flat = memory[t.offset : t.offset + t.nbytes].view(p.dtype)
                flat.as_strided(t.shape, t.stride).copy_(value)
        spec = OptimizerSpec.of(optimizer)
        self.shards = [Shard(self.layout, spec, mine, self.base) for mine in partition(self.layout, count)]

    def add(self, weight: float) -> None:
        for shard in self.shards:
            gradients = Gradients(self.slot, self.layout, shard.slices)
            shard.add([Contribution(0, gradients, weight)])

    def run(self, ops: list[list[object]]) -> list[float | None]:
        return merge_answers(ops, [shard.run(json.loads(json.dumps(ops))) for shard in self.shards])

    def snapshot(self) -> StateBook:
        return StateBook(shard.snapshot(vectors=True) for shard in self.shards)


def whole(book: StateBook, what: str = "") -> dict[str, Tensor | None]:
    counts = {"odd": 21, "large": 30150, "turned": 45, "number": 1}
    return {name: book.piece(name, what, 0, count) for name, count in counts.items()}


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_operations_do_not_depend_on_the_cut(count: int) -> None:
    """Nine servers: some have no slice, and answer all the same."""
    servers = Servers(count)
    servers.add(2.0)
    servers.add(1.0)
    servers.run([["copy", "w", "w0"]])
    answers = servers.run(OPS)
    dot = abs_sum = abs_max = 0.0
    reference = Servers(1)
    w = whole(reference.snapshot())
    reference.add(3.0)
    g = whole(reference.snapshot(), "lbfgs.g")
    after = whole(servers.snapshot())
    for name, value in w.items():
        start, gradient, now = value, g[name], after[name]
        assert start is not None and gradient is not None and now is not None
        z = start - gradient
        assert torch.allclose(now, start + 0.25 * z, rtol=1e-6)
        dot += float(z.double() @ gradient.double())
        abs_sum += float((start + 0.25 * z).double().abs().sum())
        abs_max = max(abs_max, float(z.abs().max()))
    assert answers == pytest.approx([dot, abs_sum, abs_max], rel=1e-6)


def test_a_move_keeps_what_is_named_and_the_next_sum_begins_anew() -> None:
    servers = Servers(2)
    servers.add(1.0)
    servers.run([["copy", "g", "p"], ["copy", "w", "x"]])
    for shard in servers.shards:
        shard.move([["combine", "w", [[1.0, "x"], [-0.5, "p"]]]], ["p"])
    found = servers.snapshot()
    assert set(found.kinds("large")) == {"lbfgs.p"}
    servers.add(4.0)
    assert servers.run([["abs_max", "g"]])[0] == pytest.approx(4 * (servers.run([["abs_max", "p"]])[0] or 0))


def test_a_sum_that_lacks_something_answers_nothing() -> None:
    servers = Servers(2)
    servers.add(1.0)
    servers.shards[1].spoil()
    servers.add(1.0)
    assert servers.run([["dot", "g", "g"], ["abs_max", "g"], ["abs_sum", "w"]])[:2] == [None, None]


@pytest.mark.parametrize("before, after", [(1, 3), (3, 1), (2, 2)])
def test_vectors_are_restored_to_shards_cut_otherwise(before: int, after: int) -> None:
    old, new = Servers(before), Servers(after)
    old.add(3.0)
    old.run([["copy", "w", "s11"], ["scale", 0.1, "s11"]])
    book = old.snapshot()
    for shard in new.shards:
        shard.restore(book, vectors=True)
    again = new.snapshot()
    for what in ("", "lbfgs.g", "lbfgs.s11"):
        for name, value in whole(book, what).items():
            got = whole(again, what)[name]
            assert value is not None and got is not None and torch.equal(got, value)
    # A mode without vectors takes none, and none of them for its optimizer's state.
    other = Servers(after)
    for shard in other.shards:
        shard.restore(book)
    assert other.snapshot().kinds("large") == []
    assert not any("lbfgs" in key for shard in new.shards for key in shard.snapshot())


def test_an_unknown_operation_is_named() -> None:
    with pytest.raises(FrameError, match="'invert'"):
        run_on({"w": torch.ones(2)}, [["invert", "w"]])
