"""Parameters and optimizer state as pieces that can be cut in another way."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.exceptions import CheckpointError
from paceline.params import StateBook

SIZE = 100
VALUES = torch.arange(SIZE, dtype=torch.float64)


def parts(cuts: list[int], *, servers: int = 2, what: str = "exp_avg") -> list[dict[str, Tensor]]:
    """State of one tensor of SIZE elements, cut at `cuts` and dealt to servers in turn."""
    edges = [0, *sorted(cuts), SIZE]
    found: list[dict[str, Tensor]] = [{} for _ in range(servers)]
    for i, (a, b) in enumerate(pairwise(edges)):
        part = found[i % servers]
        part[StateBook.key("w", "", a, b)] = VALUES[a:b].clone()
        part[StateBook.key("w", what, a, b)] = -VALUES[a:b]
        part[StateBook.key("w", "step", a, b)] = torch.tensor(7.0)
    return found


CUTS = st.lists(st.integers(1, SIZE - 1), unique=True, max_size=8)


@settings(max_examples=200)
@given(CUTS, CUTS, st.integers(1, 4))
def test_what_was_cut_one_way_can_be_taken_in_another(old: list[int], new: list[int], servers: int) -> None:
    book = StateBook(parts(old, servers=servers))
    assert book.names() == ["w"]
    assert sorted(book.kinds("w")) == ["exp_avg", "step"]
    edges = [0, *sorted(new), SIZE]
    for a, b in pairwise(edges):
        value, average = book.piece("w", "", a, b), book.piece("w", "exp_avg", a, b)
        assert value is not None and torch.equal(value, VALUES[a:b])
        assert average is not None and torch.equal(average, -VALUES[a:b])
        step = book.piece("w", "step", a, b)
        assert step is not None and step.item() == 7 and step.dim() == 0


def test_what_is_missing_is_none_and_never_somebody_elses_elements() -> None:
    full = parts([25, 50, 75], servers=4)
    holed = StateBook([full[0], full[2], full[3]])  # 25 to 50 is gone
    for a, b in [(0, SIZE), (0, 26), (25, 50), (30, 40), (49, 51)]:
        assert holed.piece("w", "", a, b) is None
    got = holed.piece("w", "", 50, SIZE)
    assert got is not None and torch.equal(got, VALUES[50:])
    assert holed.piece("w", "", 90, SIZE + 1) is None
    assert holed.piece("w", "unknown", 0, 1) is None
    assert holed.piece("v", "", 0, 1) is None
    assert holed.kinds("v") == [] and StateBook([]).names() == []


def test_each_piece_keeps_its_own_count_of_steps() -> None:
    book = StateBook(
        [
            {
                StateBook.key("w", "step", 0, 50): torch.tensor(3.0),
                StateBook.key("w", "step", 50, 100): torch.tensor(4.0),
            }
        ]
    )
    found = [book.piece("w", "step", a, b) for a, b in [(0, 50), (50, 100), (60, 70), (0, 100)]]
    assert [None if s is None else s.item() for s in found] == [3, 4, 4, 3]


def test_a_tensor_of_one_element_and_a_statistic_of_a_whole_one() -> None:
    book = StateBook(
        [
            {
                StateBook.key("scale", "", 0, 1): torch.tensor(2.5),
                StateBook.key("scale", "step", 0, 1): torch.tensor(9.0),
                StateBook.key("one", "", 0, 1): torch.tensor([1.5]),
                StateBook.key("one", "exp_avg", 0, 1): torch.tensor([0.5]),
                StateBook.key("w", "row_var", 0, 12): torch.ones(3, 1),
            }
        ]
    )
    shapes = {
        ("scale", ""): (),
        ("scale", "step"): (),
        ("one", ""): (1,),
        ("one", "exp_avg"): (1,),
    }
    for (name, what), shape in shapes.items():
        piece = book.piece(name, what, 0, 1)
        assert piece is not None and tuple(piece.shape) == shape
    row = book.piece("w", "row_var", 0, 12)
    assert row is not None and row.shape == (3, 1)


def test_names_may_hold_the_separator() -> None:
    book = StateBook([{StateBook.key("a|b", "step", 0, 3): torch.tensor(1.0)}])
    assert book.kinds("a|b") == ["step"]


@pytest.mark.parametrize("key", ["", "w", "w|step|0", "w|step|a|b", "w|step|0|1.5"])
def test_a_key_that_is_not_ours_is_refused(key: str) -> None:
    with pytest.raises(CheckpointError, match="names no piece of optimizer state"):
        StateBook([{key: torch.zeros(1)}])
