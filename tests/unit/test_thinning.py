"""Which records are kept in a file of bounded size."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.observe.record.thinning import BYTES_OF_PUSH, Thinning, pushes_thinning


@given(st.integers(2, 200), st.integers(0, 3000))
def test_rows_are_those_that_are_kept_and_never_more_than_there_is_room_for(rows: int, records: int) -> None:
    thinning = Thinning(rows)
    kept = [number for number in range(records) if thinning.kept(number)]
    assert len(kept) == thinning.rows_of(records) <= rows
    assert kept[: rows // 2] == list(range(min(records, rows // 2))), "the first half has all"
    weights = thinning.weights(len(kept))
    # A row stands for the records from it to the next.
    assert [b - a for a, b in itertools.pairwise(kept)] == list(weights)[: max(0, len(kept) - 1)]


def test_a_run_of_years_fits_and_its_end_is_still_recorded() -> None:
    thinning = pushes_thinning(500)
    pushes = 5_000 * 86_400 * 365 * 10
    assert thinning.rows_of(pushes) * BYTES_OF_PUSH <= 250_000_000
    assert thinning.rows_of(pushes) > thinning.rows_of(pushes // 2)
    assert thinning.rows_of(10**30) <= thinning.rows


@pytest.mark.parametrize("records", [0, 1, 7, 100])
def test_the_smallest_budget_keeps_something(records: int) -> None:
    assert Thinning(0).rows_of(records) == min(1, records)
