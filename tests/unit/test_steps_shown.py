"""A run without a prepared loader shows steps a second, and samples only if its script counts them."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from paceline.cli.outcome import numbers
from paceline.observe import RunStatus, WorkerStatus
from paceline.observe.analyse.comparison import ComparedRun, compare
from paceline.observe.analyse.run_data import RunData
from paceline.observe.analyse.summary import key_figures
from paceline.observe.analyse.window import Window
from paceline.observe.show.display import picture
from paceline.observe.show.progress import plain_line
from tests.synthetic_run import write_run


def moment(second: float, steps: int, samples: int = 0, **more: int) -> RunStatus:
    workers = {rank: WorkerStatus(rank=rank, clock=steps) for rank in (0, 1)}
    return RunStatus(
        state="running",
        loader=False,
        elapsed_s=second,
        version=steps,
        samples=samples,
        workers=workers,
        parameters=8,
        **more,
    )


@pytest.mark.parametrize(
    "samples, shown",
    [(0, "30 steps/s (last 10 s: 40)"), (600, "30 steps/s (last 10 s: 40) · 30 samples/s (last 10 s: 60)")],
)
def test_progress_and_live_view(samples: int, shown: str) -> None:
    window = Window(5.0)
    window.see(moment(10.0, 100))
    now = moment(20.0, 300, samples)
    window.see(now)
    assert f"running · 600 steps · {shown} · version 300" in plain_line(now, window)
    console = Console(width=100, height=24, file=io.StringIO())
    with console.capture() as capture:
        console.print(picture(now, window, width=100, height=24))
    assert f" {shown} · version 300" in capture.get()


def test_the_summary_line() -> None:
    assert numbers(moment(10.0, 100)) == " after 10.0 s: 200 steps, 100 updates, 20 steps/s."
    assert "20 steps/s, 64 samples/s" in numbers(moment(10.0, 100, 640))
    resumed = moment(10.0, 100, steps_before=150)
    assert "5 steps/s" in numbers(resumed), "steps before the resume are no part of the rate"


def test_report_and_comparison(tmp_path: Path) -> None:
    with_loader = write_run(tmp_path / "with", steps=5)
    without = write_run(tmp_path / "without", steps=5)
    status = json.loads((without / "status.json").read_text())
    status |= {"loader": False, "samples": 0, "elapsed_s": 10.0, "startup_s": 0.0, "leases": []}
    (without / "status.json").write_text(json.dumps(status))
    runs = [ComparedRun.of(RunData(path)) for path in (with_loader, without)]
    names = dict(key_figures(runs[1].run, runs[1].facts))
    assert "samples a second" not in names and float(names["steps a second"]) > 0
    rows = {row.name: row.cells for row in compare([[each] for each in runs])}
    assert rows["steps a second"][0] == "–" and float(rows["steps a second"][1]) > 0
    assert rows["samples a second"][1] == "–"


def test_what_the_lead_tells() -> None:
    told = {"version": 1, "epoch": 0, "samples": 0, "parameters": 8, "refused": 0, "dropped": 0, "lost": 0}
    told |= {"update_s": 0.0, "staleness": {}, "leases": [], "earlier_epochs": {}}
    found = []
    for data in (None, {"stream": True}, {"samples": 60}):
        status = replace(moment(1.0, 1))
        status.hear({**told, "data": data})
        found.append((status.loader, status.stream))
    assert found == [(False, False), (True, True), (True, False)]


def test_the_last_figures_stay_the_last() -> None:
    """A server that ends may tell the same once more; more than that is of a run that goes on."""
    told = {"version": 1, "epoch": 0, "samples": 8, "parameters": 8, "refused": 0, "dropped": 0, "lost": 0}
    told |= {"update_s": 0.0, "staleness": {}, "leases": [], "earlier_epochs": {}, "data": None}
    status = moment(1.0, 1)
    found = []
    for more in ({}, {"last": True}, {}, {"version": 2}):
        status.hear(told | more)
        found.append(status.told_all)
    assert found == [False, True, True, False]
