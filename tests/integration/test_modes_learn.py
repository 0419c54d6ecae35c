"""Every mode of the README's table learns the shipped example, as it comes."""

import re
from pathlib import Path

import pytest

from paceline.core.modes import parse_mode
from tests.speed import first

ROOT = Path(__file__).parents[2]

MODES = [
    *("asp", "ssp:2", "bsp", "backup:1", "downpour:2,2", "easgd:4", "eamsgd:4", "local:4", "diloco:4"),
    *("hogwild", "dogwild", "allreduce", "hybrid:asp", "sandblaster"),
]


def test_the_cases_are_the_modes_of_the_readmes_table():
    table = (ROOT / "README.md").read_text().partition("| mode | an update is")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`([a-z]+)", row.split("|")[1])}
    assert named == {parse_mode(mode).name for mode in MODES}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", first(1, MODES))
def test_a_mode_learns_the_digits(run, mode):
    groups = {"workers": 4, "groups": 2} if mode.startswith("hybrid") else {"workers": 3}
    ran = run((ROOT / "examples/digits.py").read_text(), mode=mode, threads=1, **groups)
    scores = re.findall(r"test accuracy ([0-9.]+)", ran.log("worker", 0))
    assert float(scores[-1]) >= 0.9, scores
