"""The runs of a study: every combination of the grid's values, each with every seed. Pure.

Axis      one `--grid`: a setting of a job, or an argument of the script, and its values
Trial     one run: a value of each axis, and a seed
trials    all of them
job_of    the job of one
left      which of them are to be run yet
startable which of those may start now
"""

import dataclasses
import hashlib
import itertools
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Self

from paceline.exceptions import UsageError
from paceline.plan.job import JOB_OPTIONS, Job

__all__ = ["BUDGETS", "Axis", "StudyPlan", "Trial", "job_of", "left", "startable", "trials"]

ARGUMENT = "arg:"
"""Before the name of a script's argument."""
BUDGETS = {"samples": "max_samples", "updates": "max_updates", "seconds": "max_time_s", "time": "max_time_s"}
"""What a budget can be of: the setting that ends a run then."""

_PARTS_OF_MODE = ("period", "quorum", "damping")
"""Options that are parts of a mode."""
_COLUMNS = frozenset(
    {
        *("trial", "seed", "state", "path", "runs", "time", "worker", "attempt", "step", "version", "epoch"),
        *(
            "name",
            "value",
            "seconds",
            "samples",
            "updates",
            "samples_per_s",
            "idleness",
            "staleness",
            "bytes",
        ),
    }
)
"""Of the tables of a study."""


@dataclass(frozen=True)
class Axis:
    """What is varied, and how.

    Raises:
        UsageError: no setting of a job is called so, or there is no value.
    """

    key: str
    """`mode`, `workers`, …; or `arg:lr` for the script's `--lr`."""
    values: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.values or not all(self.values):
            raise UsageError(f"grid {self.key}: give at least one value, as in {self.key or 'mode'}=bsp,asp")
        if twice := [value for value in self.values if self.values.count(value) > 1]:
            raise UsageError(f"grid {self.key}: {twice[0]} is there twice")
        if not self.argument:
            field_of(self.key)
        elif not self.key.removeprefix(ARGUMENT).strip("-"):
            raise UsageError("grid arg:… needs the name of an argument of the script, as in arg:lr=0.1,0.01")

    @classmethod
    def parse(cls, text: str) -> Self:
        """`mode=bsp,ssp:2` or, where values have commas, `mode=bsp;downpour:2,4`."""
        key, equals, values = text.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--grid {text}: give a name and values, as in mode=bsp,asp or arg:lr=0.1,0.01")
        return cls(key.strip(), tuple(_split(values)))

    @property
    def argument(self) -> bool:
        """Whether it is the script's."""
        return self.key.startswith(ARGUMENT)

    @property
    def name(self) -> str:
        """Of its column in tables: `lr`, or `arg:lr` if another column is called so."""
        name = self.key.removeprefix(ARGUMENT).lstrip("-")
        return self.key if self.argument and name in _COLUMNS else name

    def words(self, value: str) -> list[str]:
        """The script's arguments for a value: `--lr 0.1`."""
        name = self.key.removeprefix(ARGUMENT)
        return [name if name.startswith("-") else f"--{name}", value]


@dataclass(frozen=True)
class Trial:
    """One run of a study."""

    name: str
    """Of its directory."""
    cell: tuple[tuple[str, str], ...]
    """Each axis's name and the value."""
    seed: int

    @property
    def label(self) -> str:
        """For people: `mode=ssp:2 workers=4`; without its seed."""
        return " ".join(f"{name}={value}" for name, value in self.cell) or "as given"


def trials(axes: Sequence[Axis], seeds: Sequence[int]) -> list[Trial]:
    """All runs, the first seed of all combinations first: a study that is cut short has something of each."""
    names = [axis.name for axis in axes]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"the grid has {twice[0]} twice; give all its values at once")
    if not seeds or len(set(seeds)) != len(seeds):
        raise UsageError(f"seeds={list(seeds)}: give at least one, each once")
    cells = list(itertools.product(*(axis.values for axis in axes)))
    found = []
    for number, (seed, cell) in enumerate(itertools.product(seeds, cells), 1):
        pairs = tuple(zip(names, cell, strict=True))
        words = "-".join(re.sub(r"[^A-Za-z0-9.+]+", "-", value) for _, value in pairs)
        found.append(Trial(f"{number:03}-{words[:60].strip('-')}-seed{seed}".replace("--", "-"), pairs, seed))
    return found


