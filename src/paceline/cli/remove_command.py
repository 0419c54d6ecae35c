"""paceline rm and prune: delete runs that are over."""

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import parameters
from paceline.cli.printing import complain, note, say
from paceline.exceptions import PacelineError, UsageError
from paceline.plan.amounts import nbytes, seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.api.removal import Candidate

__all__ = ["prune", "rm"]

DRY_RUN = typer.Option("--dry-run", help="Say what would be removed, and remove nothing.", show_default=False)


def rm(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN …",
            help="Runs: ids, beginnings of ids, directories, or [b]last[/b].",
            show_default=False,
            autocompletion=parameters.complete_run,
        ),
    ],
    dry_run: Annotated[bool, DRY_RUN] = False,
    trust: Annotated[bool, parameters.TRUST] = False,
) -> None:
    """Remove runs with all their files. One that is going on is refused.

    [dim]paceline rm 20261115-081502 --dry-run[/dim]
    """
    from paceline.api.removal import removable_runs

    # Nothing is removed unless all can be.
    _remove(removable_runs(runs, trust=trust), dry_run=dry_run)


def prune(
    older_than: Annotated[
        float | None,
        typer.Option(
            metavar="DURATION",
            parser=seconds("--older-than"),
            help="Runs that ended longer ago than this: 12h, 30d, 8w.",
            show_default=False,
        ),
    ] = None,
    larger_than: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=nbytes("--larger-than"),
            help="Runs that take more than this on the disk: 500MB, 2GB.",
            show_default=False,
        ),
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STATE",
            help="Runs in this state: succeeded, failed, stopped, crashed, damaged. Can be repeated.",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[
        int, typer.Option(metavar="N", help="The newest N stay, whatever they are.", show_default=False)
    ] = 0,
    dry_run: Annotated[bool, DRY_RUN] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.", show_default=False)] = False,
) -> None:
    """Remove the runs that fulfil all conditions given. One that is going on never is.

    [dim]paceline prune --older-than 30d --state failed --state crashed --dry-run[/dim]
    """
    from paceline.api.removal import old_runs

    if older_than is None and larger_than is None and not state and not keep:
        raise UsageError(
            "prune what? Give --older-than, --larger-than, --state or --keep; `paceline rm RUN` removes "
            "single runs"
        )
    if keep < 0:
        raise UsageError(f"--keep {keep}: give a number of runs, 0 or more")
    states = [each.strip().lower() for text in state or () for each in text.split(",")]
    chosen, number = old_runs(older_than_s=older_than, larger_than=larger_than, states=states, keep=keep)
    if not chosen:
        say(f"Nothing to remove: none of {number} runs fulfils all conditions.")
        return
    if not dry_run and not yes:
        _remove(chosen, dry_run=True)
        if not sys.stdin.isatty():
            raise UsageError("nothing was removed: there is no terminal to ask at; give --yes")
        typer.confirm("Remove them?", abort=True)
    _remove(chosen, dry_run=dry_run)


def _remove(chosen: "Sequence[Candidate]", *, dry_run: bool) -> None:
    """Remove them one by one, or only say so."""
    from paceline.api.removal import remove_run
    from paceline.observe.analyse import wording

    freed, number, failed = 0, 0, False
    for each in chosen:
        what = f"run {each.run.id} ({each.state} {wording.ago(time.time() - each.changed)} ago)"
        if dry_run:
            say(f"Would remove {what}: {wording.size(each.nbytes)}")
            freed, number = freed + each.nbytes, number + 1
            continue
        try:
            left = remove_run(each)
        except PacelineError as error:
            complain(str(error))
            failed = True
            continue
        freed, number = freed + each.nbytes, number + 1
        say(f"Removed {what}: {wording.size(each.nbytes)}")
        if left:
            note(f"{each.run.path} stays: it also holds {', '.join(left[:5])}{', …' * (len(left) > 5)}")
    verb = "would be freed" if dry_run else "freed"
    say(f"{wording.plural(number, 'run')}, {wording.size(freed)} {verb}.")
    if failed:
        raise typer.Exit(1)
