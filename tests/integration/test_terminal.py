"""A run with progress bars in a real (pseudo-)terminal looks as docs/terminal.md shows it."""

import re
from pathlib import Path

import pytest

from tests.speed import first
from tests.terminal import run_bars, shape

DOCS = Path(__file__).parents[2] / "docs" / "terminal.md"


def recorded(columns: int) -> list[str]:
    text = DOCS.read_text()
    match = re.search(rf"At {columns} columns:\n\n```\n\$ [^\n]*\n(.*?)\n```", text, re.S)
    assert match is not None
    return match[1].splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("columns", first(1, (60, 120)))
def test_bars_in_a_terminal(tmp_path: Path, columns: int) -> None:
    most: dict[str, int] = {}
    together = 0

    def watch(lines: list[str]) -> None:
        nonlocal together
        for bar in ("epoch 0:", "epoch 1:", "outer:", "inner:"):
            most[bar] = max(most.get(bar, 0), sum(line.startswith(bar) for line in lines))
        unfinished = any(re.match(r"epoch \d: +\d\d?%", line) for line in lines)
        together += unfinished and any(line.startswith(" running") for line in lines)

    lines, code = run_bars(columns, str(tmp_path), watch)
    assert code == 0
    assert max(most.values()) == 1, "a bar is drawn over itself, and never leaves a line behind"
    assert not together, "our picture gives way to a bar"
    for bar in (line for line in lines if line.startswith("epoch") and "%|" in line):
        assert columns - 4 <= len(bar) < columns, "as wide as the terminal"
    assert shape(lines) == shape(recorded(columns))