def job_of(
    base: Job, axes: Sequence[Axis], trial: Trial, *, run_dir: str, seed_argument: str | None = None
) -> Job:
    """The job of one run.

    Args:
        base: what all of them share, its budget too.
        seed_argument: the script's argument that the seed is also given to.

    Raises:
        UsageError: a combination that no job can have; it is named.
    """
    settings: dict[str, Any] = {"seed": trial.seed, "run_dir": run_dir}
    args, knobs = list(base.args), ""
    for axis, (_, value) in zip(axes, trial.cell, strict=True):
        if axis.argument:
            args += axis.words(value)
        elif axis.key in _PARTS_OF_MODE:
            knobs += f"+{axis.key}={value}"
        else:
            name = field_of(axis.key)
            settings[name] = _value(axis.key, name, value)
    if seed_argument is not None:
        args += Axis(f"{ARGUMENT}{seed_argument}", (str(trial.seed),)).words(str(trial.seed))
    settings["mode"] = settings.get("mode", base.mode) + knobs
    try:
        return dataclasses.replace(base, args=tuple(args), **settings)
    except UsageError as error:
        raise UsageError(f"{trial.label}: {error}") from None


def left(states: Mapping[str, str], *, again: bool = False) -> list[str]:
    """Of all runs, by name and state, those that are to be run yet.

    A run that was stopped or crashed is begun again: figures of a run in two parts would not compare with the
    others'. One that failed would fail again.

    Args:
        states: `new`, or what `RunDirectory.state` says; in the order of the study.
        again: run those that failed once more.
    """
    done = {"succeeded"} if again else {"succeeded", "failed"}
    return [name for name, state in states.items() if state not in done]


def startable(waiting: Sequence[int], running: Sequence[int], *, at_once: int | None, cores: int) -> int:
    """How many of those that wait may start now, in their order.

    Args:
        waiting, running: numbers of workers of each run.
        at_once: maximum number of runs at the same time; None: as many as have a core for each worker.
    """
    going, count = list(running), 0
    for workers in waiting:
        if going and (sum(going) + workers > cores if at_once is None else len(going) >= at_once):
            break
        going.append(workers)
        count += 1
    return count


def field_of(key: str) -> str:
    """The setting of a job that a grid's key means. Raises UsageError, with the nearest."""
    name = key.replace("-", "_")
    if name in _PARTS_OF_MODE:
        return name
    found = next((option for option in JOB_OPTIONS if name in option.keys), None)
    if found is not None and found.not_in_grid is not None:
        raise UsageError(f"grid {key}: it cannot be varied here; {found.not_in_grid}")
    if found is not None:
        return found.name
    known = [option.name for option in JOB_OPTIONS if option.not_in_grid is None]
    close = get_close_matches(name, [*known, *_PARTS_OF_MODE], n=1)
    hint = f"Did you mean {close[0]}? " if close else ""
    raise UsageError(
        f"grid {key}: `paceline run` has no option --{key.replace('_', '-')}. {hint}For an argument of the "
        f"script write arg:{key}=…"
    )


def _split(text: str) -> list[str]:
    if ";" in text:
        return [part.strip() for part in text.split(";")]
    found: list[str] = []
    for part in map(str.strip, text.split(",")):
        if found and part.isdigit() and re.fullmatch(r"downpour:\d+", found[-1]):
            found[-1] += f",{part}"  # the one mode that has a comma
        else:
            found.append(part)
    return found


_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _value(key: str, name: str, text: str) -> Any:
    """A setting's value from text."""
    kind = next(option.kind for option in JOB_OPTIONS if option.name == name)
    kinds = set(typing.get_args(kind)) if isinstance(kind, types.UnionType) else {kind}
    if bool in kinds:
        if text.lower() not in _TRUTH:
            raise UsageError(f"grid {key}={text}: give true or false")
        return _TRUTH[text.lower()]
    for number in (int, float):
        if number in kinds:
            try:
                return number(text)
            except ValueError:
                what = "a whole number" if number is int else "a number"
                raise UsageError(f"grid {key}={text}: give {what}") from None
    return text if str in kinds else (text,)


@dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """All of a study, as it is written down when it begins. `of` checks every run's job."""

    job: Job
    """What all runs share."""
    axes: tuple[Axis, ...]
    seeds: tuple[int, ...]
    seed_argument: str | None = None
    directory: str = "."
    """Where it was begun: relative paths mean there."""

    @property
    def trials(self) -> list[Trial]:
        """Its runs."""
        return trials(self.axes, self.seeds)

    def job_of(self, trial: Trial, run_dir: str) -> Job:
        """One run's job."""
        return job_of(self.job, self.axes, trial, run_dir=run_dir, seed_argument=self.seed_argument)

    @property
    def fingerprint(self) -> str:
        """The same for the same study, begun in the same place."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "job": self.job.to_json(),
            "grid": [{"key": axis.key, "name": axis.name, "values": list(axis.values)} for axis in self.axes],
            "seeds": list(self.seeds),
            "seed_argument": self.seed_argument,
            "directory": self.directory,
            "trials": [{"name": t.name, "cell": dict(t.cell), "seed": t.seed} for t in self.trials],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read back what `to_json` made."""
        return cls(
            job=Job.from_json(data["job"]),
            axes=tuple(Axis(axis["key"], tuple(axis["values"])) for axis in data["grid"]),
            seeds=tuple(data["seeds"]),
            seed_argument=data["seed_argument"],
            directory=data["directory"],
        )
