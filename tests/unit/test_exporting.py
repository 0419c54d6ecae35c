"""paceline export: what the ending says, with the umask's permissions, or a clear refusal."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from paceline.api import jobs
from paceline.api.exporting import export_run
from paceline.cli.app import app
from paceline.control.rundir import RunDirectory
from paceline.exceptions import UsageError
from paceline.plan import Job
from paceline.ps import saving

STATE = {"weight": torch.arange(6.0).reshape(2, 3), "steps": torch.tensor(3)}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run whose checkpoint is read elsewhere: test_checkpoints.py exports real ones."""
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))

    def latest_checkpoint(_: object, *, say: object, check: Callable[[Any], None]) -> SimpleNamespace:
        found = SimpleNamespace(version=12, meta={})
        check(found)
        return found

    monkeypatch.setattr(jobs, "latest_checkpoint", latest_checkpoint)
    monkeypatch.setattr(saving, "model_state", lambda *_: dict(STATE))
    return RunDirectory.create(Job(script="train.py"))


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def read(path: Path) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        return load_file(path)
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


@pytest.mark.parametrize("ending", [".pt", ".pth", ".safetensors"])
def test_the_ending_says_how(run: RunDirectory, tmp_path: Path, ending: str, umask: int) -> None:
    path = tmp_path / "näh" / f"model{ending}"
    for _ in range(2):  # also over one that is there
        export_run(run, path)
        found = read(path)
        assert found.keys() == STATE.keys()
        assert all(torch.equal(found[name], STATE[name]) for name in STATE)
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.onnx", "model.onnx ends in .onnx: a model is written as .safetensors, or as .pt or .pth"),
        ("model", "model has no ending"),
        ("/proc/model.pt", "/proc/model.pt cannot be written: No such file or directory"),
        ("file/model.pt", "file/model.pt cannot be written: Not a directory"),
        ("/proc/model.safetensors", "cannot be written"),
    ],
)
def test_what_cannot_be_written_is_refused_at_once(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.setattr(jobs, "latest_checkpoint", lambda _: pytest.fail("read before it was refused"))
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(UsageError) as caught:
        export_run(run, Path(name))
    assert said in str(caught.value)
    result = CliRunner().invoke(app, ["export", run.id, name])
    assert result.exit_code == 2 and "Traceback" not in result.stderr and said[-20:] in result.stderr


def test_how_to_load_it(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, how in (
        ("model.pt", 'model.load_state_dict(torch.load("model.pt"))'),
        ("model.safetensors", 'load_state_dict(safetensors.torch.load_file("model.safetensors"))'),
    ):
        result = CliRunner().invoke(app, ["export", "last", name])
        assert result.exit_code == 0 and how in result.stdout
