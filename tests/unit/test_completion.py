"""Completion in a shell: commands, options, runs; without torch."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import parameters
from paceline.cli.app import app
from paceline.control.rundir import RunDirectory
from paceline.plan import Job

MAIN = (
    "import atexit, sys\n"
    "heavy = ('torch', 'pandas', 'paceline.api.jobs')\n"
    "atexit.register(lambda: print([m for m in heavy if m in sys.modules]))\n"
    "from paceline.cli import main; main()"
)


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    return RunDirectory.create(Job(script="train.py"))


def completed(*words: str) -> list[str]:
    """What bash would offer for the last word."""
    environment = {"_PACELINE_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["paceline", *words])}
    done = subprocess.run(
        [sys.executable, "-c", MAIN],
        env={**os.environ, **environment, "COMP_CWORD": str(len(words))},
        capture_output=True,
        text=True,
    )
    *offered, heavy = done.stdout.split("\n")[:-1]
    assert heavy == "[]", done.stdout + done.stderr
    return offered


def test_what_is_offered(run: RunDirectory) -> None:
    assert {"run", "runs", "rm", "resume", "report"} <= set(completed("r"))
    assert completed("run", "--max-u") == ["--max-updates"]
    assert completed("stop", run.id[:6]) == [run.id]
    assert parameters.complete_run("las") == ["last"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_each_shell(shell: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["completion", shell])
    assert result.exit_code == 0 and f"_PACELINE_COMPLETE=complete_{shell}" in result.stdout
    if shutil.which(shell):
        script = tmp_path / "script"
        script.write_text(result.stdout)
        subprocess.run([shell, "-n", str(script)], check=True)


def test_other_shells() -> None:
    result = CliRunner().invoke(app, ["completion", "tcsh"])
    assert result.exit_code == 2 and "Valid: bash, zsh, fish" in result.stderr
