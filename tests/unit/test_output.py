"""What scripts write: kept apart and in order, passed on as it is, and as lines where lines are wanted."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.control.tail import Outputs, Tail
from paceline.exceptions import UsageError
from paceline.observe import Progress, RunStatus
from paceline.observe.record.output import OutputPiece, Screen, Stream, parse_shown
from paceline.observe.show.passing import Passing

OUT, ERR, OWN = Stream


def lines(*parts: str) -> list[str]:
    screen = Screen()
    done = [line for part in parts for line in screen.feed(part.encode())]
    return done + screen.end()


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ("one\r\ntwo", ["one", "two"]),
        ("trailing  \n\n  x\n", ["trailing  ", "", "  x"]),
        ("\r  0%|    |\r 50%|██  |\r100%|████|\ndone\n", ["100%|████|", "done"]),
        ("a longer line\rshort\n", ["shorter line"[:5] + "ger line"]),
        ("a bar that is cleared\r                     \rnext\n", ["next"]),
        ("a bar\r     \r", []),
        ("abc\b\bX\n", ["aXc"]),
        ("abc\x1b[2Kd\n", ["   d"]),
        ("abc\r\x1b[Kd\n", ["d"]),
        ("\x1b[32mgreen\x1b[0m plain\n", ["\x1b[32mgreen\x1b[0m plain"]),
        ("\x1b]8;;http://x\x07link\x1b]8;;\x07\n", ["link"]),
        # Two bars of tqdm, one below the other.
        ("\router 0\n\rinner 0\x1b[A\n\rinner 1\x1b[A\router 1\n\rinner 2\x1b[A\n\n", ["outer 1", "inner 2"]),
    ],
)
def test_lines_that_a_terminal_is_left_with(text: str, left: list[str]) -> None:
    assert lines(text) == left
    assert lines(*text) == left, "the same byte by byte"


def test_far_jumps_are_short() -> None:
    assert len(lines("\x1b[99999999999B" * 40)) <= Screen.ROWS * 40 + 1


def test_bytes_that_are_no_text_and_escapes_that_never_end() -> None:
    screen = Screen()
    assert screen.feed(b"\xff\xe2\x96") == []
    assert screen.feed(b"\x88 \x1b]" + b"x" * 10_000 + b"\nnext\n") == []
    assert screen.settled()[-1] == "next"


def test_a_long_log_keeps_little_in_memory() -> None:
    screen = Screen()
    assert screen.feed(b"x\n" * 10_000) == ["x"] * (10_000 - Screen.ROWS)
    assert screen.settled() == ["x"] * Screen.ROWS


@pytest.mark.parametrize(("text", "rank"), [("all", None), ("worker:1", 1), ("worker-0", 0)])
def test_whose_output(text: str, rank: int | None) -> None:
    assert parse_shown(text, 2) == rank


@pytest.mark.parametrize(
    ("text", "workers", "said"),
    [
        ("worker", 2, "give worker:N for one worker's output, or all"),
        ("server:0", 2, "give worker:N"),
        ("worker:2", 2, "there is no such worker. The last one is worker:1"),
        ("worker:1", 1, "The last one is worker:0, the only one"),
    ],
)
def test_nobodys_output(text: str, workers: int, said: str) -> None:
    with pytest.raises(UsageError, match=f"--output {text}: .*{said}"):
        parse_shown(text, workers)


WRITES = """
import logging, os, subprocess, sys
from pathlib import Path
from paceline.engines.streams import log_to, script_streams

own = script_streams(Path(sys.argv[1]))
log_to(own, "worker:0")
assert logging.getLogger().handlers == []
logging.basicConfig(filename=sys.argv[2], level=logging.DEBUG)
logging.debug("the script's own")
for each in range(50):
    print("out", each)
    print("err", each, file=sys.stderr)
