"""What surrounds a command: a terminal without colour, a locale without Unicode, variables that are wrong."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.control.rundir import RunDirectory
from paceline.exceptions import UsageError
from paceline.observe import RunStatus
from paceline.plan import Job, make_plan
from paceline.storage.names import check_name

MAIN = "from paceline.cli import main; main()"


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path


def on_terminal(*words: str, **environment: str) -> str:
    """What a command shows on a terminal."""
    mine, its = pty.openpty()
    try:
        command = [sys.executable, "-c", MAIN, *words]
        variables = {"TERM": "xterm-256color", **environment}
        process = subprocess.Popen(command, stdout=its, stderr=its, env={**os.environ, **variables})
        os.close(its)
        shown = b""
        while True:
            try:
                piece = os.read(mine, 1 << 16)
            except OSError:  # the terminal's other end is closed
                break
            shown += piece
        process.wait(timeout=60)
    finally:
        os.close(mine)
    return shown.decode()


COLOUR = re.compile(r"\x1b\[(?:[0-9;]*;)?[349][0-7]m")


def test_colour_only_where_it_is_wanted() -> None:
    run = RunDirectory.create(Job(script="train.py"))
    run.write_status(RunStatus(state="failed").to_json())
    coloured = on_terminal("runs")
    assert "failed" in coloured and COLOUR.search(coloured)
    plain = on_terminal("runs", NO_COLOR="1")
    assert "failed" in plain and not COLOUR.search(plain)
    assert "\x1b" not in on_terminal("runs", TERM="dumb")
    for variables, coloured_ in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
        environment = {"NO_COLOR": None, "TERM": "xterm", **variables}
        result = CliRunner().invoke(app, ["logs", "nobody"], color=True, env=environment)
        assert "there is no run 'nobody'" in result.stderr
        assert bool(COLOUR.search(result.stderr)) == coloured_


def test_where_only_ascii_can_be_written() -> None:
    RunDirectory.create(Job(script="train.py")).write_status(RunStatus(state="failed").to_json())

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", MAIN, *words]
        plain = {"LC_ALL": "C", "PYTHONUTF8": "0"}
        return subprocess.run(command, env={**os.environ, **plain}, capture_output=True, text=True)

    listed = call("runs")
    assert listed.returncode == 0 and r"2\xd71" in listed.stdout
    Path("trän.py").touch()
    refused = call("run", "trän.py")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "script='tr" in refused.stderr and refused.stderr.rstrip().endswith("set PYTHONUTF8=1")
    assert len(list(Path("runs").iterdir())) == 1


@pytest.mark.parametrize("settings", [{"script": "a\udcfc.py"}, {"run_dir": "\udcfc"}, {"args": ("\udcfc",)}])
def test_names_that_are_no_text_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="holds bytes that are no text: rename it"):
        Job(**settings)
    check_name("script", "trän.py")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "PACELINE_LINK_CONDITIONS",
            "latency=fast",
            "LINK_CONDITIONS 'latency=fast': latency needs",
        ),
        ("PACELINE_FAULTS", "kill everybody", "PACELINE_FAULTS: 'kill everybody' is not a fault"),
    ],
)
def test_a_variable_that_means_nothing_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as caught:
        make_plan(Job(script="train.py"))
    assert said in str(caught.value)


def test_link_conditions_where_there_is_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_LINK_CONDITIONS", "latency=5ms")
    make_plan(Job(script="train.py"))
    with pytest.raises(UsageError, match="emulates a network, and link=shm"):
        make_plan(Job(script="train.py", link="shm"))
