"""paceline metrics: what a run's script logged, here or in another tool."""

import io
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import parameters
from paceline.cli.printing import cell, for_programs, say
from paceline.exceptions import UsageError

if TYPE_CHECKING:
    from paceline.api.runs import RunDirectory
    from paceline.observe.analyse.run_data import RunData

__all__ = ["metrics"]

LOOPBACK = "127.0.0.1"
_COLUMNS = (
    (76, ("worker", "values", "step", "first", "lowest", "highest", "last")),
    (58, ("worker", "step", "lowest", "highest", "last")),
    (0, ("worker", "step", "last")),
)
"""Columns of the table, by the least width of the terminal that has room for them."""
_MOST_ROWS = 1000


def metrics(
    run: Annotated[str, parameters.RUN],
    csv: Annotated[
        str | None,
        typer.Option(
            "--csv",
            metavar="FILE",
            help="Write every logged value with its time, worker, attempt, step, version, epoch and samples; "
            "- is the terminal.",
        ),
    ] = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option("--tensorboard", metavar="DIR", help="Write TensorBoard's event files there."),
    ] = None,
    prometheus: Annotated[
        str | None,
        typer.Option(
            "--prometheus",
            metavar="FILE",
            help="Write where the run stands now in Prometheus's text format; - is the terminal.",
        ),
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option(
            "--serve",
            metavar="[HOST:]PORT",
            help="Serve /metrics for Prometheus until Ctrl-C; on this machine only, unless a host is named. "
            "Port 0 is any free one.",
        ),
    ] = None,
    mlflow: Annotated[
        str | None,
        typer.Option(
            "--mlflow",
            metavar="URI",
            help="File the run with this MLflow server, or database: sqlite:///mlflow.db.",
        ),
    ] = None,
    trust: Annotated[bool, parameters.TRUST] = False,
) -> None:
    """Show the metrics that a run's script logged, or hand them to another tool.

    [dim]paceline metrics last --tensorboard runs/[/dim]
    """
    from paceline.api.runs import find_run, load_run, prometheus_page
    from paceline.observe.show import exports

    address = _address(serve) if serve is not None else None
    found = find_run(run, trust=trust)
    data = load_run(found)
    if csv is not None:
        _write_csv(csv, data)
    if tensorboard is not None:
        number = exports.to_tensorboard(data, tensorboard)
        say(
            f"{tensorboard / found.path.name}: {number:,} new values. See them:  "
            f"tensorboard --logdir {tensorboard}"
        )
    if mlflow is not None:
        # MLflow tries a server that is not there for minutes, and says nothing.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        say(f"MLflow has run {found.id} as {exports.to_mlflow(data, mlflow)} at {mlflow}")
    if prometheus is not None:
        _write_page(prometheus, found)
    if address is not None:
        _serve(found.id, lambda: prometheus_page(found), *address)
    elif csv is None and tensorboard is None and mlflow is None and prometheus is None:
        _show(data, found.id)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"--serve {text}: expected a port, or HOST:PORT, as in 9100 or 0.0.0.0:9100")
    return host.strip("[]") or LOOPBACK, int(port)


def _write_csv(to: str, data: "RunData") -> None:
    from paceline.observe.show.exports import to_csv

    if to == "-":
        text = io.StringIO()
        to_csv(data, text)
        for_programs(text.getvalue())
        return
    try:
        with Path(to).open("w") as file:
            number = to_csv(data, file)
    except OSError as error:
        raise UsageError(f"--csv {to}: {error.strerror or error}") from error
    say(f"{to}: {number:,} values")


def _write_page(to: str, run: "RunDirectory") -> None:
    from paceline.api.runs import prometheus_page, write_prometheus_page

    if to == "-":
        for_programs(prometheus_page(run))
        return
    try:
        write_prometheus_page(run, Path(to))
    except OSError as error:
        raise UsageError(f"--prometheus {to}: {error.strerror or error}") from error


def _serve(run_id: str, page: Callable[[], str], host: str, port: int) -> None:
    from paceline.observe.show.exports import MetricsServer

    with MetricsServer(page, host, port) as server:
        say(f"http://{host}:{server.server_port}/metrics serves run {run_id} until Ctrl-C")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say()


def _show(data: "RunData", run_id: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from paceline.observe.analyse import wording
    from paceline.observe.record.values import EVALUATION

    frame = data.metrics
    if frame.empty:
        say(f"Run {run_id} has no metrics. A script logs them:  paceline.log(loss=0.3)")
        return
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200
    shown = next(titles for width, titles in _COLUMNS if console.width >= width)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("metric", overflow="fold", min_width=8)
    for title in shown:
        table.add_column(title, justify="right", no_wrap=True)
    groups = frame.groupby(["name", "worker"], sort=True)
    for (name, worker), part in itertools.islice(groups, _MOST_ROWS):
        values = part["value"]
        cells = {
            "worker": "eval" if worker == EVALUATION else str(worker),
            "values": wording.count(len(part)),
            "step": wording.count(part["step"].iloc[-1]),
            "first": wording.metric(float(values.iloc[0])),
            "lowest": wording.metric(float(values.min())),
            "highest": wording.metric(float(values.max())),
            "last": wording.metric(float(values.iloc[-1])),
        }
        table.add_row(cell(name), *(cells[title] for title in shown))
    console.print(table)
    if (more := groups.ngroups - _MOST_ROWS) > 0:
        say(f"… and {more:,} more rows: --csv FILE has all values")
    if left_out := data.left_out.get("metrics"):
        console.print(f"{wording.count(left_out)} logged values are not kept (--records-mb, or a full disk).")
    for text in data.missing:
        if "values" in text:
            console.print(cell(f"missing: {text}", "yellow"))
