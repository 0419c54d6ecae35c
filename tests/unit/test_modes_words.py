"""Modes in words: what a plan and a report say about each."""

import pytest

from paceline.core.modes import in_words, parse_mode


@pytest.mark.parametrize(
    ("mode", "workers", "part"),
    [
        ("bsp", 4, "mean of 4 gradients"),
        ("bsp+period=3", 4, "mean of 4 sums of 3 steps' gradients"),
        ("backup:1", 4, "first 3 of 4"),
        ("ssp:1", 4, "more than 1 step ahead"),
        ("ssp:2+quorum=3", 4, "mean of 3 gradients, with less momentum and a shorter step the staler"),
        ("ssp:2+quorum=3+damping=none", 4, "mean of 3 gradients; a worker waits while it is more than 2"),
        ("asp", 4, "nobody waits"),
        ("asp+damping=dc", 4, "(dc damping)"),
        ("ssp:3", 1, "the one worker"),
        ("downpour:4,2", 2, "sum of 4 steps' gradients"),
        ("easgd:8", 2, "every 8 steps"),
        ("local:8", 2, "every 8 steps"),
        ("hogwild", 2, "without locks"),
        ("dogwild", 2, "own pace"),
        ("allreduce", 2, "averaged among the workers"),
        ("hybrid:asp", 4, "between groups: nobody waits"),
        ("sandblaster", 4, "L-BFGS"),
        ("sandblaster", 1, "L-BFGS"),
    ],
)
def test_in_words(mode: str, workers: int, part: str) -> None:
    assert part in in_words(parse_mode(mode), workers)
