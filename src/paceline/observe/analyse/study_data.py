"""A study's runs together: data frames, means and deviations over seeds.

STUDY/
  study.json    the plan: the job, the grid, the seeds, and the trials
  trials/       one job file a run: `paceline run` takes it
  runs/         one run directory each
  output/       what each command showed
  study.html    the page
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import numpy.typing as npt

from paceline.exceptions import UsageError
from paceline.observe.analyse import wording
from paceline.observe.analyse.comparison import better
from paceline.observe.analyse.curves import thinned
from paceline.observe.analyse.facts import Series
from paceline.observe.analyse.run_data import RunData
from paceline.observe.analyse.summary import known_facts
from paceline.storage.json_files import read_object
from paceline.storage.plain_files import reason_of
from paceline.storage.typed_json import checked

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["FIGURES", "OVER", "Band", "StudyData", "banded", "deviation"]

FIGURES: dict[str, Callable[[float], str]] = {
    "samples_per_s": wording.count,
    "idleness": wording.percent,
    "staleness": lambda value: f"{value:.2g}",
    "bytes": wording.size,
    "updates": wording.count,
    "samples": wording.count,
    "seconds": wording.duration,
}
"""Columns of `runs` beside the metrics, and how they are written."""
OVER = {"samples": "samples", "updates": "updates", "seconds": "seconds"}
"""What curves are drawn against: columns of `values`."""
_POINTS = 60
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Band:
    """A curve with the deviation around it."""

    name: str
    at: list[float]
    mean: list[float]
    deviation: list[float]
    """0 where there is one seed only."""


class TrialRecord(TypedDict):
    """One run of a study, as study.json has it."""

    name: str
    cell: dict[str, str]
    """Its values of the grid's keys."""
    seed: int


class _AxisRecord(TypedDict):
    key: str
    values: list[str]


class _StudyRecord(TypedDict):
    """study.json: `StudyPlan.to_json()`."""

    job: dict[str, Any]
    grid: list[_AxisRecord]
    seeds: list[int]
    seed_argument: str | None
    directory: str
    trials: list[TrialRecord]


class StudyData:
    """What a study directory holds. It may be going on: runs that have not begun are in state `new`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            plan = checked(_StudyRecord, read_object(path / "study.json", most=_MOST_BYTES))
            for trial in plan["trials"]:
                if Path(trial["name"]).name != trial["name"] or "\0" in trial["name"]:
                    raise ValueError(f"trials: {trial['name']!r:.40} is not a name")
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{path} is not a study's directory: study.json: {reason_of(error)}. "
                "`paceline study` makes one"
            ) from error
        self.plan: dict[str, Any] = dict(plan)
        self.axes: list[str] = [axis["key"].removeprefix("arg:").lstrip("-") for axis in plan["grid"]]
        self.trials: list[TrialRecord] = plan["trials"]
        self.missing: list[str] = []
        """What could not be read, for people."""

    @property
    def page_path(self) -> Path:
        """study.html, whether it is there or not."""
        return self.path / "study.html"

    @functools.cached_property
    def runs(self) -> "pd.DataFrame":
        """One row a run: `trial`, the grid's keys, `seed`, `state`; `samples`, `updates`, `seconds` of
        training, `samples_per_s`, `idleness`, `staleness` (the mean), `bytes` (logical); of each metric
        `final_…` (the mean of what each worker logged last) and `best_…` (the best that any worker logged);
        `path`."""
        import pandas as pd

        rows = []
        for trial, data, state in self._data:
            row: dict[str, object] = {
                "trial": trial["name"],
                **trial["cell"],
                "seed": trial["seed"],
                "state": state,
            }
            if data is not None:
                row |= _figures(data) | _metrics(data)
            rows.append({**row, "path": str(self.path / "runs" / trial["name"])})
        frame = pd.DataFrame(rows)
        return _typed(frame, self.axes)

    @functools.cached_property
    def values(self) -> "pd.DataFrame":
        """Every logged value: the columns of a run's `metrics`, `seconds` since its training began,
        `updates`, and the grid's keys, `seed` and `trial`."""
        import pandas as pd

        found = []
        for trial, data, _ in self._data:
            if data is None or not len(data.metrics):
                continue
            frame = _labelled(data)
            for name, value in {**trial["cell"], "seed": trial["seed"], "trial": trial["name"]}.items():
                frame[name] = value
            found.append(frame)
        if not found:
            return pd.DataFrame(columns=["name", "value", *OVER, *self.axes, "seed", "trial"])
        return _typed(pd.concat(found, ignore_index=True), self.axes)

    @functools.cached_property
    def metrics(self) -> list[str]:
        """The names of what was logged, `loss` first."""
        names = self.values["name"].unique().tolist() if len(self.values) else []
        return sorted(names, key=lambda name: (name != "loss", name))

    @functools.cached_property
    def cells(self) -> "pd.DataFrame":
        """One row a combination of the grid: `runs` (that succeeded), and of each figure the mean over seeds
        and, as `…_sd`, the standard deviation (of the sample; not there for one seed)."""
        import pandas as pd

        done = self.runs[self.runs["state"] == "succeeded"]
        numbers = [
            name for name in self.runs.columns if name in FIGURES or str(name).startswith(("final_", "best_"))
        ]
        rows = []
        for labels in self._combinations():
            mine = done[_matching(done, labels)]
            row: dict[str, object] = {**labels, "runs": len(mine)}
            for name in numbers:
                mean, spread = deviation(mine[name].to_numpy(float))
                row |= {name: mean, f"{name}_sd": spread}
            rows.append(row)
        return pd.DataFrame(rows)

    def curves(self, metric: str, over: str) -> list[Band]:
        """A metric's mean and deviation over seeds, a curve for each combination of the grid.

        Args:
            over: `samples`, `updates` or `seconds`.
        """
        table = self.values
        table = table[table["name"] == metric] if len(table) else table
        found = []
        for labels in self._combinations():
            mine = table[_matching(table, labels)]
            parts = []
            for _, rows in mine.groupby("seed"):
                at, values = rows[over].to_numpy(float), rows["value"].to_numpy(float)
                order = np.argsort(at, kind="stable")
                parts.append(Series("", at[order].tolist(), values[order].tolist()))
            if parts and (band := banded(_label(labels), parts)) is not None:
                found.append(band)
        return found

    def _combinations(self) -> list[dict[str, object]]:
        frame = self.runs[self.axes].drop_duplicates() if self.axes else self.runs.iloc[:1][[]]
        return [dict(zip(frame.columns, row, strict=True)) for row in frame.itertuples(index=False)]

    @functools.cached_property
    def _data(self) -> list[tuple[TrialRecord, RunData | None, str]]:
        found = []
        for trial in self.trials:
            path = self.path / "runs" / trial["name"]
            data = RunData(path) if (path / "run.json").exists() else None
            found.append((trial, data, "new" if data is None else _state(data)))
        return found


