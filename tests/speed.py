"""Which of many cases the fast suite runs: the first of them; `make slow` runs the rest."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def first(fast: int, cases: Iterable[Any], ids: Sequence[str] | None = None) -> list[Any]:
    """Cases for `parametrize`: all after the first so many are slow.

    Args:
        cases: values, tuples of values, or what `pytest.param` makes.
        ids: what to call them, if their values do not say it.
    """
    made = []
    for i, case in enumerate(cases):
        slow = [pytest.mark.slow] if i >= fast else []
        if isinstance(case, ParameterSet):
            made.append(pytest.param(*case.values, marks=[*case.marks, *slow], id=case.id))
        else:
            values = case if isinstance(case, tuple) else (case,)
            made.append(pytest.param(*values, marks=slow, id=None if ids is None else ids[i]))
    return made