logging.getLogger("paceline.worker").info("ours")
sys.stderr.write("\\r50%")
sys.stderr.flush()
print("of \\udcff", file=sys.stderr)
sys.stdout.buffer.write(b"raw\\n")
sys.stdout.flush()
subprocess.run(["sh", "-c", "echo child out; echo child err >&2"])
print("unfinished", end="", flush=True)
print(repr(sys.stdin.read()))
os._exit(0)
"""


def test_a_script_has_streams_and_logging_of_its_own(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    outputs = Outputs(tmp_path, 0)
    command = [sys.executable, "-c", WRITES, str(log), str(tmp_path / "script.log")]
    subprocess.run(command, check=True, input="not for the script", text=True, timeout=60)
    out, err = (tmp_path / name for name in ("worker-0.out", "worker-0.err"))
    assert out.read_text() == "".join(f"out {n}\n" for n in range(50)) + "raw\nchild out\nunfinished''\n"
    errors = "".join(f"err {n}\n" for n in range(50))
    assert err.read_bytes().decode() == errors + "\r50%of \\udcff\nchild err\n"
    assert log.read_text().endswith("worker:0 INFO ours\n") and log.read_text().count("\n") == 1
    assert (tmp_path / "script.log").read_text() == "DEBUG:root:the script's own\n"
    pieces = Tail(log).read_all()
    for stream, path in ((OUT, out), (ERR, err), (OWN, log)):
        assert b"".join(data for each, data in pieces if each is stream) == path.read_bytes()
    assert pieces[:4] == [(OUT, b"out 0\n"), (ERR, b"err 0\n"), (OUT, b"out 1\n"), (ERR, b"err 1\n")]
    assert pieces[100][0] is OWN
    seen = outputs.new([0, 1], final=True)
    assert [(piece.stream, piece.data) for piece in seen] == [each for each in pieces if each[0] is not OWN]
    assert outputs.new([0, 1]) == []
    assert Outputs(tmp_path, 0).new([0], final=True) == [], "a resumed run shows what is new"
    assert Outputs(tmp_path, 1).new([0, 1]) == [], "of another worker"


ASKS = """
import sys
from pathlib import Path
from paceline.engines.streams import script_streams

