"""The live picture of a run in a terminal.

running   epoch 2  ━━━━━━━━━━━━━━━━━━━━╺━━━━━━━━━  64 %  0:42
3,104 samples/s (last 5 s: 3,290) · version 2,407 · staleness 0.41 mean, 2 max

worker  state     step    loss  accuracy  waiting
0       running  1,204  0.0712     0.981      3 %
1       waiting  1,203  0.0698     0.979     12 %

The full one (`paceline run --live`, `paceline top`) says more, of the last few seconds:

running   epoch 2  ━━━━━━━━━━━━━━━━━━━━╺━━━━━━━━━  64 %  0:42
3,104 samples/s (last 5 s: 3,290) · version 2,407 · staleness 0.41 mean, 2 max · 94.1 MB/s · asp
time: compute 61 % · wait 30 % · push 4 % · load 3 %

worker  state     step  steps/s    loss  waiting    out/s     in/s   CPU  memory
0       running  1,204     48.5  0.0712      3 %  23.4 MB  23.4 MB  0.97  412 MB
1       waiting  1,203     48.4  0.0698     12 %  23.4 MB  23.4 MB  0.95  409 MB

server  updates  updates/s  updating   CPU  memory
0         2,407       96.9      12 %  0.31  388 MB
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.observe.analyse import wording
from paceline.observe.analyse.window import Window, shares_of
from paceline.observe.record.status import RunStatus, WorkerStatus
from paceline.observe.show.visible import in_one_line, visible

__all__ = ["Display", "picture", "style_of"]

STYLES = {
    "running": "green",
    "succeeded": "green",
    "waiting": "yellow",
    "recovering": "yellow",
    "stopped": "yellow",
    "diverged": "yellow",
    "failed": "red",
    "dead": "red",
    "crashed": "red",
    "finished": "dim",
    "resting": "dim",
}
_OTHER = "cyan"

_TO_THE_END, _ALL_BELOW = "\x1b[K", "\x1b[J"
"""Of the line, and of the screen: what terminals then erase."""
_FIXED_WIDTH = 42
"""Columns of a worker's line without its metrics."""
_LINES_AROUND = 8
"""Lines that are not a worker's: ours, and a few that belong to the shell and the script."""
_LINES_AROUND_FULL = 11
"""The same of the full picture, with the servers' heading."""
_MOST_METRICS = 60
_WORTH_A_WORD = 0.005
"""A share of the time below this is 0 %."""


class Display:
    """A picture at the cursor, which is drawn over, erased and drawn again when it is told to.

    rich's Live is not used: it expects whole lines from the script, and a progress bar is none.
    """

    def __init__(self, stream: TextIO, *, full: bool = False) -> None:
        self._full = full
        self._stream = stream
        self._console = Console(file=stream, highlight=False)
        self._lines = 0
        """How many lines of it stand above the cursor."""

    def draw(self, status: RunStatus, window: Window) -> None:
        """Replace the picture."""
        width, height = self._console.size
        with self._console.capture() as captured:
            self._console.print(picture(status, window, width=width, height=height, full=self._full))
        lines = captured.get().splitlines()[: max(1, height - 1)]
        # Line by line: a terminal that is cleared first flickers.
        drawn = "".join(f"{line}{_TO_THE_END}\n" for line in lines)
        self._stream.write(self._back() + drawn + _ALL_BELOW)
        self._stream.flush()
        self._lines = len(lines)

    def erase(self) -> None:
        """Leave the cursor where it was before the picture."""
        if self._lines:
            self._stream.write(self._back() + _ALL_BELOW)
            self._stream.flush()
            self._lines = 0

    def print(self, text: str, style: str = "") -> None:
        """Print a line in the picture's place."""
        self.erase()
        self._console.print(Text(visible(text), style=style), soft_wrap=True)

    def _back(self) -> str:
        return f"\r\x1b[{self._lines}A" if self._lines else ""


