"""paceline trace: a run's spans for Perfetto and chrome://tracing."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import parameters
from paceline.cli.printing import note, say

__all__ = ["trace"]


def trace(
    run: Annotated[str, parameters.RUN],
    out: Annotated[
        Path,
        typer.Argument(help="The file to write: .json, or .json.gz to be compressed.", show_default=False),
    ],
    steps: Annotated[
        str | None,
        typer.Option(
            "--steps",
            metavar="A:B",
            help="Only these steps of the workers, and what the servers did meanwhile.",
            show_default=False,
        ),
    ] = None,
    trust: Annotated[bool, parameters.TRUST] = False,
) -> None:
    """Write what every role did when, as a trace that Perfetto and chrome://tracing open.

    [dim]paceline trace last trace.json.gz --steps 100:120[/dim]
    """
    from paceline.api.reports import write_run_trace
    from paceline.api.runs import find_run
    from paceline.observe.analyse import wording

    written = write_run_trace(find_run(run, trust=trust), out, steps)
    for lack in written.missing:
        note(lack)
    size = wording.size(out.stat().st_size)
    say(f"{out}: {wording.plural(written.spans, 'span')}, {size}. Open it at https://ui.perfetto.dev")