own = script_streams(Path(sys.argv[1]))
print(sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty(), own.isatty())
"""


def test_a_scripts_streams_are_a_terminal_where_the_streams_of_the_command_are(tmp_path: Path) -> None:
    ours, terminal = pty.openpty()
    try:
        for name, stdout, stderr in (
            ("both", terminal, terminal),
            ("error", subprocess.DEVNULL, terminal),
            ("none", subprocess.DEVNULL, subprocess.DEVNULL),
        ):
            command = [sys.executable, "-c", ASKS, str(tmp_path / f"{name}.log")]
            subprocess.run(command, check=True, stdin=terminal, stdout=stdout, stderr=stderr, timeout=60)
    finally:
        os.close(ours)
        os.close(terminal)
    told = {name: (tmp_path / f"{name}.out").read_text().split() for name in ("both", "error", "none")}
    assert told == {
        "both": ["False", "True", "True", "False"],
        "error": ["False", "False", "True", "False"],
        "none": ["False", "False", "False", "False"],
    }


def test_a_log_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").write_bytes(b"all of it\n")
    assert Tail(tmp_path / "worker-0.log").read_all() == [(OWN, b"all of it\n")]


def test_what_is_written_while_it_is_read_comes_next(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "worker-0.log")
    (tmp_path / "worker-0.out").write_bytes(b"one\n")
    order = tmp_path / "worker-0.order"
    marks = [(4, OUT), (5, ERR), (8, OUT)]
    order.write_bytes(b"".join((end << 2 | stream).to_bytes(8, "little") for end, stream in marks) + b"\0")
    assert tail.read() == [(OUT, b"one\n")]
    (tmp_path / "worker-0.err").write_bytes(b"error")
    (tmp_path / "worker-0.out").write_bytes(b"one\ntwo\n")
    assert tail.read() == [(ERR, b"error"), (OUT, b"two\n")]


def test_a_mark_without_its_bytes_holds_nothing_up(tmp_path: Path) -> None:
    (tmp_path / "worker-0.order").write_bytes((1000 << 2 | ERR).to_bytes(8, "little"))
    (tmp_path / "worker-0.out").write_bytes(b"here\n")
    tail = Tail(tmp_path / "worker-0.log")
    assert (tail.read(), tail.read()) == ([], [(OUT, b"here\n")])


def test_very_much_output_is_read_in_parts_and_whole_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "worker-0.out").write_bytes(b"x" * 3_000_000)
    (tmp_path / "worker-0.order").write_bytes((3_000_000 << 2 | OUT).to_bytes(8, "little"))
    tail = Tail(tmp_path / "worker-0.log")
    assert tail.read() == [(OUT, b"x" * (1 << 20))]
    assert tail.read_all() == [(OUT, b"x" * (3_000_000 - (1 << 20)))]


class Bytes(io.TextIOWrapper):
    """A stream as sys.stdout is one."""

    def __init__(self, *, terminal: bool = False) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", newline="")
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    @property
    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode()  # type: ignore[attr-defined,no-any-return]


def standard(monkeypatch: pytest.MonkeyPatch, *, terminal: bool = False) -> tuple[Bytes, Bytes]:
    """Standard output and error from here on."""
    monkeypatch.setenv("TERM", "xterm")
    stdout, stderr = Bytes(), Bytes(terminal=terminal)
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    return stdout, stderr


def running() -> RunStatus:
    return RunStatus(state="running", elapsed_s=1.0)


def test_bytes_go_where_the_script_sent_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout, stderr = standard(monkeypatch)
    with Progress() as shown:
        shown.pass_on(
            [OutputPiece(0, OUT, b"\r1"), OutputPiece(0, ERR, b"\r50%"), OutputPiece(0, OUT, "é\n".encode())]
        )
        shown.show(running())
        status = running()
        status.messages.append("worker:1 died")
        shown.show(status)
        shown.pass_on([OutputPiece(0, ERR, b"\r60%")])
    assert stdout.text == "\r1é\n"
    # Ours waits for the end of the line; what people must know does not.
    assert stderr.text == "\r50%\nworker:1 died\n0:01 running\n\r60%\n"


def test_an_unfinished_line_elsewhere_is_not_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    _, stderr = standard(monkeypatch)
    with Progress() as shown:
        shown.pass_on([OutputPiece(0, OUT, b"loading ... ")])
        shown.show(running())
    assert stderr.text == "0:01 running\n"


def test_all_workers_have_whole_lines_with_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout, stderr = standard(monkeypatch)
    with Progress(shown=None, quiet=True) as shown:
        shown.pass_on(
            [OutputPiece(0, OUT, b"a"), OutputPiece(1, OUT, b"b\n"), OutputPiece(0, OUT, b"c\nrest")]
        )
        shown.pass_on([OutputPiece(1, ERR, b"\r1%\r2%")])
    assert stdout.text == "worker:1   │ b\nworker:0   │ ac\nworker:0   │ rest\n"
    assert stderr.text == "worker:1   │ 2%\n"


def test_the_picture_gives_way_to_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    _, terminal = standard(monkeypatch, terminal=True)
    with Progress() as shown:
        shown.show(running())
        picture = terminal.text
        assert "running" in picture
        shown.pass_on([OutputPiece(0, ERR, b"\r 10%")])
        rows = picture.count("\n")
        assert terminal.text == f"{picture}\r\x1b[{rows}A\x1b[J\r 10%"
        shown.show(running())
        assert terminal.text.endswith("\r 10%"), "not while the bar is unfinished"
        shown.pass_on([OutputPiece(0, ERR, b"\r100%\n")])
        shown.show(running())
        assert terminal.text.endswith(f"\r 10%\r100%\n{picture}")


def test_the_full_picture_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    _, terminal = standard(monkeypatch, terminal=True)
    with Progress(live=True) as shown:
        shown.show(running())
        before = terminal.text
        shown.pass_on([OutputPiece(0, ERR, b"\r 10%")])
        assert terminal.text == before
        shown.pass_on([OutputPiece(0, ERR, b"\r100%\n")])
        assert terminal.text.endswith("\x1b[J100%\n")


def test_a_reader_that_left_costs_only_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout, stderr = standard(monkeypatch)
    stdout.buffer.close()
    with Progress() as shown:
        shown.pass_on([OutputPiece(0, OUT, b"1\n"), OutputPiece(0, OUT, b"2\n"), OutputPiece(0, ERR, b"3\n")])
    assert stderr.text == "3\n"


def test_streams_that_lead_to_one_file_are_one_place(tmp_path: Path) -> None:
    with open(tmp_path / "x", "w") as one, open(os.dup(one.fileno()), "w") as other:
        passing = Passing({OUT: one, ERR: sys.__stderr__}, beside=other)
        assert passing.beside(OUT)
        passing.write(OUT, b"half")
        assert passing.unfinished
        passing.end_line()
    assert (tmp_path / "x").read_text() == "half\n"


def test_a_notebooks_stream_has_no_bytes() -> None:
    notebook = io.StringIO()
    passing = Passing({OUT: notebook}, beside=notebook)
    passing.write(OUT, b"\xe2\x96")
    passing.write(OUT, b"\x88\n")
    assert notebook.getvalue() == "█\n"
