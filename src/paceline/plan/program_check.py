"""The program of a job: is it there? Looked at before anything starts; nothing of it is run or imported."""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from paceline.exceptions import PlanError, UsageError
from paceline.plan.job import Job

__all__ = ["check_program", "search_path"]


def check_program(job: Job) -> None:
    """See that a job's script or module is there.

    Raises:
        PlanError: it is not, or cannot be read; with what is close.
        UsageError: what is meant to be a module's name is a path.
    """
    if job.script is None:
        return
    if job.module:
        _check_module(job.script)
    else:
        _check_script(job.script)


def search_path(job: Job) -> str | None:
    """What stands first in the program's `sys.path`: the script's directory; for a module the present one."""
    if job.script is None:
        return None
    return os.getcwd() if job.module else str(Path(job.script).resolve().parent)


def _check_module(name: str) -> None:
    if "/" in name or name.endswith(".py") or not all(map(str.isidentifier, name.split("."))):
        hint = f" (or leave -m out: `paceline run {name}`)" if name.endswith(".py") else ""
        raise UsageError(f"-m {name}: give a module's name, as in package.train{hint}")
    where: list[str] | None = [os.getcwd(), *(path for path in sys.path if path)]
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        full = ".".join(parts[:number])
        found = PathFinder.find_spec(full, where) if where is not None else None
        if found is None:
            raise _no_module(name, full, spec)
        spec = found
        locations = found.submodule_search_locations
        where = None if locations is None else list(locations)
    if where is not None and PathFinder.find_spec(f"{name}.__main__", where) is None:
        raise PlanError(
            f"-m {name}: {name} is a package without a __main__.py, so it cannot be run; name a module in it"
            + _suggestion([f"{name}.{each}" for each in _modules_in(where)])
        )


def _no_module(name: str, missing: str, parent: ModuleSpec | None) -> PlanError:
    from difflib import get_close_matches

    if parent is None:
        there, prefix, where = _modules_in([os.getcwd()]), "", f"looked in {Path.cwd()} and in sys.path"
    elif parent.submodule_search_locations is None:
        return PlanError(
            f"-m {name}: there is no module {missing!r}: {parent.name} is a module, not a package"
        )
    else:
        places = list(parent.submodule_search_locations)
        there, prefix, where = _modules_in(places), f"{parent.name}.", f"looked in {', '.join(places)}"
    rest = name.split(".")[missing.count(".") + 1 :]
    close = get_close_matches(missing.rpartition(".")[2], there, n=3)
    return PlanError(
        f"-m {name}: there is no module {missing!r} ({where})"
        + _suggestion([".".join([prefix + each, *rest]) for each in close])
    )


def _modules_in(places: list[str]) -> list[str]:
    found = {
        path.name.removesuffix(".py")
        for place in places
        for path in Path(place).glob("*")
        if path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py")))
    }
    return sorted(name for name in found if name.isidentifier() and not name.startswith("__"))


def _check_script(script: str) -> None:
    path = Path(script)
    where = f" (looked in {Path.cwd()})" if not path.is_absolute() else ""
    try:
        if path.is_dir():
            raise PlanError(
                f"script {script!r} is a directory; name the Python file in it to run"
                + _suggestion([str(each) for each in sorted(path.glob("*.py"))])
            )
        with path.open("rb"):
            pass
    except FileNotFoundError:
        near = sorted(path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise PlanError(f"script {script!r} does not exist{where}{_near(path, near)}") from None
    except OSError as error:
        raise PlanError(
            f"script {script!r} cannot be read: {error.strerror or error}. "
            "Check its permissions and those of its directories"
        ) from error


def _near(path: Path, there: list[Path]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(path.stem, [each.stem for each in there], n=3)
    return _suggestion([str(path.parent / f"{stem}.py") for stem in close])


def _suggestion(names: list[str]) -> str:
    return f". Did you mean {' or '.join(names[:3])}?" if names else ""
