"""What the commands print. Everything goes through here, so nothing that a file holds steers the terminal."""

import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

import typer

from paceline.observe.show.visible import in_one_line, visible

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["cell", "complain", "for_programs", "note", "say"]


def say(
    text: str = "", *, err: bool = False, fg: str | None = None, bold: bool = False, nl: bool = True
) -> None:
    """Print text for people."""
    typer.secho(visible(text), err=err, fg=fg, bold=bold or None, nl=nl)


def for_programs(text: str) -> None:
    """Print text for another program as it is, and for a terminal as people can look at it."""
    typer.echo(visible(text) if _is_terminal() else text, nl=False)


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def cell(text: object, style: str = "") -> "Text":
    """A cell of a table: no markup, no control characters."""
    from rich.text import Text

    return Text(in_one_line(str(text)), style=style)


def note(text: str) -> None:
    """Tell the user something that is no error."""
    say(_wrapped(f"note: {text}"), fg="yellow", err=True)


def complain(text: str) -> None:
    """Tell the user what is wrong: the first line stands out, a traceback below it does not."""
    first, _, rest = text.partition("\n")
    say(_wrapped(f"error: {first}"), fg="red", bold=True, err=True)
    if rest:
        say(rest, err=True)


def _wrapped(text: str) -> str:
    """Between words where a person reads it; in one line where a program does."""
    if not sys.stderr.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return textwrap.fill(visible(text), width, break_long_words=False, break_on_hyphens=False)