def picture(
    status: RunStatus, window: Window, *, width: int, height: int, full: bool = False
) -> RenderableType:
    """A status as something to draw, for a terminal of this size.

    Args:
        window: the statuses before it, and it: where rates come from.
        full: also resources, bytes, servers, and where the time goes.
    """
    lines: list[RenderableType] = [_headline(status, width)]
    if status.version:
        facts = [
            *wording.rates(status, window),
            f"version {wording.count(status.version)}",
            wording.staleness(status),
            *(_run_wide(status, window) if full else ()),
            *wording.trouble(status),
        ]
        lines.append(_line(" · ".join(facts)))
    if full and (shares := shares_of(window.phases)):
        parts = [
            f"{name} {wording.percent(share)}" for name, share in shares.items() if share >= _WORTH_A_WORD
        ]
        lines.append(_line(f"time: {' · '.join(parts)}"))
    if not status.workers:
        pass
    elif full:
        lines += _roles(status, window, width, height)
    else:
        lines += [Text(), _workers(status, width, max(1, height - _LINES_AROUND))]
    return Padding(Group(*lines), (1, 1, 0, 1))


def _run_wide(status: RunStatus, window: Window) -> list[str]:
    rates = [window.worker(rank) for rank in status.workers]
    moved = sum(rate.moved_out + rate.moved_in for rate in rates)
    wire = sum(rate.on_wire for rate in rates)
    carried = f"{wording.size(moved)}/s" + (f", {wording.size(wire)}/s on the wire" if wire else "")
    return [*([carried] if moved or wire else []), *([status.mode] if status.mode else [])]


def _line(text: str) -> Text:
    return Text(in_one_line(text), style="default", overflow="ellipsis", no_wrap=True)


