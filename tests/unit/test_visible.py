"""What files hold does not steer the terminal; what a script prints is passed on as it is."""

import ast
import io
import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import paceline.cli
from paceline.cli import outcome, plan_command
from paceline.cli.app import app
from paceline.observe import Progress, RunStatus, WorkerStatus
from paceline.observe.analyse.window import Window
from paceline.observe.record.output import OutputPiece, Stream
from paceline.observe.show.display import Display, picture
from paceline.observe.show.progress import plain_line
from paceline.observe.show.visible import in_one_line, visible, with_colours
from paceline.plan import Job, ModelFacts, Plan, make_plan
from tests.hostile_files import ID, STEERING, log, sample_run, steering_record, steering_status

STEERS = ("\x1b", "\x07", "\x9b", "\u202e", "\x08", "\r")
"""None of these may get to a terminal."""


def steers(text: str) -> list[str]:
    return [each for each in STEERS if each in text]


# The text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ä × 漢字 😀", "plain ä × 漢字 😀"),
        ("\x1b[2J", r"\x1b[2J"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("a\rb\x08c\x7fd\x00", r"a\rb\x08c\x7fd\x00"),
        ("\x9b31m", r"\x9b31m"),
        ("abc\u202edcba\u2066", r"abc\u202edcba\u2066"),
        ("half \ud800 \udfff", r"half \ud800 \udfff"),
        ("two\nlines\twide", "two\nlines\twide"),
        ("\u2028", r"\u2028"),
    ],
)
def test_what_would_steer_is_written_out(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert in_one_line(text) == shown.replace("\n", r"\n").replace("\t", r"\t")
    visible(text).encode()


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m\x1b[0m"),
        ("\x1b[1;38;5;8mgrey", "\x1b[1;38;5;8mgrey\x1b[0m"),
        ("\x1b[38;2;8;8;8mdark", "\x1b[38;2;8;8;8mdark\x1b[0m"),
        ("\x1b[8mhidden", "\\x1b[8mhidden\x1b[0m"),
        ("\x1b[1;8mhidden", "\\x1b[1;8mhidden\x1b[0m"),
        ("\x1b[38;5;8;8mhidden", "\\x1b[38;5;8;8mhidden\x1b[0m"),
        ("\x1b[2J\x1b[31mred", "\\x1b[2J\x1b[31mred\x1b[0m"),
        ("\x1b[31", r"\x1b[31"),
        ("plain", "plain"),
    ],
)
def test_colours_of_logs_stay_and_end_with_their_line(line: str, shown: str) -> None:
    assert with_colours(line) == shown


# The commands


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run in whose files every text steers, beside another one."""
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    path = sample_run(tmp_path / "runs" / ID)
    shutil.copytree(path, tmp_path / "runs" / "20261101-good")
    steering_status(path)
    steering_record(path)
    out = b"\x1b]0;x\x07\x9b31m\xc2\x9b31m\x00[red]\n"
    log(path / "logs" / "worker-0.log", out=out, err=b"\x1b[8mhidden\n")
    shutil.copytree(path, tmp_path / "runs" / f"dir{STEERING.replace('/', '')}")
    return path


@pytest.mark.parametrize(
    "words",
    [
        *("runs", "top RUN --once", "report RUN -o x.html", "compare RUN 20261101-good", "metrics RUN"),
        *("logs RUN", "stop RUN", "switch RUN asp", "rm RUN --dry-run", "export RUN x.pt"),
        *("trace RUN x.json", "prune --keep 0 --larger-than 1B --dry-run", "resume RUN", "logs NONE"),
    ],
)
def test_no_command_passes_on_what_steers(run: Path, words: str) -> None:
    places = {"RUN": str(run), "NONE": STEERING}
    typed = [places.get(word, word) for word in words.split()]
    # As in a terminal: without FORCE_COLOR click and rich would leave colours out by themselves.
    env = {"COLUMNS": "300", "FORCE_COLOR": "1", "TERM": "xterm"}
    result = CliRunner().invoke(app, typed, env=env, color=True)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    said = _without_our_colours(result.output)
    assert not steers(said), said
    if words in ("runs", "top RUN --once", "compare RUN 20261101-good", "logs NONE"):
        assert "[red]markup[/red]" in said, "markup is text, not taken for ours"


def _without_our_colours(text: str) -> str:
    """Colours are ours, and those of logs."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_metrics_for_programs_are_as_they_are(run: Path) -> None:
    """Prometheus and CSV are data; a terminal is not a program."""
    said = CliRunner().invoke(app, ["metrics", str(run), "--prometheus", "-"]).stdout
    assert "\x1b]0;owned" in said


