"""paceline certs: certificates for a run, made beforehand."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.printing import say
from paceline.plan.security import CERTIFICATE_DAYS

__all__ = ["certs"]


def certs(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to keep them.", show_default=False)],
    run: Annotated[
        str,
        typer.Option(
            "--run",
            metavar="NAME",
            help="The run they are for: its script without .py, its --run-dir's last part, or its id.",
            show_default=False,
        ),
    ],
    roles: Annotated[
        list[str] | None,
        typer.Option(
            "--role", metavar="ROLE", help="Only for controller, server or worker.", show_default="all three"
        ),
    ] = None,
    days: Annotated[int, typer.Option("--days", metavar="N", help="How long they last.")] = CERTIFICATE_DAYS,
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="HOST",
            help="Name or address; who listens elsewhere with it is refused. Can be repeated.",
            show_default="anywhere",
        ),
    ] = None,
) -> None:
    """Make certificates for a run beforehand, to keep or inspect them. A run with --tls makes its own.

    They are signed by an authority of the run's own; its key, ca.key, is needed only to make more.

    [dim]paceline certs certs/ --run train && paceline run --certs certs/ --link tcp train.py[/dim]
    """
    from paceline.api.certifying import ROLES, make_certificates

    written = make_certificates(directory, run, roles=roles or ROLES, days=days, hosts=hosts or ())
    names = ", ".join(path.name for path in written if path.suffix == ".pem")
    last = "1 day" if days == 1 else f"{days} days"
    say(f"Wrote {names} and their keys to {directory}, for run {run}; good for {last}.")
    if (directory / "ca.key").exists():
        say("Keep ca.key to yourself: who has it can join the run in any role.")
