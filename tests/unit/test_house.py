"""The shape of the source: maps, names, sizes, inheritance, dependencies; and that the docs are about it.

Everything is read from the source by AST. A rule that something in the source still breaks has a list of
exceptions here. A list only gets shorter: an exception that is no longer needed fails the test too.
"""

import ast
import functools
import json
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "paceline"

MOST_LINES = 600
MOST_ATTRIBUTES = 25
MOST_FILES_OF_A_CLASS = 2
MOST_LATE_ATTRIBUTES = 2

# --- what still breaks a rule -----------------------------------------------------------------------

MISSING_FROM_MAP: set[str] = set()
FILE_NAMES_USED_TWICE: set[str] = set()
CLASS_NAMES_USED_TWICE: set[str] = set()
LONG_FILES: set[str] = set()
LONG_CHAINS: set[str] = set()
LARGE_CLASSES: set[str] = set()
LATE_CONSTRUCTORS = {
    "LeaseBook._open_epoch",
    "Rows._begin",
}
STAND_INS = False
"""Modules at the old places of `observe` (tools/move_observe_imports.py deletes them)."""

# --- the source -------------------------------------------------------------------------------------


def assigned_to_self(tree: ast.AST) -> set[str]:
    """Attributes of `self` that are assigned somewhere in `tree`."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


@dataclass(frozen=True)
class SourceClass:
    """A class of the source: where it stands, and what its own body has."""

    path: str
    node: ast.ClassDef

    @property
    def bases(self) -> list[str]:
        names = []
        for base in self.node.bases:
            while isinstance(base, ast.Subscript):
                base = base.value
            names.append(base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", ""))
        return names

    @property
    def attributes(self) -> set[str]:
        """Fields, and everything that a method assigns to `self`."""
        found = {
            item.target.id
            for item in self.node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        return found | assigned_to_self(self.node)

    @property
    def constructed(self) -> set[str]:
        """Fields, properties, and what a constructor assigns to `self`."""
        found = set()
        for item in self.node.body:
            if isinstance(item, ast.AnnAssign | ast.Assign):
                targets = [item.target] if isinstance(item, ast.AnnAssign) else item.targets
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
            elif isinstance(item, ast.FunctionDef) and item.name in ("__init__", "__new__", "__post_init__"):
                found |= assigned_to_self(item)
            elif isinstance(item, ast.FunctionDef) and item.decorator_list:
                found.add(item.name)
        return found

    @property
    def is_record(self) -> bool:
        """Whether it only holds data (configuration, status, a message): such may have many fields."""
        marked = [*self.node.decorator_list, *self.node.bases]
        verbs = [
            item
            for item in self.node.body
            if isinstance(item, ast.FunctionDef)
            and not item.name.startswith("__")
            and not item.decorator_list
        ]
        return (
            any(re.search("dataclass|NamedTuple", ast.unparse(mark)) for mark in marked) and len(verbs) <= 3
        )


def is_stand_in(file: Path) -> bool:
    return '"""Stand-in until' in file.read_text("utf-8")[:100]


@functools.cache
def source() -> dict[str, str]:
    """The text of every file, by its path below src/paceline."""
    return {
        file.relative_to(SOURCE).as_posix(): file.read_text("utf-8")
        for file in sorted(SOURCE.rglob("*.py"))
        if not is_stand_in(file)
    }


@functools.cache
def classes() -> dict[str, list[SourceClass]]:
    found = defaultdict(list)
    for path, text in source().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(SourceClass(path, node))
    return found


def chain(name: str) -> list[SourceClass]:
    """A class and its longest line of bases in the source."""
    own = classes()[name][0]
    lines = [chain(base) for base in own.bases if base in classes() and base != name]
    return [own, *max(lines, key=len, default=[])]


def agree(found: set[str], exceptions: set[str], rule: str) -> None:
    """Everything that breaks a rule is an exception, and every exception breaks it."""
    assert not found - exceptions, f"{rule}: {sorted(found - exceptions)}"
    assert not exceptions - found, f"remove from the exceptions in this file: {sorted(exceptions - found)}"


# --- the rules --------------------------------------------------------------------------------------


