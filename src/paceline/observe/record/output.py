"""What scripts write: pieces of it, in order, and the lines that a terminal would be left with. Pure."""

import codecs
import enum
import re
from dataclasses import dataclass, field

from paceline.exceptions import UsageError

__all__ = ["OutputPiece", "Screen", "Stream", "label", "parse_shown"]


class Stream(enum.IntEnum):
    """Where a worker wrote something."""

    OUT = 0
    """Its standard output."""
    ERR = 1
    """Its standard error."""
    OWN = 2
    """Paceline's own log of it; all that other roles have."""


@dataclass(frozen=True)
class OutputPiece:
    """Bytes that a worker's script wrote in one go, or one after the other."""

    worker: int
    stream: Stream
    data: bytes


def parse_shown(text: str, workers: int | None = None) -> int | None:
    """Whose output the terminal shows, from `worker:N` or `all` (None).

    Args:
        workers: their number, if it is known.
    """
    if text == "all":
        return None
    match = re.fullmatch(r"worker[:-](\d+)", text)
    if match is None:
        raise UsageError(f"--output {text}: give worker:N for one worker's output, or all")
    rank = int(match[1])
    if workers is not None and rank >= workers:
        last = f"worker:{workers - 1}" if workers > 1 else "worker:0, the only one"
        raise UsageError(f"--output {text}: there is no such worker. The last one is {last}")
    return rank


def label(name: str) -> str:
    """Stands before a line of one role among others'."""
    return f"{name:10} │ "


@dataclass
class _Row:
    cells: list[str] = field(default_factory=list)
    """Characters, with the colours that begin before or end after them."""
    rewritten: bool = False

    def text(self) -> str:
        found = "".join(self.cells)
        return found.rstrip() if self.rewritten else found


_TOKENS = re.compile(
    r"[^\r\n\b\x1b]+|\r|\n|\x08"
    r"|\x1b\[[0-9;:?<=>]*[ -/]*[@-~]"  # CSI: colours, movements
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC: titles, links
    r"|\x1b[^\[\]]"
)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-9;:?<=>]*[ -/]*|\][^\x07\x1b]*\x1b?)?\Z")
_LONGEST_ESCAPE = 4096


class Screen:
    """Lines as a terminal would be left with them: of a progress bar, its last state.

    Carriage returns, cursor movements up and down (bars below one another) and erasing are followed, within
    the last rows; colours stay, everything else is left out.
    """

    ROWS = 24
    """A line that is further above the cursor is done."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rows = [_Row()]
        self._row = self._column = 0
        self._rest = self._colour = ""

    def feed(self, data: bytes) -> list[str]:
        """Take more output. Returns the lines that are final: the cursor is too far below them."""
        text = self._rest + self._decoder.decode(data)
        unfinished = _UNFINISHED.search(text, max(0, len(text) - _LONGEST_ESCAPE))
        self._rest = text[unfinished.start() :] if unfinished else ""
        done: list[str] = []
        for token in _TOKENS.findall(text[: unfinished.start()] if unfinished else text):
            self._take(token)
            while self._row > self.ROWS:
                done.append(self._first())
        return done

    def settled(self) -> list[str]:
        """Lines above the cursor: what comes next seldom changes them."""
        return [self._first() for _ in range(self._row)]

    def end(self) -> list[str]:
        """All remaining lines, also an unfinished last one."""
        done = self.settled()
        done += [self._first() for _ in range(len(self._rows) - 1)]
        last = self._rows[0].text()
        self.__init__()  # type: ignore[misc]
        return [*done, last] if last else done

    def _first(self) -> str:
        self._row = max(0, self._row - 1)
        return self._rows.pop(0).text()

    def _take(self, token: str) -> None:
        row = self._rows[self._row]
        if token == "\n":
            self._column = 0
            self._down(1)
        elif token == "\r":
            self._column = 0
        elif token == "\b":
            self._column = max(0, self._column - 1)
        elif token[0] != "\x1b":
            if self._column < len(row.cells):
                row.rewritten = True
            row.cells += [" "] * (self._column - len(row.cells))
            row.cells[self._column : self._column + len(token)] = token
            if self._colour:
                row.cells[self._column] = self._colour + row.cells[self._column]
                self._colour = ""
            self._column += len(token)
        elif token[1] == "[":
            self._obey(token[2:-1], token[-1], row)

    def _obey(self, text: str, what: str, row: _Row) -> None:
        if what == "m":
            if 0 < self._column <= len(row.cells):
                row.cells[self._column - 1] += f"\x1b[{text}m"
            else:
                self._colour += f"\x1b[{text}m"
            return
        given = text.partition(";")[0]
        number = int(given) if given.isdecimal() else None
        step = min(number or 1, 10_000)
        match what:
            case "A":
                self._row = max(0, self._row - step)
            case "B":
                self._down(min(step, self.ROWS))
            case "C":
                self._column += step
            case "D":
                self._column = max(0, self._column - step)
            case "G":
                self._column = step - 1
            case "K":
                row.rewritten = True
                row.cells[self._column if not number else 0 :] = []
            case "J" if not number:
                row.rewritten = True
                del row.cells[self._column :]
                del self._rows[self._row + 1 :]

    def _down(self, rows: int) -> None:
        self._row += rows
        self._rows += [_Row() for _ in range(self._row + 1 - len(self._rows))]
