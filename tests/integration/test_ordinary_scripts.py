"""Scripts that people write (tests/scripts), alone and under `paceline run`: the same files, the same output,
the same exit code. With one worker, in modes that are then plain PyTorch, the same to the last digit."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.api.jobs import execute
from paceline.control import RunDirectory
from paceline.observe.record.output import Screen
from paceline.plan import Job, make_plan
from paceline.worker.program_runner import run_program
from tests.speed import first

SCRIPTS = Path(__file__).parents[1] / "scripts"
MODES = ("bsp", "asp", "local:4", "allreduce")


@dataclass(frozen=True)
class Script:
    """How one of them is started, and ends."""

    name: str
    args: tuple[str, ...] = ()
    code: int = 0
    files: tuple[str, ...] = ()
    module: bool = False
    forks: bool = True
    """Whether it may be a fork of pytest, which has changed logging and warnings in its process."""


ALL = (
    Script("bars"),
    Script("exits", code=3),
    Script("csv_file", files=("history.csv",)),
    Script("plain"),
    Script("logs", files=("train.log",), forks=False),
    Script("arguments", args=("--lr", "0.1", "--widths", "4", "8", "--epochs", "2")),
    Script("arguments", args=("--help",)),
    Script("arguments", code=2),
    Script("clouds.train", args=("--x",), module=True),
    Script("early_stopping"),
    Script("best_checkpoint", files=("best.pt", "last.pt", "whole.pt")),
    Script("lr_finder"),
    Script("ema", files=("ema-whole.pt", "ema.pt")),
    Script("one_cycle"),
    Script("cosine"),
    Script("validation"),
    Script("exits", args=("--text",), code=1),
    Script("raises", code=1),
    Script("asks", code=1),
    Script("warns", forks=False),
    Script("accumulation"),
    Script("mixed_precision"),
    Script("loading"),
    Script("trainer", files=("trained/checkpoint.pt", "trained/history.json")),
    Script("functions", files=("atexit.txt", "thread.txt")),
)


@dataclass
class Ended:
    """What is left of a process."""

    code: int
    out: str
    err: str
    where: Path

    def files(self) -> list[str]:
        found = (path.relative_to(self.where) for path in self.where.rglob("*") if path.is_file())
        return sorted(str(path) for path in found)

    def shape(self, text: str) -> list[str]:
        """Lines without numbers, and without what tqdm draws."""
        screen = Screen()
        lines = [*screen.feed(text.encode()), *screen.end()]
        # Of a bar its name: a worker that does more than its share has more steps than tqdm was told.
        lines = [re.sub(r":.*\[.*(it/s|s/it).*\]", "", line.replace(str(self.where), "")) for line in lines]
        return [re.sub(r"[\s\d.:e-]+", "", line) for line in lines]


def start(script: Script, command: list[str], where: Path) -> Ended:
    """As a command, in a directory of its own."""
    where.mkdir()
    path = os.pathsep.join([str(SCRIPTS), *sys.path])
    runs = str(where.with_suffix(".runs"))
    env = {**os.environ, "PACELINE_RUNS": runs, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    target = script.name if script.module else str(SCRIPTS / f"{script.name}.py")
    done = subprocess.run(
        [sys.executable, *command, *(["-m"] if script.module else []), target, *script.args],
        cwd=where,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=110,
        env=env,
    )
    return Ended(done.returncode, done.stdout.decode(), done.stderr.decode(), where)


def fork(script: Script, mode: str, workers: int, where: Path) -> Ended:
    """As a run whose roles are forks of this process, which has torch loaded: much sooner than a command."""
    where.mkdir()
    target = script.name if script.module else str(SCRIPTS / f"{script.name}.py")

    def program() -> None:
        os.chdir(where)
        run_program(target, script.args, search=str(SCRIPTS), module=script.module)

    job = Job(workers=workers, mode=mode, run_dir=str(where.with_suffix(".runs") / "run"), deadline_s=60.0)
    plan = make_plan(job)
    run = RunDirectory.create(job, plan=plan)
    status = execute(plan, run, program=program)
    code = 0 if status.state == "succeeded" else status.exit_code or 1
    out = (run.logs_path / "worker-0.out").read_bytes().decode()
    return Ended(code, out, status.error or "", where)


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found: dict[Script, Ended] = {}

    def of(script: Script) -> Ended:
        if script not in found:
            found[script] = start(script, [], tmp_path_factory.mktemp("alone") / "x")
        return found[script]

    return of


def cases() -> list[tuple[Script, str, int]]:
    """The first of each are for the fast suite: another mode with every script."""
    return [
        (script, mode, workers)
        for workers in (1, 2)
        for shift in range(len(MODES))
        for at, script in enumerate(script for script in ALL if script.forks)
        for mode in (MODES[(at + shift) % len(MODES)],)
    ]


def same(one: Path, other: Path) -> bool:
    if one.suffix != ".pt":
        return one.read_bytes() == other.read_bytes()
    return _same(torch.load(one, weights_only=False), torch.load(other, weights_only=False))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.nn.Module):
        return _same(one.state_dict(), other.state_dict())
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        # Alone, prepare() chooses the fused kernel; in a run the servers do, and the script's choice stays.
        keys = one.keys() - {"fused", "foreach"}
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in keys)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


@pytest.mark.parametrize(
    ("script", "mode", "workers"),
    first(1, cases(), ids=[f"{c[0].name}{''.join(c[0].args[:1])}-{c[1]}-{c[2]}" for c in cases()]),
)
def test_as_alone(
    alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Script, mode: str, workers: int
) -> None:
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    compare(alone(script), fork(script, mode, workers, tmp_path / "x"), script, mode, workers)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("script", [s for s in ALL if not s.forks], ids=lambda script: script.name)
def test_as_alone_by_command(alone: Any, tmp_path: Path, script: Script, mode: str) -> None:
    command = ["-m", "paceline", "run", "--quiet", "--workers", "1", "--mode", mode]
    compare(alone(script), start(script, command, tmp_path / "x"), script, mode, 1)


def compare(wanted: Ended, found: Ended, script: Script, mode: str, workers: int) -> None:
    assert (wanted.code, wanted.files()) == (script.code, sorted(script.files)), wanted.err
    assert found.code == wanted.code, found.err
    assert found.files() == wanted.files(), found.err
    (logs,) = found.where.with_suffix(".runs").glob("*/logs")
    err = (logs / "worker-0.err").read_bytes().decode()
    assert found.out == (logs / "worker-0.out").read_bytes().decode()
    said, traceback, lines = wanted.err.partition("Traceback")
    if traceback:  # the controller's to show, with the same lines
        assert found.err.count("Traceback") == 1
        for line in lines.splitlines():
            assert "^" in line or line in found.err, "and where in a line, if the interpreter says it"
    if workers == 1 and mode != "local:4":
        assert found.out == wanted.out
        for name in script.files:
            assert same(found.where / name, wanted.where / name), name
    if workers == 1:
        assert found.shape(found.out) == wanted.shape(wanted.out)
        assert sorted(found.shape(err)) == sorted(wanted.shape(said))
    else:  # how many epochs there are, and what they say, depends on the others, too
        assert set(found.shape(found.out)) == set(wanted.shape(wanted.out))
        assert set(found.shape(err)) == set(wanted.shape(said))