def test_every_file_is_in_the_map_of_its_package() -> None:
    missing = set()
    for path, text in source().items():
        package = (SOURCE / path).parent
        if path.endswith("__init__.py"):
            doc = ast.get_docstring(ast.parse(text)) or ""
            inside = {p.stem for p in package.glob("*.py") if p.stem != "__init__" and not is_stand_in(p)}
            inside |= {p.parent.name for p in package.glob("*/__init__.py")}
            for name in inside:
                if not re.search(rf"\b{name}\b", doc):
                    file = package / name
                    ending = "" if file.is_dir() else ".py"
                    missing.add(file.relative_to(SOURCE).as_posix() + ending)
    agree(missing, MISSING_FROM_MAP, "not named in the docstring of the package")


def test_no_file_name_is_used_twice() -> None:
    names = [Path(path).name for path in source() if not path.endswith("__init__.py")]
    agree({name for name in names if names.count(name) > 1}, FILE_NAMES_USED_TWICE, "two files of one name")


def test_no_class_name_is_used_twice() -> None:
    twice = {name for name, found in classes().items() if len(found) > 1}
    agree(twice, CLASS_NAMES_USED_TWICE, "two classes of one name")


def test_no_file_is_too_long() -> None:
    long = {path for path, text in source().items() if len(text.splitlines()) > MOST_LINES}
    agree(long, LONG_FILES, f"more than {MOST_LINES} lines")


def test_no_class_is_spread_over_many_files() -> None:
    spread = {name for name in classes() if len({each.path for each in chain(name)}) > MOST_FILES_OF_A_CLASS}
    agree(spread, LONG_CHAINS, f"inherits through more than {MOST_FILES_OF_A_CLASS} files")


def test_no_class_with_behaviour_has_many_attributes() -> None:
    large = {
        name
        for name, found in classes().items()
        if not found[0].is_record
        and len(set().union(*(each.attributes for each in chain(name)))) > MOST_ATTRIBUTES
    }
    agree(large, LARGE_CLASSES, f"more than {MOST_ATTRIBUTES} attributes")


def test_no_class_has_a_late_constructor() -> None:
    """A method other than the constructor that gives an object several attributes which it did not have."""
    late = set()
    for name, (own, *_) in classes().items():
        constructed = set().union(*(each.constructed for each in chain(name)))
        for item in own.node.body:
            is_method = isinstance(item, ast.FunctionDef)
            if is_method and len(assigned_to_self(item) - constructed) > MOST_LATE_ATTRIBUTES:
                late.add(f"{name}.{item.name}")
    agree(
        late, LATE_CONSTRUCTORS, f"makes more than {MOST_LATE_ATTRIBUTES} attributes outside the constructor"
    )


def test_stand_ins_are_gone_when_this_file_says_so() -> None:
    found = [file.name for file in SOURCE.rglob("*.py") if is_stand_in(file)]
    assert bool(found) == STAND_INS, "set STAND_INS to what is true, and in the end delete is_stand_in"


def imported(folder: Path) -> set[str]:
    found = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found


def test_every_dependency_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    import_names = {"pyyaml": "yaml", "scikit-learn": "sklearn"}
    named = [re.split(r"[<>=!~;\[ ]", line, maxsplit=1)[0].lower() for line in project["dependencies"]]
    used = imported(SOURCE)
    unused = {name for name in named if import_names.get(name, name.replace("-", "_")) not in used}
    assert not unused, f"nothing imports {sorted(unused)}: remove it, or make it an extra"


def test_files_that_reach_into_private_attributes_are_listed() -> None:
    """ruff's SLF001 is on; a file that is excepted from it in pyproject.toml still needs that."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["ruff"]["lint"]
    excepted = {name for name, rules in settings["per-file-ignores"].items() if "SLF001" in rules}
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "SLF001"]
    found = subprocess.run(
        [*command, "--output-format", "json", "src", "tests", "benchmarks", "examples"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    reaching = {Path(each["filename"]).relative_to(ROOT).as_posix() for each in json.loads(found.stdout)}
    agree(reaching, excepted, "reaches into another class's private attributes (SLF001)")


# --- the docs ---------------------------------------------------------------------------------------


@functools.cache
def tracked() -> list[Path]:
    """Files that git knows; everything there is, where there is no git (an unpacked sdist)."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        return [ROOT / name for name in listed if (ROOT / name).is_file()]
    except (OSError, subprocess.CalledProcessError):
        return [p for top in ("src", "tests", "docs", "benchmarks") for p in (ROOT / top).rglob("*.*")]