def deviation(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Mean and standard deviation (of a sample) of those that are finite; nan where there are too few."""
    kept = values[np.isfinite(values)]
    mean = float(kept.mean()) if len(kept) else math.nan
    return mean, float(kept.std(ddof=1)) if len(kept) > 1 else math.nan


def banded(name: str, parts: Sequence[Series], points: int = _POINTS) -> Band | None:
    """Several curves of the same thing as one: where all of them are, their mean and standard deviation.

    Points of one curve are first averaged within equal parts of its length, so that what is logged at every
    step does not only show its noise. None if the curves have nothing in common.
    """
    curves = []
    for part in parts:
        thin = thinned(part, points)
        at, values = np.asarray(thin.at, float), np.asarray(thin.values, float)
        at, values = at[np.isfinite(values)], values[np.isfinite(values)]
        places, first = np.unique(at, return_inverse=True)
        if len(places):
            curves.append((places, np.bincount(first, values) / np.bincount(first)))
    if not curves:
        return None
    low, high = max(at[0] for at, _ in curves), min(at[-1] for at, _ in curves)
    if low > high:
        return None
    number = max(1, min(points, max(len(at) for at, _ in curves)))
    single = curves[0][0] if len(curves) == 1 else None
    grid = single if single is not None else np.linspace(low, high, number)
    rows = np.array([np.interp(grid, at, values) for at, values in curves])
    spread = rows.std(axis=0, ddof=1) if len(rows) > 1 else np.zeros(len(grid))
    return Band(name, grid.tolist(), rows.mean(axis=0).tolist(), spread.tolist())


# --- one run ----------------------------------------------------------------------------------------


def _state(data: RunData) -> str:
    status = data.status
    return "diverged" if status.diverged and status.state == "succeeded" else status.state


def _figures(data: RunData) -> dict[str, float]:
    status = data.status
    return {
        "samples": float(status.samples),
        "updates": float(status.version),
        "seconds": status.pace.seconds,
        "samples_per_s": status.samples_per_s,
        "idleness": status.idleness,
        "staleness": status.staleness_mean,
        "bytes": float(sum(worker.moved_out + worker.moved_in for worker in status.workers.values())),
    }


def _metrics(data: RunData) -> dict[str, float]:
    table = data.standing_metrics
    found = {}
    for name, rows in table.groupby("name") if len(table) else ():
        last = rows.sort_values("time", kind="stable").groupby("worker")["value"].last()
        found[f"final_{name}"] = float(last.mean())
        finite = rows["value"][np.isfinite(rows["value"].to_numpy(float))]
        if len(finite):
            found[f"best_{name}"] = float(finite.max() if better(str(name)) == "high" else finite.min())
    return found


def _labelled(data: RunData) -> "pd.DataFrame":
    """A run's metrics with `seconds`, `updates` and `samples`.

    Where a run does not say (one of an older version), the last two are taken to grow evenly with the steps.
    """
    frame = data.standing_metrics.copy()
    began = known_facts(data).began or float(frame["time"].min())
    frame["seconds"] = frame["time"] - began
    share = frame["step"].astype(float) / max(1.0, float(frame["step"].max()))
    for name, column, last in (
        ("updates", "version", data.status.version),
        ("samples", "samples", data.status.samples),
    ):
        said = frame[column].astype(float) if column in frame else share * math.nan
        frame[name] = said.where(said.notna(), share * last)
    return frame


def _typed(frame: "pd.DataFrame", axes: Sequence[str]) -> "pd.DataFrame":
    """The grid's keys as numbers, where all values are."""
    import pandas as pd

    for name in axes:
        if name in frame:
            try:
                frame[name] = pd.to_numeric(frame[name])
            except (ValueError, TypeError):
                continue
    return frame


def _matching(frame: "pd.DataFrame", labels: Mapping[str, Any]) -> "pd.Series[bool]":
    import pandas as pd

    chosen = pd.Series(True, index=frame.index)
    for name, value in labels.items():
        chosen &= frame[name] == value
    return chosen


def _label(labels: Mapping[str, Any]) -> str:
    if len(labels) == 1:
        return str(next(iter(labels.values())))
    return ", ".join(f"{name} {value}" for name, value in labels.items()) or "all"
