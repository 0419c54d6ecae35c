"""A study's data: every run once, means and deviations over seeds as one would work them out by hand."""

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.api import load_study
from paceline.control.rundir import RunDirectory
from paceline.exceptions import UsageError
from paceline.observe import RunStatus, WorkerStatus
from paceline.observe.analyse.facts import Series
from paceline.observe.analyse.study_data import banded, deviation
from paceline.observe.record.values import ValueWriter
from paceline.observe.show import plots
from paceline.observe.show.study_page import study_page, table_rows
from paceline.plan import Job
from paceline.plan.grid import Axis, StudyPlan


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StudyPlan:
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "home"))
    axes = (Axis.parse("mode=bsp,asp"), Axis.parse("arg:lr=0.1,0.01"))
    return StudyPlan(job=Job(script="<train>.py", args=("--epochs", "3")), axes=axes, seeds=(0, 1))


def make_study(plan: StudyPlan, path: Path, **states: str) -> Path:
    """Runs whose loss at a step is known: 10 / step, more by 1 with seed 1, half of it in asp."""
    path.mkdir()
    (path / "study.json").write_text(json.dumps(plan.to_json()))
    for trial in plan.trials:
        state = states.get(f"_{trial.name[:3]}", "succeeded")
        if state == "new":
            continue
        run = RunDirectory.create(plan.job_of(trial, str(path / "runs" / trial.name)))
        cell = dict(trial.cell)
        for step in range(1, 11):
            for worker in (0, 1):
                value = (10 / step + trial.seed) * (0.5 if cell["mode"] == "asp" else 1.0)
                event: dict[str, Any] = {"kind": "metrics", "worker": worker, "clock": step}
                run.append_event({**event, "metrics": {"loss": value, "accuracy": step / 20}})
        workers = {rank: WorkerStatus(rank=rank, moved_out=100, moved_in=50, clock=10) for rank in (0, 1)}
        status = RunStatus(state=state, version=20, samples=640, elapsed_s=5.0 + trial.seed, startup_s=1.0)
        status.workers = workers
        status.diverged = "the loss is 1e33" if state == "diverged" else None
        if state == "diverged":
            status.state = "succeeded"
        run.write_status(status.to_json())
    return path


def test_runs_and_values(plan: StudyPlan, tmp_path: Path) -> None:
    study = load_study(make_study(plan, tmp_path / "study", _003="failed", _004="new", _007="diverged"))
    runs = study.runs
    assert len(runs) == 8
    assert runs["state"].tolist() == [
        *["succeeded"] * 2,
        "failed",
        "new",
        *["succeeded"] * 2,
        "diverged",
        "succeeded",
    ]
    assert runs["mode"].tolist() == ["bsp", "bsp", "asp", "asp"] * 2
    assert runs["lr"].tolist() == [0.1, 0.01] * 4  # numbers
    first = runs.iloc[0]
    assert (first["final_loss"], first["best_loss"], first["best_accuracy"]) == (1.0, 1.0, 0.5)
    assert (first["samples"], first["updates"], first["bytes"]) == (640, 20, 300)
    assert math.isnan(runs.iloc[3]["final_loss"])
    values = study.values
    assert len(values) == 7 * 10 * 2 * 2
    mine = values[(values["trial"] == first["trial"]) & (values["name"] == "loss") & (values["worker"] == 0)]
    assert mine["value"].tolist() == pytest.approx([10 / step for step in range(1, 11)])
    # Old records do not say: evenly.
    assert mine["updates"].tolist() == [2.0 * step for step in range(1, 11)]
    assert mine["samples"].tolist() == [64.0 * step for step in range(1, 11)]
    assert (mine["seconds"] >= 0).all()


def test_values_of_steps_that_were_made_again_do_not_count(plan: StudyPlan, tmp_path: Path) -> None:
    """A run that went back to its beginning after a loss of 99, and a best one of 0."""
    path = tmp_path / "study"
    path.mkdir()
    (path / "study.json").write_text(json.dumps(plan.to_json()))
    trial = plan.trials[0]
    run = RunDirectory.create(plan.job_of(trial, str(path / "runs" / trial.name)))
    for attempt, losses in enumerate([(5.0, 0.0, 99.0), (4.0, 3.0)]):
        writer = ValueWriter(run.path / "raw", 0, attempt)
        for loss in losses:
            writer.stepped()
            writer.add({"loss": loss}, version=1, samples=1, epoch=0)
        writer.close()
    run.write_status(RunStatus(state="succeeded", version=2, samples=2).to_json())
    study = load_study(path)
    first = study.runs.iloc[0]
    assert (first["final_loss"], first["best_loss"]) == (3.0, 3.0)
    assert study.values["value"].tolist() == [4.0, 3.0]


