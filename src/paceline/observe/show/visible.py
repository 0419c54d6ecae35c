"""Text for a terminal: what would steer it is written out.

Names of runs and metrics, messages, errors and logs may hold anything: sequences that retitle a window, hide
or overwrite lines, or turn the direction of what follows. Written out (`\\x1b[2J`) they are seen and do
nothing. What a script prints while it runs is not ours, and stays as it is.
"""

import re

__all__ = ["in_one_line", "visible", "with_colours"]

_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, but tab and line feed
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction of writing
    "\u2028\u2029\ud800-\udfff]"  # line breaks that are not ours, half characters
)
_COLOUR = re.compile(r"\x1b\[((?:[0-9]{1,3}(?:[;:][0-9]{1,3})*)?)m")
_RESET = "\x1b[0m"


def visible(text: str) -> str:
    """A text of any number of lines, with everything but line feeds and tabs written out."""
    return text if text.isprintable() else _STEERING.sub(_written_out, text)


def in_one_line(text: str) -> str:
    """As `visible`, for a cell of a table or a line: line feeds and tabs are written out, too."""
    return visible(text).replace("\n", r"\n").replace("\t", r"\t")


def with_colours(line: str) -> str:
    """A line of a log: colours stay, and end with it; the colour that hides is left out."""
    if line.isprintable():
        return line
    parts, at = [], 0
    for match in _COLOUR.finditer(line):
        parts += [visible(line[at : match.start()]), visible(match[0]) if _hides(match[1]) else match[0]]
        at = match.end()
    return "".join([*parts, visible(line[at:]), _RESET]) if parts else visible(line)


def _hides(parameters: str) -> bool:
    """Whether a colour makes text invisible: 8, unless it is a part of another colour (38;5;8)."""
    numbers = iter(int(each or 0) for each in re.split("[;:]", parameters))
    for number in numbers:
        if number == 8:
            return True
        if number in (38, 48, 58):
            for _ in range({5: 1, 2: 3}.get(next(numbers, 0), 0)):
                next(numbers, 0)
    return False


def _written_out(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
