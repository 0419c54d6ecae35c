"""Rewrite imports of the old modules of `paceline.observe` to their new places; delete the old modules.

    python tools/move_observe_imports.py            everywhere, then delete the stand-ins and this file
    python tools/move_observe_imports.py FILE …     in these files only

For branches that were cut before `observe/` became `record/`, `analyse/` and `show/`.
"""

import ast
import subprocess
import sys
from pathlib import Path

RECORD = "counting gpu ledger output own_memory pace resources spans status tables thinning values"
ANALYSE = "comparison curves diagnosis facts repetitions run_data watch window"
SHOW = "display exports markup page passing plots progress study_page"
MODULES = {
    **{name: f"record.{name}" for name in RECORD.split()},
    **{name: f"analyse.{name}" for name in ANALYSE.split()},
    **{name: f"show.{name}" for name in SHOW.split()},
    "phases": "record.phase",
    "study": "analyse.study_data",
    "words": "analyse.wording",
    "report": "show.run_report",
    "trace": "show.perfetto",
}
NAMES = {
    ("report", "known_facts"): "analyse.summary",
    ("report", "diagnosis_of"): "analyse.summary",
    ("report", "summary_of"): "analyse.summary",
    ("page", "key_figures"): "analyse.summary",
    ("page", "mean_staleness"): "analyse.facts",
    ("page", "histogram"): "show.page_charts",
    ("comparison", "comparison_page"): "show.comparison_page",
    ("comparison", "write_comparison"): "show.comparison_page",
    ("plots", "Bar"): "analyse.curves",
    ("plots", "Lane"): "analyse.curves",
    ("plots", "thinned"): "analyse.curves",
}
RENAMED = {
    ("output", "Piece"): "OutputPiece",
    ("trace", "Steps"): "StepRange",
    ("plots", "Lane"): "TimelineRow",
    ("pace", "Pace"): "TrainingPace",
}


def rewritten(text: str) -> str:
    """`text` with its imports from the old modules replaced."""
    lines = text.splitlines(keepends=True)
    names: dict[str, str] = {}
    for node in sorted(ast.walk(ast.parse(text)), key=lambda n: -getattr(n, "lineno", 0)):
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        new: dict[str, list[str]] = {}
        if node.module == "paceline.observe":
            if not any(alias.name in MODULES for alias in node.names):
                continue
            for alias in node.names:
                place = MODULES.get(alias.name)
                if place is None:
                    new.setdefault("paceline.observe", []).append(ast.unparse(alias))
                    continue
                package, _, module = place.rpartition(".")
                said = module if alias.asname is None else f"{module} as {alias.asname}"
                new.setdefault(f"paceline.observe.{package}", []).append(said)
                if "comparison.write_comparison" in text:  # the page of a comparison has moved to show/
                    new.setdefault("paceline.observe.show", []).append("comparison_page")
                if alias.asname is None and module != alias.name:
                    names[alias.name] = module
        elif (old := node.module.removeprefix("paceline.observe.")) in MODULES and old != node.module:
            for alias in node.names:
                place = NAMES.get((old, alias.name), MODULES[old])
                name = RENAMED.get((old, alias.name), alias.name)
                said = name if alias.asname is None else f"{name} as {alias.asname}"
                new.setdefault(f"paceline.observe.{place}", []).append(said)
                if alias.asname is None and name != alias.name:
                    names[alias.name] = name
        else:
            continue
        indent = " " * node.col_offset
        made = [f"{indent}from {place} import ({', '.join(found)})\n" for place, found in new.items()]
        lines[node.lineno - 1 : node.end_lineno] = made
    moved = "".join(_renamed(lines, names))
    return moved.replace("comparison.write_comparison", "comparison_page.write_comparison")


def _renamed(lines: list[str], names: dict[str, str]) -> list[str]:
    """`lines` with every use of a name replaced; strings and comments stay."""
    found = [
        node
        for node in ast.walk(ast.parse("".join(lines)))
        if isinstance(node, ast.Name) and node.id in names
    ]
    for node in sorted(found, key=lambda node: (-node.lineno, -node.col_offset)):
        line = lines[node.lineno - 1].encode()
        end = node.col_offset + len(node.id)
        lines[node.lineno - 1] = (line[: node.col_offset] + names[node.id].encode() + line[end:]).decode()
    return lines


def main() -> None:
    """See the module."""
    named = [Path(each) for each in sys.argv[1:]]
    files = named or [
        p for top in ("src", "tests", "benchmarks", "examples") for p in Path(top).rglob("*.py")
    ]
    old = [Path(f"src/paceline/observe/{name}.py") for name in MODULES]
    changed = []
    for file in files:
        text = file.read_text()
        if file not in old and (new := rewritten(text)) != text:
            file.write_text(new)
            changed.append(str(file))
    if not named:
        for file in (*old, Path(__file__)):
            file.unlink(missing_ok=True)
        package = Path("src/paceline/observe/__init__.py")
        text = package.read_text().replace("from paceline.observe.analyse import wording as words\n", "")
        package.write_text(text.replace('"words", ', ""))
        house = Path("tests/unit/test_house.py")
        house.write_text(house.read_text().replace("STAND_INS = True", "STAND_INS = False"))
    if changed:
        subprocess.run([".venv/bin/ruff", "check", "--fix", "--quiet", "--select", "I,UP034,F401", *changed])
        subprocess.run([".venv/bin/ruff", "format", "--quiet", *changed])
    sys.stdout.write("".join(f"{each}\n" for each in changed))


if __name__ == "__main__":
    main()
