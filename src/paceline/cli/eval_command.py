"""paceline eval: measures a run's model, later or while it trains."""

from typing import Annotated

import typer

from paceline.cli import parameters
from paceline.cli.printing import note, say
from paceline.exceptions import UsageError

__all__ = ["evaluate"]


def evaluate(
    run: Annotated[str, parameters.RUN],
    script: Annotated[
        str | None,
        typer.Argument(
            help="A script that makes the same model; without it, the run's own.", show_default=False
        ),
    ] = None,
    args: Annotated[
        list[str] | None, typer.Argument(help="Arguments of that script, after --.", show_default=False)
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="While the run goes on: evaluate again after every N updates.",
            show_default=False,
        ),
    ] = None,
    checkpoint: Annotated[
        int | None,
        typer.Option(
            metavar="VERSION",
            min=0,
            help="The checkpoint of this version, not the newest.",
            show_default=False,
        ),
    ] = None,
    trust: Annotated[bool, parameters.TRUST] = False,
) -> None:
    """Measure a run's model with the script's @paceline.evaluation.

    The script runs up to paceline.prepare(…). Of a run that goes on, a snapshot is measured, and training
    does not wait for it; else the last checkpoint. The values are kept with the run.

    [dim]paceline eval last[/dim]
    """
    from paceline.api.runs import find_run

    found = find_run(run, trust=trust)
    if every is not None and checkpoint is not None:
        raise UsageError("--every and --checkpoint: a checkpoint is one model, which is measured once.")

    from paceline.api.evaluating import Evaluated, evaluate_run
    from paceline.observe.analyse import wording

    def shown(done: Evaluated) -> None:
        values = " · ".join(wording.metrics(done.values))
        say(f"version {wording.count(done.version)}: {values} ({done.seconds:.1f} s)")

    evaluate_run(
        found, script=script, args=args or (), every=every, version=checkpoint, shown=shown, say=note
    )
