"""The decider makes the decisions that it always made: same events, same steps, byte for byte."""

import json
from typing import Any

import pytest

from tests.golden.histories import CASES, RECORD, SEEDS, digest, trace

KEPT: dict[str, list[Any]] = json.loads(RECORD.read_text())


@pytest.mark.parametrize("name", CASES)
def test_a_history_is_decided_as_it_was(name: str) -> None:
    assert [digest(trace(name, seed)) for seed in SEEDS] == KEPT[name]


def test_the_histories_have_every_step_and_event_in_them() -> None:
    lines = [line for name in CASES for line in trace(name, 0)]
    steps = ["apply", "reduce", "hold", "add", "ask", "vectors", "admit", "assign", "left", "load", "drop"]
    for word in [*steps, "mode", "keep", "verdicts", "answers", "granted", "spoiled", "skip", "retire"]:
        assert any(f'"{word}"' in line for line in lines), word