def documents() -> list[Path]:
    return [file for file in tracked() if file.suffix == ".md"]


def anchors(text: str) -> set[str]:
    """What can stand behind # in a link to a page: its headings, as GitHub writes them."""
    without_code = re.sub(r"(?ms)^```.*?^```", "", text)
    headings = re.findall(r"(?m)^#+ (.*)$", without_code)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def links(text: str) -> Iterator[tuple[str, str]]:
    """Path and anchor of every link that is not to the web."""
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"(?ms)^```.*?^```", "", text)):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield path, anchor


def test_links_resolve() -> None:
    broken = []
    for page in documents():
        text = page.read_text("utf-8")
        for path, anchor in links(text):
            target = page.parent / path if path else page
            if not target.exists():
                broken.append(f"{page.relative_to(ROOT)}: {path}")
            elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text("utf-8")):
                broken.append(f"{page.relative_to(ROOT)}: {path}#{anchor}")
    assert not broken, broken


def test_every_promise_names_tests_that_exist() -> None:
    page = ROOT / "docs" / "promises.md"
    promises = [line for line in page.read_text("utf-8").splitlines() if line.startswith("| ")][1:]
    assert len(promises) > 30
    for promise in promises:
        tests = [path for path, _ in links(promise) if path.startswith("../tests/")]
        assert tests, f"no test holds this promise: {promise}"
        assert all((page.parent / path).is_file() for path in tests), promise


def test_paths_that_docs_name_exist() -> None:
    """What stands in backquotes and begins like a path of the repository."""
    pattern = r"`((?:src|tests|docs|benchmarks|examples)/[\w./-]*)`"
    missing = []
    for page in documents():
        if page.name != "CHANGELOG.md":  # which also tells of what is gone
            for name in re.findall(pattern, page.read_text("utf-8")):
                if not (ROOT / name).exists() and not name.startswith("benchmarks/results"):
                    missing.append(f"{page.relative_to(ROOT)}: {name}")
    assert not missing, missing


def test_nothing_outside_the_repository_is_cited() -> None:
    outside = "../" + "shared"
    texts = [file for file in tracked() if file.suffix in {".py", ".md", ".toml", ".yaml", ""}]
    citing = [
        str(file.relative_to(ROOT)) for file in texts if outside in file.read_text("utf-8", errors="ignore")
    ]
    assert not citing, f"{outside} is not part of the repository: {citing}"


# --- the rules can be broken ------------------------------------------------------------------------


def test_an_exception_must_be_needed() -> None:
    agree({"a"}, {"a"}, "rule")
    with pytest.raises(AssertionError, match=r"rule: \['b'\]"):
        agree({"a", "b"}, {"a"}, "rule")
    with pytest.raises(AssertionError, match=r"remove .* \['b'\]"):
        agree({"a"}, {"a", "b"}, "rule")


def test_attributes_and_records_are_told_apart() -> None:
    tree = ast.parse(
        "@dataclass\nclass Data:\n    a: int\n    b: int\n"
        "class Part:\n    x: int\n    def go(self):\n        self.y, self.z[0] = 1, 2\n        self.w += 1"
    )
    data, part = (SourceClass("file.py", node) for node in tree.body if isinstance(node, ast.ClassDef))
    assert data.is_record and data.attributes == {"a", "b"}
    assert not part.is_record and part.attributes == {"x", "y", "w"}


def test_anchors_are_those_of_github() -> None:
    text = "# One\n## Defaults, and the papers' plain rules\n```\n# not a heading\n```\n"
    assert anchors(text) == {"one", "defaults-and-the-papers-plain-rules"}
    assert list(links("[a](b.md#c) [d](https://x.y) [e](#f)")) == [("b.md", "c"), ("", "f")]
