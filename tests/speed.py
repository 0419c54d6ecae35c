"""Which of many cases the fast suite runs: the first of them; `make slow` runs the rest."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def first(fast: int, cases: Iterable[Any], ids: Sequence[str] | None = None) -> list[Any]:
    """Cases for `parametrize`: all after the first so many are slow.

    Args:
        ids: what to call them, if their values do not say it.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.slow] if i >= fast else [],
            id=None if ids is None else ids[i],
        )
        for i, case in enumerate(cases)
    ]
