"""docs/security.md names tests that exist, what is promised about every attacker, and all requirements."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "security.md"
LINK = re.compile(r"\[(test_\w+\.py)\]\(\.\./([^)]+)\)")


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## )", PAGE.read_text(), flags=re.M | re.S)
    assert found, title
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of a table's rows, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_every_test_that_is_named_exists_and_tests_something() -> None:
    named = LINK.findall(PAGE.read_text())
    assert len(named) > 40
    for name, path in named:
        target = ROOT / path
        assert target.name == name, f"the link of {name} leads to {path}"
        assert target.is_file(), f"{path} does not exist"
        assert re.search(r"^(async )?def test_", target.read_text(), flags=re.M), f"{path} has no test"


def test_every_attacker_has_a_promise_a_limit_and_a_test() -> None:
    found = rows(section("Attackers"))
    assert [row[0].split("**")[1] for row in found] == [
        "another local user",
        "a stranger on the network",
        "a man in the middle",
        "a hostile or broken file",
        "a hostile worker",
    ]
    for row in found:
        assert len(row) == 4 and all(row), row[0]
        assert LINK.search(row[3]), row[0]


def test_every_requirement_has_a_state_and_what_is_met_a_test() -> None:
    found = rows(section("The fifteen requirements"))
    assert [row[0] for row in found] == [str(number) for number in range(1, 16)]
    for number, _, state in found:
        assert not state.startswith("met") or LINK.search(state), f"requirement {number} is met by no test"
