"""Imports point downwards only, the pure core stays pure, extras stay optional, nothing unpickles.

The rules are read from the source by AST, so an import inside a function or under TYPE_CHECKING
counts for the direction like any other. `LAYERS` is the drawing in the design as a table: a new
package is added there, in the row where it belongs.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "paceline"

# From the top down. A package imports from rows below its own, never from its own row or above.
LAYERS = (
    ("cli", "serve"),
    ("papers",),
    ("api",),
    ("advise",),
    ("control",),
    ("engines",),
    ("ps", "worker"),
    ("collective",),
    ("plan",),
    ("params", "comm"),
    ("observe",),
    ("data",),
    ("storage", "cluster"),
    ("core",),
    ("causes",),
    ("exceptions",),
)
RANK: dict[str, float] = {name: -row for row, names in enumerate(LAYERS) for name in names}
# Within a package that has packages of its own, from the top down as well.
INNER = {"observe": ("show", "analyse", "record")}
# `import paceline` shows the interface, so only what stands above the interface may use it.
RANK["paceline"] = RANK["api"] + 0.5
# Testing helpers are shipped to users: they may use everything, and nothing of ours uses them.
TESTING = "testing"
# It emulates what a machine does not have (workers, latency), and that is what testing is made of.
MAY_USE_TESTING = {"papers"}

# The commands parse, call the api, and print: what lies below it is not theirs.
BEHIND_API = {
    "control",
    "engines",
    "ps",
    "worker",
    "collective",
    "comm",
    "params",
    "data",
    "storage",
    "cluster",
}

# Events in, instructions out. Of our own they use the errors, and what is beside them and pure.
PURE = ("core/", "plan/capacity.py")
IMPURE = {
    *("asyncio", "concurrent", "datetime", "multiprocessing", "numpy", "os", "random", "secrets"),
    *("select", "selectors", "signal", "socket", "ssl", "subprocess", "threading", "time", "torch"),
}

# The core's dependencies: the name to install and the name to import.
CORE = {
    "torch": "torch",
    "numpy": "numpy",
    "psutil": "psutil",
    "typer": "typer",
    "rich": "rich",
    "PyYAML": "yaml",
    "safetensors": "safetensors",
    "pyarrow": "pyarrow",
    "pandas": "pandas",
    "scikit-learn": "sklearn",
}

UNPICKLERS = {"_pickle", "cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
UNSAFE_CALLS = {"torch.load", "torch.serialization.load", "yaml.load", "yaml.unsafe_load"}


@dataclass(frozen=True)
class Import:
    """One imported name: where it stands, what it names, and whether loading the file runs it."""

    line: int
    target: str
    at_load: bool

    @property
    def top(self) -> str:
        return self.target.partition(".")[0]


def imports_of(tree: ast.AST, package: str) -> Iterator[Import]:
    """Every import in a file of `package` (dotted), relative ones made absolute."""

    def walk(node: ast.AST, at_load: bool) -> Iterator[Import]:
        match node:
            case ast.Import(names=names):
                yield from (Import(node.lineno, name.name, at_load) for name in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = ".".join(package.split(".")[: 1 - level or None]) if level else ""
                start = ".".join(part for part in (base, module) if part)
                yield from (Import(node.lineno, f"{start}.{name.name}", at_load) for name in names)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                at_load = False
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                for child in node.body:
                    yield from walk(child, False)
                for child in node.orelse:
                    yield from walk(child, at_load)
                return
        for child in ast.iter_child_nodes(node):
            yield from walk(child, at_load)

    return walk(tree, True)


def faults_of(path: str, text: str) -> list[str]:
    """What is wrong with the imports of `text`, standing at `path` below src/paceline."""
    parts = Path(path).with_suffix("").parts
    package = ".".join(("paceline", *parts[:-1]))
    own = "cli" if path == "__main__.py" else "paceline" if path == "__init__.py" else parts[0]
    pure = path.startswith(PURE)
    if own not in RANK and own != TESTING:
        return [f"{path}: '{own}' has no row in LAYERS; add it where it belongs"]
    tree = ast.parse(text)
    faults = []
    for found in imports_of(tree, package):
        where = f"{path}:{found.line}: imports {found.target}"
        if found.top == "paceline":
            second = (*found.target.split("."), "")[1]
            used = second if second in RANK or second == TESTING else "paceline"
            beside = "/".join(found.target.split(".")[1:])
            if used == own and (said := against_inner_order(parts, beside)):
                faults.append(f"{where}, but {said}")
                continue
            if own == TESTING or (used == own and (not pure or f"{beside}/".startswith(PURE))):
                continue
            if used == TESTING and own in MAY_USE_TESTING:
                continue
            if used == TESTING:
                faults.append(f"{where}, but nothing of ours may depend on testing")
            elif own == "cli" and used in BEHIND_API:
                faults.append(f"{where}, but commands reach '{used}' through paceline.api only")
            elif pure and used not in ("exceptions", "causes"):
                faults.append(f"{where}, but {path} is pure: of ours only exceptions and causes")
            elif RANK[used] >= RANK[own]:
                faults.append(f"{where}, but '{used}' is not below '{own}' in LAYERS")
        elif found.top in UNPICKLERS or found.target in UNSAFE_CALLS:
            faults.append(f"{where}, which runs what it reads; use safetensors, JSON or safe_load")
        elif pure and (found.top in IMPURE or found.top not in sys.stdlib_module_names):
            faults.append(f"{where}, but {path} is pure: no torch, sockets, clocks or threads")
        elif found.at_load and found.top not in {*sys.stdlib_module_names, *CORE.values()}:
            faults.append(f"{where} when it loads; it is an extra: import it where it is used")
    aliases = {
        name.asname: name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for name in node.names
        if name.asname
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, dot, rest = ast.unparse(node).partition(".")
            if (used := aliases.get(first, first) + dot + rest) in UNSAFE_CALLS:
                faults.append(f"{path}:{node.lineno}: {used} runs what it reads")
    return faults


def against_inner_order(parts: Sequence[str], beside: str) -> str | None:
    """Why a file at `parts` must not import `beside`, of the same package; None if it may."""
    order = INNER.get(parts[0], ())
    if len(parts) < 3 or parts[1] not in order:  # the package itself shows what the inner ones have
        return None
    inner = (*beside.split("/"), "")[1]
    if inner not in order:
        return f"'{parts[0]}' shows what is in '{parts[1]}': import from the package that has it"
    if order.index(inner) < order.index(parts[1]):
        return f"'{inner}' is above '{parts[1]}' in INNER"
    return None


def test_source_keeps_the_rules() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert files, f"no source below {SOURCE}"
    faults = [
        fault
        for file in files
        for fault in faults_of(file.relative_to(SOURCE).as_posix(), file.read_text("utf-8"))
    ]
    assert not faults, "\n" + "\n".join(faults)


def test_the_core_loads_no_torch() -> None:
    names = [
        ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts)
        for file in sorted((SOURCE / "core").rglob("*.py"))
    ]
    assert "paceline.core.decider" in names
    load = f"[importlib.import_module(name) for name in {names}]"
    code = f"import sys, importlib; {load}; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_core_dependencies_are_the_agreed_ones() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = {re.split(r"[<>=!~;\[ ]", line, maxsplit=1)[0] for line in project["dependencies"]}
    assert named == set(CORE), "the core's dependencies changed: make it an extra, or change CORE"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("ps/server.py", "import torch\nfrom paceline.params import Layout"),
        ("ps/server.py", "from . import update\nfrom .update import step"),
        ("ps/__init__.py", "from .server import Server"),
        ("control/controller.py", "from paceline.plan import Plan"),
        (
            "plan/plan.py",
            "from paceline.params import partition\nfrom paceline.core.modes import ModeSpec",
        ),
        ("ps/deep/part.py", "from ..server import Server\nfrom ...params import Layout"),
        ("ps/server.py", "from ..core.leases import LeaseBook\nfrom paceline import exceptions"),
        ("engines/ray.py", "def start():\n    import ray"),
        ("engines/ray.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ray"),
        ("core/modes/machine.py", "from dataclasses import dataclass\nfrom ...exceptions import E"),
        ("core/modes/machine.py", "from . import spec\nfrom paceline.core.modes.spec import ModeSpec"),
        ("data/cache.py", "from . import digits\nimport time"),
        ("testing/faults.py", "import paceline.cli.run_command\nfrom paceline import fit"),
        ("papers/trials.py", "import paceline\nfrom paceline.testing import SimulatedRun"),
        ("cli/run_command.py", "import paceline\nfrom paceline.api import fit"),
        ("__init__.py", "from paceline.api import fit\nfrom .exceptions import PacelineError"),
        ("__main__.py", "from paceline.cli import main"),
        ("observe/__init__.py", "from paceline.observe.show.progress import Progress"),
        ("observe/show/page.py", "from paceline.observe.analyse import facts\nfrom . import markup"),
        ("observe/show/page.py", "from paceline.observe.record.status import RunStatus"),
        ("storage/job.py", "import yaml\nyaml.safe_load('')"),
    ],
)
def test_allowed(path: str, text: str) -> None:
    assert faults_of(path, text) == []


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("ps/server.py", "from paceline.control import Controller", "not below 'ps'"),
        ("ps/server.py", "from ..worker.client import Client", "not below 'ps'"),
        ("ps/server.py", "from .. import control", "not below 'ps'"),
        ("ps/server.py", "import paceline", "'paceline' is not below 'ps'"),
        ("ps/server.py", "from paceline import fit", "'paceline' is not below 'ps'"),
        ("ps/server.py", "def late():\n    import paceline.cli", "not below 'ps'"),
        ("ps/server.py", "if TYPE_CHECKING:\n    from paceline.engines import E", "not below 'ps'"),
        ("cli/run_command.py", "from paceline.testing import Faults", "depend on testing"),
        ("api/runs.py", "from paceline.papers.bench import repeat", "not below 'api'"),
        ("observe/record/spans.py", "from paceline.comm import Frame", "not below 'observe'"),
        ("observe/record/spans.py", "from paceline.observe.show import plots", "'show' is above 'record'"),
        ("observe/record/spans.py", "from ..analyse.facts import Facts", "'analyse' is above 'record'"),
        ("observe/analyse/facts.py", "from paceline.observe.show.page import x", "above 'analyse'"),
        ("observe/analyse/facts.py", "from paceline.observe import RunStatus", "import from the package"),
        ("cli/run_command.py", "from paceline.control.rundir import find_run", "through paceline.api only"),
        ("brand/new.py", "import os", "has no row in LAYERS"),
        ("core/modes/machine.py", "import time", "is pure"),
        ("core/modes/machine.py", "def f():\n    from torch import Tensor", "is pure"),
        ("core/modes/machine.py", "from paceline.observe import span", "of ours only exceptions"),
        ("core/leases.py", "import numpy as np", "is pure"),
        ("core/leases.py", "import threading", "is pure"),
        ("core/leases.py", "from paceline.data.cache import Cache", "of ours only exceptions"),
        ("core/leases.py", "from .. import data", "of ours only exceptions"),
        ("engines/ray.py", "import ray", "is an extra"),
        ("engines/ray.py", "try:\n    import ray\nexcept ImportError:\n    ray = None", "an extra"),
        ("engines/ray.py", "class Engine:\n    import ray", "is an extra"),
        ("comm/wire.py", "def f():\n    import pickle", "runs what it reads"),
        ("comm/wire.py", "from cloudpickle import loads", "runs what it reads"),
        (
            "storage/checkpoint.py",
            "import torch as t\nfrom torch import load",
            "runs what it reads",
        ),
        ("storage/checkpoint.py", "import torch\ntorch.load('x')", "torch.load runs"),
        ("storage/job.py", "import yaml\nread = yaml.load", "yaml.load runs"),
    ],
)
def test_refused(path: str, text: str, said: str) -> None:
    faults = faults_of(path, text)
    assert len(faults) == 1, faults
    assert said in faults[0]
