"""A role's specification on another host: what is a path on the controller's host becomes one there."""

from dataclasses import replace
from pathlib import Path

from paceline.core.json_types import JsonObject
from paceline.engines.base import RoleSpec

__all__ = ["moved"]

_IN_RUN = ("run_dir", "spans_in", "values_in", "resume")
_IN_PROGRAM = ("search", "import_from")
_ELSEWHERE = ("ledger_in",)
"""Left out: a worker's reports have the same."""


def moved(spec: RoleSpec, *, run: tuple[Path, Path], program: tuple[Path, Path] | None) -> RoleSpec:
    """The specification with the paths of another host.

    Args:
        run: the run directory there and here.
        program: the program's directory there and here; None: there is none.
    """
    config: JsonObject = dict(spec.config)
    for name in _IN_RUN:
        if config.get(name) is not None:
            config[name] = _moved(config[name], *run)
    for name in _ELSEWHERE:
        if name in config:
            config[name] = None
    if program is not None:
        for name in _IN_PROGRAM:
            if config.get(name) is not None:
                config[name] = _moved(config[name], *program)
        if config.get("script") is not None and not config.get("module"):
            config["script"] = _moved(config["script"], *program)
    return replace(spec, log=_moved(spec.log, *run), config=config)


def _moved(path: object, there: Path, here: Path) -> str:
    """Raises ValueError for a path outside."""
    return str(here / Path(str(path)).relative_to(there))
