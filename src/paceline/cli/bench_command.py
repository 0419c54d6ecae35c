"""paceline bench: repeats a paper's experiments on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.printing import cell, complain, note, say
from paceline.exceptions import UsageError

if TYPE_CHECKING:
    from paceline.papers.results import Results

__all__ = ["bench"]


def bench(
    paper: Annotated[
        str,
        typer.Argument(metavar="paper1|paper4", help="The paper.", show_default=False),
    ],
    scale: Annotated[
        str,
        typer.Option(
            metavar="small|full",
            help="small: two cores, twenty minutes; full: as many images and as large networks as the paper.",
        ),
    ] = "small",
    data: Annotated[
        str,
        typer.Option(
            metavar="DIR|synthetic",
            help="Photos in a folder for every class (paper1), CIFAR-10 (paper4); or generated images.",
        ),
    ] = "synthetic",
    directory: Annotated[
        str | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="Folder of results.html and results.json. [dim]Default: PAPER-SCALE in the present "
            "one.[/dim]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Repeat a paper's experiments here: the paper's figures, ours and their ratio, as tables and a page.

    Exit code 1: something that the paper found does not show here, or training in Paceline's own way is not
    better where it should be.

    [dim]paceline bench paper4 --scale small[/dim]
    """
    from paceline.papers.bench import repeat
    from paceline.papers.results_page import write_results

    folder = Path(directory or f"{paper}-{scale}")
    try:  # before twenty minutes of work
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--dir {folder} cannot be written: {error.strerror or error}. Name a folder that you may "
            "write to"
        ) from None
    found = repeat(paper, scale=scale, data=data, tell=lambda line: say(line, err=True))
    _show(found)
    say(f"\npage           {write_results(found, folder).absolute()}")
    say(f"for programs   {(folder / 'results.json').absolute()}")
    failed = [check for each in found.experiments for check in each.checks if not check.ok]
    if failed:
        for check in failed:
            complain(f"check failed: {check.text}. Found: {check.found}")
        raise typer.Exit(1)


def _show(found: "Results") -> None:
    from rich.console import Console
    from rich.table import Table

    from paceline.papers.results_page import HEAD, cells

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    say(f"{found.paper}", bold=True)
    say(f"scale {found.scale}, {found.data}, {found.machine}, {found.date}, {found.seconds / 60:.1f} minutes")
    if found.data == "synthetic data":
        note("the images are generated, not the paper's; --data DIR takes real ones")
    for each in found.experiments:
        say(f"\n{each.title}{' (emulated)' if each.emulated else ''}", bold=True)
        say(each.how)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for number, name in enumerate(HEAD):
            table.add_column(cell(name), justify="right" if 2 <= number <= 4 else "left", overflow="fold")
        for row in each.rows:
            table.add_row(*map(cell, cells(row)))
        console.print(table)
        say(f"Why ours differs: {each.why}")
        for check in each.checks:
            say(
                f"{'ok  ' if check.ok else 'FAIL'}  {check.text}: {check.found}",
                fg=None if check.ok else "red",
            )