def test_a_terminal_gets_metrics_written_out(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cli.printing._is_terminal", lambda: True)
    said = CliRunner().invoke(app, ["metrics", str(run), "--prometheus", "-"]).stdout
    assert not steers(said) and r"\x1b]0;owned" in said


def test_a_plan_is_text_and_no_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "[red]x.py").write_text("")
    plan: Plan = make_plan(Job(script="[red]x.py", args=(STEERING, "[/bold]")))
    facts = ModelFacts(
        parameters=1,
        nbytes=4,
        tensors=1,
        slices=1,
        samples=1,
        batch_size=1,
        optimizer=STEERING,
        shards=((1, 4),),
    )
    plan_command.show_plan(plan, facts)
    said = capsys.readouterr().out
    assert "[red]x.py" in said and "[/bold]" in said and not steers(said)


def test_the_outcome_of_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status = RunStatus(state="succeeded", version=3, run_id=STEERING, run_dir=str(tmp_path))
    status.diverged = STEERING
    status.workers = {0: WorkerStatus(rank=0, metrics={STEERING: 1.0})}
    status.ended_early = STEERING
    (tmp_path / "summary.json").write_text(
        json.dumps({"diagnosis": {"limit": "x", "sentence": STEERING, "advice": STEERING}})
    )
    outcome.finish(status)
    assert not steers(_without_our_colours(capsys.readouterr().err))


# While a run goes on


def status() -> RunStatus:
    found = RunStatus(state="running", version=3, mode=STEERING, elapsed_s=1.0)
    found.workers = {0: WorkerStatus(rank=0, state=STEERING, metrics={STEERING: 0.5})}
    found.messages = [f"worker:1 was replaced: {STEERING}"]
    return found


@pytest.mark.parametrize("full", [False, True])
def test_the_live_picture(full: bool) -> None:
    from rich.console import Console

    stream = io.StringIO()
    window = Window(1.0)
    window.see(status())
    console = Console(file=stream, width=300, color_system=None, force_terminal=False)
    console.print(picture(status(), window, width=300, height=60, full=full))
    assert not steers(stream.getvalue()) and "[red]markup[/red]" in stream.getvalue()


def test_messages_and_progress_lines() -> None:
    stream = io.StringIO()
    with Progress(stream=stream) as progress:
        progress.show(status())
        progress.print_line(f"ours {STEERING}")
    said = stream.getvalue()
    assert not steers(said) and "[red]markup[/red]" in said
    window = Window(1.0)
    window.see(status())
    assert not steers(plain_line(status(), window))
    display = Display(stream := io.StringIO())
    display.print(STEERING)
    assert not steers(stream.getvalue())


def test_a_script_s_own_output_stays_as_it_is(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    data = b"\x1b]0;mine\x07\x1b[2J\x9b[red]\r\n"
    with Progress(stream=io.StringIO()) as progress:
        progress.pass_on([OutputPiece(0, Stream.OUT, data)])
    assert capsysbinary.readouterr().out == data


# The source


def test_commands_print_through_one_place() -> None:
    printing = ("typer.echo", "typer.secho", "print")
    found = []
    for path in sorted(Path(paceline.cli.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in printing:
                found.append(path.name)
    assert sorted(set(found)) == ["logs_command.py", "printing.py"]


def test_errors_are_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    result = CliRunner().invoke(app, ["run", f"{STEERING}.py"])
    assert result.exit_code == 2 and "does not exist" in result.stderr and not steers(result.output)
