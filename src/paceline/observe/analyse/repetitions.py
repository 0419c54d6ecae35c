"""Which runs are repetitions of each other: the same job with another seed. Pure: from the jobs alone."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["arguments_of", "differing_settings", "repetitions", "script_of", "seed_of"]

_NOT_SETTINGS = frozenset({"seed", "run_dir"})
"""Fields of a job that two repetitions may differ in."""
_SHOWN_APART = _NOT_SETTINGS | {"mode", "workers", "servers", "args", "script", "module"}
_SEED = re.compile(r"(--?)?(random[-_])?seed", re.IGNORECASE)


def repetitions(jobs: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Places of the jobs that differ by their seed only, in the order of the first of each."""
    found: dict[str, list[int]] = {}
    for at, job in enumerate(jobs):
        setting = {name: value for name, value in job.items() if name not in _NOT_SETTINGS}
        setting["args"] = _without_seed(job)[0]
        # A directory that says nothing about its job is nobody's repetition.
        found.setdefault(json.dumps(setting, sort_keys=True) if job else f"unknown {at}", []).append(at)
    return list(found.values())


def script_of(job: Mapping[str, Any]) -> str:
    """The script without its directory, or the module; `fit` for `paceline.fit`."""
    script = job.get("script")
    if not script:
        return "fit" if job else "–"
    return str(script) if job.get("module") else str(script).rsplit("/", 1)[-1]


def arguments_of(job: Mapping[str, Any]) -> str:
    """The script's arguments, without its seed."""
    return shlex.join(_without_seed(job)[0]) or "–"


def seed_of(job: Mapping[str, Any]) -> str:
    """The script's own seed if it has one among its arguments, else the job's."""
    own = _without_seed(job)[1]
    return own if own is not None else str(job.get("seed", "–"))


def differing_settings(jobs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Options of `paceline run` in which jobs differ, beside mode, sizes and arguments: their values."""
    found = {}
    for name in dict.fromkeys(name for job in jobs for name in job):
        if name not in _SHOWN_APART:
            values = [job.get(name) for job in jobs]
            if any(value != values[0] for value in values):
                found[name.replace("_", " ")] = [_text(value) for value in values]
    return found


def _without_seed(job: Mapping[str, Any]) -> tuple[list[str], str | None]:
    """The script's arguments without `--seed 3`, `--seed=3` or `seed=3`; and the seed."""
    args, seed = [], None
    rest = [str(arg) for arg in job.get("args", ())]
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not _SEED.fullmatch(name) or not (equals or (name.startswith("-") and rest)):
            args.append(word)
        else:
            seed = value if equals else rest.pop(0)
    return args, seed


def _text(value: Any) -> str:
    if value is None or value in ([], ""):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