def test_means_and_deviations_over_seeds(plan: StudyPlan, tmp_path: Path) -> None:
    study = load_study(make_study(plan, tmp_path / "study", _007="diverged"))
    cells = study.cells.set_index(["mode", "lr"])
    assert cells.loc[("bsp", 0.1), "runs"] == 2
    assert cells.loc[("bsp", 0.1), "final_loss"] == pytest.approx(1.5)
    assert cells.loc[("bsp", 0.1), "final_loss_sd"] == pytest.approx(math.sqrt(0.5))
    assert cells.loc[("asp", 0.1), "runs"] == 1 and math.isnan(cells.loc[("asp", 0.1), "final_loss_sd"])
    assert cells.loc[("asp", 0.1), "final_loss"] == pytest.approx(0.5)
    for over, last in (("updates", 20.0), ("samples", 640.0)):
        curves = study.curves("loss", over)
        assert [curve.name for curve in curves] == [
            f"mode {mode}, lr {lr}" for mode in ("bsp", "asp") for lr in (0.1, 0.01)
        ]
        assert curves[0].at[-1] == last
        assert curves[0].mean[0] == pytest.approx(10.5) and curves[0].mean[-1] == pytest.approx(1.5)
        assert curves[0].deviation == pytest.approx([math.sqrt(0.5)] * len(curves[0].at))


def test_the_page(plan: StudyPlan, tmp_path: Path) -> None:
    study = load_study(make_study(plan, tmp_path / "study", _003="failed"))
    head, rows, best = table_rows(study)
    assert head[:6] == ["mode", "lr", "runs", "final loss", "best loss", "final accuracy"]
    assert rows[0][:4] == ["bsp", "0.1", "2", "1.5 ± 0.7071"]
    assert rows[2][:4] == ["asp", "0.1", "1 of 2", "1"]
    assert (3, 3) in best and (0, 3) not in best  # the lowest loss
    page = study_page(study)
    assert "Study of &lt;train&gt;.py --epochs 3" in page and "<train>" not in page
    assert "003-asp-0.1-seed0: failed" in page
    for over in ("samples", "updates", "seconds"):
        assert f"loss over {over}" in page and f"accuracy over {over}" in page
    assert page.count('class="band') >= 3 * 3  # of those with two seeds, whose losses differ


def test_a_study_of_which_nothing_has_begun(plan: StudyPlan, tmp_path: Path) -> None:
    states = {f"_{number:03}": "new" for number in range(1, 9)}
    study = load_study(make_study(plan, tmp_path / "study", **states))
    assert set(study.runs["state"]) == {"new"} and len(study.values) == 0
    assert "8 new" in study_page(study)


def test_what_is_no_study(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a study's directory: study.json"):
        load_study(tmp_path)
    (tmp_path / "study.json").write_text("[]")
    with pytest.raises(UsageError, match="is not a study's directory"):
        load_study(tmp_path)


def test_deviation() -> None:
    assert deviation(np.array([1.0, 3.0])) == pytest.approx((2.0, math.sqrt(2)))
    mean, spread = deviation(np.array([1.0, math.nan]))
    assert mean == 1.0 and math.isnan(spread)
    assert all(math.isnan(each) for each in deviation(np.array([])))


def test_bands() -> None:
    one = Series("", [0.0, 10.0], [0.0, 10.0])
    two = Series("", [0.0, 5.0, 10.0, 20.0], [2.0, 7.0, 12.0, 100.0])
    band = banded("x", [one, two])
    assert band is not None and band.at[0] == 0 and band.at[-1] == 10  # where both are
    assert band.mean == pytest.approx([at + 1 for at in band.at])
    assert band.deviation == pytest.approx([math.sqrt(2)] * len(band.at))
    assert banded("x", [one, Series("", [11.0, 12.0], [0.0, 0.0])]) is None
    assert banded("x", [Series("", [1.0], [math.nan])]) is None
    alone = banded("x", [Series("", [1.0, 2.0, 2.0], [1.0, 2.0, 4.0])])
    assert alone is not None and (alone.at, alone.mean, alone.deviation) == (
        [1.0, 2.0],
        [1.0, 3.0],
        [0.0, 0.0],
    )
    noise = banded("x", [Series("", list(range(6000)), [float(i % 2) for i in range(6000)])])
    assert noise is not None and len(noise.at) == 60 and noise.mean == pytest.approx([0.5] * 60)


def test_band_chart_is_well_formed() -> None:
    band = banded("a <b>", [Series("", [0.0, 1.0], [0.0, 1.0]), Series("", [0.0, 1.0], [1.0, 3.0])])
    assert band is not None
    figure = ElementTree.fromstring(plots.band_chart("loss", [band], x_label="samples"))
    assert len(figure.findall(".//polygon")) == 1 and len(figure.findall(".//path")) == 1
    assert plots.band_chart("loss", []) == ""
