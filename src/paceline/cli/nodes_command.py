"""paceline nodes: the hosts of a run, and what runs on them."""

from typing import Annotated

from paceline.cli import parameters
from paceline.cli.printing import cell, say

__all__ = ["nodes"]


def nodes(
    run: Annotated[str, parameters.RUN] = "last",
    trust: Annotated[bool, parameters.TRUST] = False,
) -> None:
    """Show the hosts of a run: their addresses, resources and roles.

    [dim]paceline nodes last[/dim]
    """
    from rich.console import Console
    from rich.table import Table

    from paceline.api.host_runs import look_at_hosts
    from paceline.api.runs import find_run

    found = find_run(run, trust=trust)
    views = look_at_hosts(found)
    if not views:
        say(f"run {found.id} is on one host; `paceline run --hosts N --listen HOST:PORT` uses several")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for name in ("host", "address", "cores", "memory", "roles"):
        table.add_column(name, justify="right" if name in ("cores", "memory") else "left")
    for view in views:
        host = view.host
        roles = f"lost: {host.lost}" if host.lost else " ".join(view.roles)
        memory = f"{host.memory / 1e9:,.0f} GB"
        table.add_row(cell(host.name), cell(host.address), str(host.cores), memory, cell(roles))
    Console().print(table)