def _headline(status: RunStatus, width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    cells: list[RenderableType] = [_state(status.state, bold=True)]
    cells += [Text(text) for text in wording.saving(status)]
    share = status.epoch_share
    if share is not None and not (status.ended and share == 0):
        cells.append(Text(f"epoch {status.epoch + 1}"))
        cells.append(
            ProgressBar(
                total=1.0,
                completed=share,
                width=max(8, min(40, width - 42)),
                complete_style="cyan",
                finished_style="green",
            )
        )
        cells.append(Text(f"{wording.percent(share):>5}"))
    elif status.version:
        cells.append(Text(wording.progress(status)))
    cells.append(Text(wording.clock(status.elapsed_s), style="dim"))
    for _ in cells:
        grid.add_column(no_wrap=True)
    grid.add_row(*cells)
    return grid


def _workers(status: RunStatus, width: int, room: int) -> RenderableType:
    metrics = _fitting(list(status.metrics)[:_MOST_METRICS], width)
    titles = [in_one_line(name) for name in metrics]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("worker", no_wrap=True)
    table.add_column("state", no_wrap=True, min_width=9)
    for name in ("step", *titles, "waiting"):
        table.add_column(Text(name), justify="right", no_wrap=True, min_width=7)
    workers = [worker for _, worker in sorted(status.workers.items())]
    shown = workers if len(workers) <= room else workers[: room - 1]
    for worker in shown:
        table.add_row(
            str(worker.rank),
            _state(worker.state),
            wording.count(worker.clock),
            *(_metric(worker, name) for name in metrics),
            Text(wording.percent(worker.idleness), style="yellow" if worker.idleness > 0.3 else ""),
        )
    if len(shown) == len(workers):
        return table
    rest = Text(f"… and {wording.plural(len(workers) - len(shown), 'more worker')}", style="dim")
    return Group(table, rest)


@dataclass(frozen=True)
class _Column:
    """A column of the full picture: its content, and its priority on a narrow terminal."""

    title: str
    cells: Sequence[Text]
    importance: int
    left: bool = False

    @property
    def width(self) -> int:
        return max(len(self.title), *(len(cell) for cell in self.cells)) if self.cells else len(self.title)


def _roles(status: RunStatus, window: Window, width: int, height: int) -> list[RenderableType]:
    """The workers' table and the servers'."""
    room = max(2, height - _LINES_AROUND_FULL)
    for_servers = min(len(status.servers), max(1, room // 4))
    lines: list[RenderableType] = [
        Text(),
        *_table(_worker_columns(status, window), width, room - for_servers, "worker"),
    ]
    if status.servers and height > _LINES_AROUND_FULL:
        lines += [Text(), *_table(_server_columns(status, window), width, for_servers, "server")]
    return lines


def _worker_columns(status: RunStatus, window: Window) -> list[_Column]:
    workers = [worker for _, worker in sorted(status.workers.items())]
    rates = [window.worker(worker.rank) for worker in workers]
    # A worker whose step takes longer than the window has nothing to tell of it: then its mean.
    idleness = [
        rate.idleness if rate.accounted_s else worker.idleness
        for rate, worker in zip(rates, workers, strict=True)
    ]
    # The first metric, the loss if there is one, is dearer than bytes and resources; the others are not.
    metrics = [
        _Column(in_one_line(name), [_metric(worker, name) for worker in workers], 80 - at if at else 94)
        for at, name in enumerate(list(status.metrics)[:_MOST_METRICS])
    ]
    columns = [
        _Column("worker", [Text(str(worker.rank)) for worker in workers], 99, left=True),
        _Column("state", [_state(worker.state) for worker in workers], 98, left=True),
        _Column("step", [Text(wording.count(worker.clock)) for worker in workers], 97),
        _Column("steps/s", [_rate(rate.steps_per_s) for rate in rates], 95),
        *metrics,
        _Column(
            "waiting",
            [Text(wording.percent(share), style="yellow" if share > 0.3 else "") for share in idleness],
            96,
        ),
    ]
    if any(rate.moved_out or rate.moved_in for rate in rates):
        columns.append(_Column("out/s", [Text(wording.size(rate.moved_out)) for rate in rates], 91))
        columns.append(_Column("in/s", [Text(wording.size(rate.moved_in)) for rate in rates], 90))
    used = [worker.memory for worker in workers]
    return columns + _usage([worker.cpu for worker in workers], used, status.memory_kind)


def _server_columns(status: RunStatus, window: Window) -> list[_Column]:
    servers = [server for _, server in sorted(status.servers.items())]
    rates = [window.server(server.rank) for server in servers]
    return [
        _Column("server", [Text(str(server.rank)) for server in servers], 99, left=True),
        _Column("updates", [Text(wording.count(server.updates)) for server in servers], 98),
        _Column("updates/s", [_rate(rate.updates_per_s) for rate in rates], 97),
        _Column("updating", [Text(wording.percent(rate.updating)) for rate in rates], 96),
        *_usage(
            [server.cpu for server in servers], [server.memory for server in servers], status.memory_kind
        ),
    ]


def _usage(cores: Sequence[float], memory: Sequence[int], kind: str) -> list[_Column]:
    """CPU and memory columns; empty for a run without resource samples."""
    if not any(memory):
        return []
    return [
        _Column("CPU", [Text(f"{each:.2f}") for each in cores], 93),
        _Column("RSS" if kind == "rss" else "memory", [Text(wording.size(each)) for each in memory], 92),
    ]


def _table(columns: Sequence[_Column], width: int, room: int, noun: str) -> list[RenderableType]:
    """Columns as far as they fit, and rows: never wider than the terminal, never longer than `room`."""
    left, chosen = width - 2, []
    for column in sorted(columns, key=lambda each: -each.importance):
        left -= column.width + 2
        if left < -2:  # the last column needs no gap after it
            break
        chosen.append(column)
    chosen = [column for column in columns if column in chosen]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in chosen:
        table.add_column(Text(column.title), justify="left" if column.left else "right", no_wrap=True)
    rows = len(columns[0].cells)
    shown = rows if rows <= room else max(0, room - 1)
    for row in range(shown):
        table.add_row(*(column.cells[row] for column in chosen))
    if shown == rows:
        return [table]
    return [table, Text(f"… and {wording.plural(rows - shown, f'more {noun}')}", style="dim")]


def _rate(per_s: float) -> Text:
    return Text(wording.count(per_s) if per_s >= 9.95 else f"{per_s:.2g}")


def _fitting(names: list[str], width: int) -> list[str]:
    """As many metrics as a line has room for."""
    room = width - _FIXED_WIDTH
    chosen = []
    for name in names:
        room -= max(9, len(in_one_line(name)) + 2)
        if room < 0:
            break
        chosen.append(name)
    return chosen


def _metric(worker: WorkerStatus, name: str) -> Text:
    value = worker.metrics.get(name)
    return Text("–", style="dim") if value is None else Text(wording.metric(value))


def style_of(state: str) -> str:
    """The colour of a run's or a worker's state."""
    return STYLES.get(state, _OTHER)


def _state(state: str, *, bold: bool = False) -> Text:
    return Text(in_one_line(state), style=f"bold {style_of(state)}" if bold else style_of(state))
