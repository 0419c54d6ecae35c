"""A command in a pseudo-terminal of a given width, and what people see there.

python -m tests.terminal 60   # prints what docs/terminal.md has
"""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Sequence
from pathlib import Path

import pyte

ROWS = 50
SCRIPT = Path(__file__).parent / "scripts" / "bars.py"


def seen(
    command: Sequence[str], columns: int, *, runs: str, watch: Callable[[list[str]], None] | None = None
) -> tuple[list[str], int]:
    """What stands on the screen at the end, and the exit code.

    Args:
        watch: called with the screen after each piece of output.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**env, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", "PACELINE_RUNS": runs},
    )
    os.close(theirs)
    screen = pyte.Screen(columns, ROWS)
    stream = pyte.ByteStream(screen)
    try:
        while data := _read(ours):
            stream.feed(data)
            if watch is not None:
                watch([line.rstrip() for line in screen.display])
    finally:
        os.close(ours)
        if process.poll() is None and sys.exc_info()[0] is not None:
            process.terminate()
        code = process.wait()
    lines = [line.rstrip() for line in screen.display]
    while lines and not lines[-1]:
        lines.pop()
    return lines, code


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # Linux says so when the last of the others has closed it
        return b""


def run_bars(
    columns: int, runs: str, watch: Callable[[list[str]], None] | None = None
) -> tuple[list[str], int]:
    """tests/scripts/bars.py under `paceline run`, with one worker."""
    command = [sys.executable, "-m", "paceline", "run", "--workers", "1", "--threads", "1", str(SCRIPT)]
    return seen(command, columns, runs=runs, watch=watch)


def shape(lines: Sequence[str]) -> list[str]:
    """What is the same whenever it is recorded: no times, rates, sizes of a bar, places or advice."""
    text = "\n".join(lines)
    text = re.sub(r"(Succeeded).*?(\n  waiting)", r"\1\2", text, flags=re.S)  # the figures and the advice
    text = re.sub(r"(run directory).*", r"\1", text, flags=re.S)
    text = re.sub(r"\[[^\]\n]*\]", "[…]", text)
    text = re.sub(r"[█▏▎▍▌▋▊▉]+", "█", text)
    return [" ".join(re.sub(r"[\d,.:]+", "0", line).split()) for line in text.splitlines()]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        print("\n".join(run_bars(int(sys.argv[1]), directory)[0]))
