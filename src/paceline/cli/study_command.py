"""paceline study: a script over a grid of settings, with several seeds, compared on one page."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import parameters
from paceline.cli.printing import cell, complain, note, say
from paceline.exceptions import UsageError
from paceline.plan.amounts import seconds
from paceline.plan.grid import BUDGETS, Axis, StudyPlan

if TYPE_CHECKING:
    from paceline.observe.analyse.study_data import StudyData

__all__ = ["study"]

_STUDY = "The study"
_BETWEEN = 2


@parameters.takes_job_options("study")
def study(
    ctx: typer.Context,
    script: Annotated[str | None, parameters.SCRIPT] = None,
    args: Annotated[list[str] | None, parameters.ARGS] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=A,B,…",
            help="Try these values of an option of run, or of the script's argument --NAME: arg:NAME=A,B. "
            "Can be repeated.",
            show_default=False,
            rich_help_panel=_STUDY,
        ),
    ] = None,
    seeds: Annotated[
        str,
        typer.Option(
            metavar="N|A,B,…",
            help="Run every combination with so many seeds, from --seed on; or with these.",
            rich_help_panel=_STUDY,
        ),
    ] = "1",
    budget: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT=N",
            help="What ends each run: samples=N, updates=N or time=30m.",
            show_default=False,
            rich_help_panel=_STUDY,
        ),
    ] = None,
    at_once: Annotated[
        str,
        typer.Option(
            metavar="N|fit",
            help="Runs at the same time; fit: as many as have a core for each worker. They share the cores, "
            "so compare seconds with care.",
            rich_help_panel=_STUDY,
        ),
    ] = "1",
    directory: Annotated[
        str | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="Directory of the study. [dim]Default: study-…, named by script and settings.[/dim]",
            show_default=False,
            rich_help_panel=_STUDY,
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Go on with this study.", show_default=False, rich_help_panel=_STUDY
        ),
    ] = None,
    seed_arg: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Also give the seed to the script, as --NAME.",
            show_default=False,
            rich_help_panel=_STUDY,
        ),
    ] = None,
    retry_failed: Annotated[
        bool,
        typer.Option(
            "--retry-failed", help="Run those again that failed.", show_default=False, rich_help_panel=_STUDY
        ),
    ] = False,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust",
            help="Use the study's directory though it is another user's.",
            show_default=False,
            rich_help_panel=_STUDY,
        ),
    ] = False,
    **_: Any,
) -> None:
    """Run a script over a grid of settings, with several seeds, and compare all runs on one page.

    Interrupted, it goes on when the same command is typed again: runs that have ended are not repeated.

    [dim]paceline study --grid mode=bsp,asp --grid workers=2,4 --seeds 3 --budget samples=4096 train.py[/dim]
    """
    number = _at_once(at_once)
    if resume is not None:
        if script is not None or grid:
            raise UsageError("--resume DIR goes on with a study as it is: leave the script and --grid out")
    elif script is None:
        raise UsageError("name the script to study, or give --resume DIR")
    plan = None if resume is not None else _plan(ctx, grid or [], seeds, budget or [], seed_arg)

    from paceline.api import studies

    path = Path(resume) if plan is None and resume is not None else None
    if plan is not None:
        parameters.note_late_flags(ctx)
        path = studies.study_path(plan, directory)
    assert path is not None
    try:
        if plan is None:
            found = studies.resume_study(path, at_once=number, again=retry_failed, tell=say, trust=trust)
        else:
            found = studies.run_study(plan, path, at_once=number, again=retry_failed, tell=say, trust=trust)
    except KeyboardInterrupt:
        note(f"the same command goes on with it, or `paceline study --resume {path}`")
        raise
    _show(found)


def _plan(
    ctx: typer.Context, grid: list[str], seeds: str, budget: list[str], seed_argument: str | None
) -> StudyPlan:
    limits: dict[str, Any] = {}
    for text in budget:
        name, _, amount = text.partition("=")
        if name not in BUDGETS or not amount:
            raise UsageError(f"--budget {text}: give samples=N, updates=N or time=30m")
        limits[BUDGETS[name]] = _amount(text, name, amount)
    job = parameters.job_from({**ctx.params, **limits})
    return StudyPlan(
        job=job,
        axes=tuple(map(Axis.parse, grid)),
        seeds=_seeds(seeds, job.seed),
        seed_argument=seed_argument,
        directory=os.getcwd(),
    )


def _amount(text: str, name: str, amount: str) -> float | int:
    if BUDGETS[name] == "max_time_s":
        return seconds(f"--budget {name}")(amount)
    if not re.fullmatch(r"[\d_,]+", amount) or not int(re.sub(r"[_,]", "", amount)):
        raise UsageError(f"--budget {text}: give a whole number above 0, as in {name}=4096")
    return int(re.sub(r"[_,]", "", amount))


def _seeds(text: str, first: int) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(,\d+)*", text) or text == "0":
        raise UsageError(f"--seeds {text}: give how many, as in 3, or which, as in 1,5,9")
    numbers = tuple(map(int, text.split(",")))
    return numbers if len(numbers) > 1 else tuple(range(first, first + numbers[0]))


def _at_once(text: str) -> int | None:
    if text == "fit":
        return None
    if not text.isdigit() or not int(text):
        raise UsageError(f"--at-once {text}: give a number of runs, or fit")
    return int(text)


def _show(found: "StudyData") -> None:
    from rich.console import Console
    from rich.table import Table

    from paceline.observe.show.study_page import table_rows

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 240
    head, rows, best = table_rows(found)
    shown = fitting(head, rows, console.width, least=len(found.axes) + 2)
    table = Table(box=None, pad_edge=False, padding=(0, _BETWEEN, 0, 0), header_style="dim")
    for name in head[:shown]:
        left = name in found.axes
        table.add_column(cell(name), justify="left" if left else "right", overflow="fold")
    for i, row in enumerate(rows):
        table.add_row(
            *(cell(text, "bold green" if (i, j) in best else "") for j, text in enumerate(row[:shown]))
        )
    console.print()
    console.print(table)
    if shown < len(head):
        say(f"… and on the page: {', '.join(head[shown:])}")
    say(f"\npage           {found.page_path}")
    say(f"data frames    paceline.load_study({str(found.path)!r}).runs and .values")
    failed = int((found.runs["state"] != "succeeded").sum())
    if failed:
        failures = f"{failed} of {len(found.runs)} runs did not succeed: {_where(found.path)}"
        complain(failures)
        raise typer.Exit(1)


def fitting(head: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, least: int) -> int:
    """How many of the first columns fit side by side into a terminal so wide; `least` are shown anyway."""
    used = 0
    for number, name in enumerate(head):
        used += max(len(name), *(len(row[number]) for row in rows)) + _BETWEEN
        if used - _BETWEEN > width:
            return max(least, number)
    return len(head)


def _where(path: Path) -> str:
    return f"see {path / 'output'}; --retry-failed runs them again"
