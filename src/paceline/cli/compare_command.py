"""paceline compare: several runs side by side."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import parameters
from paceline.cli.printing import cell, say
from paceline.exceptions import UsageError

__all__ = ["compare"]


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN RUN …",
            help="Two runs or more: ids, beginnings of ids, directories, or [b]last[/b].",
            show_default=False,
            autocompletion=parameters.complete_run,
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Also write a page with plots.", show_default=False),
    ] = None,
    group: Annotated[
        bool,
        typer.Option(
            "--group/--no-group",
            help="Show runs that differ by their seed only in one column, as mean ± standard deviation.",
        ),
    ] = True,
    trust: Annotated[bool, parameters.TRUST] = False,
) -> None:
    """Compare runs: speed, results, and where their time went. The best of a row is marked.

    [dim]paceline compare 20261115-081502 last --html compared.html[/dim]
    """
    if len(runs) < 2:
        raise UsageError(
            f"compare needs two runs or more, and there is one ({runs[0]}). `paceline report {runs[0]}` "
            "shows one run; `paceline runs` lists all"
        )

    from rich.console import Console
    from rich.table import Table

    from paceline.api.reports import compared_runs
    from paceline.observe.analyse import comparison
    from paceline.observe.show import comparison_page

    columns = comparison.columns_of(compared_runs(runs, trust=trust), group=group)
    names = comparison.column_names(columns)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", style="dim", no_wrap=True)
    for name in names:
        table.add_column(cell(name), justify="right", overflow="fold")
    for row in comparison.compare(columns):
        cells = [
            cell(f"{text} *", "bold green") if i in row.best else cell(text)
            for i, text in enumerate(row.cells)
        ]
        table.add_row(cell(row.name), *cells)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 60 + 40 * len(columns)
    console.print(table)
    console.print("[dim]* the best of its row[/dim]")
    for name, each in (
        (short if len(column) == 1 else each.name, each)
        for short, column in zip(names, columns, strict=True)
        for each in column
    ):
        console.print(cell(f"{name}: {each.diagnosis.text}"))
        for text in each.run.missing:
            console.print(cell(f"{name}: missing: {text}", "yellow"))
    if html is not None:
        try:
            comparison_page.write_comparison(columns, html)
        except OSError as error:
            raise UsageError(
                f"--html {html} cannot be written: {error.strerror or error}. Name a file in a directory "
                "that exists and that you may write to"
            ) from error
        say(f"page: {html.absolute()}")
