"""The live picture of a run in a terminal.

running   epoch 2  ━━━━━━━━━━━━━━━━━━━━╺━━━━━━━━━  64 %  0:42
3,104 samples/s · version 2,407 · staleness 0.41 mean, 2 max

worker  state     step    loss  accuracy  waiting
0       running  1,204  0.0712     0.981      3 %
1       waiting  1,203  0.0698     0.979     12 %
"""

from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.observe import words
from paceline.observe.status import RunStatus, WorkerStatus

__all__ = ["Display", "picture", "style_of"]

STYLES = {
    "running": "green",
    "succeeded": "green",
    "waiting": "yellow",
    "recovering": "yellow",
    "stopped": "yellow",
    "failed": "red",
    "dead": "red",
    "crashed": "red",
    "finished": "dim",
    "resting": "dim",
}
_OTHER = "cyan"

_FIXED_WIDTH = 42
"""Columns of a worker's line without its metrics."""
_LINES_AROUND = 8
"""Lines that are not a worker's: ours, and a few that belong to the shell and the script."""


class Display:
    """A rich Live that draws when it is told to, without a thread of its own."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def draw(self, status: RunStatus, rate: float) -> None:
        """Replace the picture."""
        width, height = self._console.size
        self._live.update(picture(status, rate, width=width, height=height), refresh=True)

    def print(self, text: str, style: str = "") -> None:
        """Print a line above the picture, as it is: colours stay, cursor movements do not."""
        line = Text.from_ansi(text, style=style)
        self._console.print(line, soft_wrap=True, markup=False, emoji=False)

    def close(self) -> None:
        """Leave the last picture standing and give the terminal back."""
        self._live.stop()


def picture(status: RunStatus, rate: float, *, width: int, height: int) -> RenderableType:
    """A status as something to draw, for a terminal of this size."""
    lines: list[RenderableType] = [_headline(status, width)]
    if status.version:
        facts = [
            f"{words.count(rate)} samples/s",
            f"version {words.count(status.version)}",
            words.staleness(status),
            *words.trouble(status),
        ]
        lines.append(Text(" · ".join(facts), style="default", overflow="ellipsis", no_wrap=True))
    if status.workers:
        lines += [Text(), _workers(status, width, max(1, height - _LINES_AROUND))]
    return Padding(Group(*lines), (1, 1, 0, 1))


def _headline(status: RunStatus, width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    cells: list[RenderableType] = [_state(status.state, bold=True)]
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
        cells.append(Text(f"{words.percent(share):>5}"))
    elif status.version:
        cells.append(Text(words.progress(status)))
    cells.append(Text(words.clock(status.elapsed_s), style="dim"))
    for _ in cells:
        grid.add_column(no_wrap=True)
    grid.add_row(*cells)
    return grid


def _workers(status: RunStatus, width: int, room: int) -> RenderableType:
    metrics = _fitting(list(status.metrics), width)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("worker", no_wrap=True)
    table.add_column("state", no_wrap=True, min_width=9)
    for name in ("step", *metrics, "waiting"):
        table.add_column(Text(name), justify="right", no_wrap=True, min_width=7)
    workers = [worker for _, worker in sorted(status.workers.items())]
    shown = workers if len(workers) <= room else workers[: room - 1]
    for worker in shown:
        table.add_row(
            str(worker.rank),
            _state(worker.state),
            words.count(worker.clock),
            *(_metric(worker, name) for name in metrics),
            Text(words.percent(worker.idleness), style="yellow" if worker.idleness > 0.3 else ""),
        )
    if len(shown) == len(workers):
        return table
    rest = Text(f"… and {words.plural(len(workers) - len(shown), 'more worker')}", style="dim")
    return Group(table, rest)


def _fitting(names: list[str], width: int) -> list[str]:
    """As many metrics as a line has room for."""
    room = width - _FIXED_WIDTH
    chosen = []
    for name in names:
        room -= max(9, len(name) + 2)
        if room < 0:
            break
        chosen.append(name)
    return chosen


def _metric(worker: WorkerStatus, name: str) -> Text:
    value = worker.metrics.get(name)
    return Text("–", style="dim") if value is None else Text(words.metric(value))


def style_of(state: str) -> str:
    """The colour of a run's or a worker's state."""
    return STYLES.get(state, _OTHER)


def _state(state: str, *, bold: bool = False) -> Text:
    return Text(state, style=f"bold {style_of(state)}" if bold else style_of(state))
