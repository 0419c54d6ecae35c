"""Removing runs: those that are meant, all of them, and nothing else."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.control import removing
from paceline.control.known_runs import list_runs
from paceline.control.removing import Candidate, candidate, choose, remove
from paceline.control.rundir import RunDirectory
from paceline.exceptions import UsageError
from paceline.observe import RunStatus
from paceline.plan import Job

DAY = 86_400.0


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def make(state: str = "succeeded", **settings: Any) -> RunDirectory:
    run = RunDirectory.create(Job(**{"script": "train.py", **settings}))
    run.write_status(RunStatus(state=state, version=12).to_json())
    (run.path / "spans.parquet").write_bytes(bytes(50_000))
    return run


def some(name: str, state: str = "succeeded", days: float = 0.0, nbytes: int = 0, alive: bool = False) -> Any:
    run = RunDirectory(Path(name), name)
    return Candidate(run=run, state=state, alive=alive, changed=100 * DAY - days * DAY, nbytes=nbytes)


def chosen(*candidates: Candidate, **conditions: Any) -> list[str]:
    return [each.run.id for each in choose(candidates, now=100 * DAY, **conditions)]


def test_all_conditions_count() -> None:
    runs = [
        some("running", "running", alive=True, days=50, nbytes=10**9),
        some("new", "failed"),
        some("large", "succeeded", days=2, nbytes=10**9),
        some("old", "failed", days=31),
        some("crashed", "crashed", days=40, nbytes=10**9),
    ]
    assert chosen(*runs, older_than_s=30 * DAY) == ["old", "crashed"]
    assert chosen(*runs, larger_than=10**6) == ["large", "crashed"]
    assert chosen(*runs, states=["failed"]) == ["new", "old"]
    assert chosen(*runs, older_than_s=DAY, larger_than=10**6, states=["crashed", "failed"]) == ["crashed"]
    assert chosen(*runs, keep=3) == ["old", "crashed"]
    assert chosen(*runs, keep=9) == []


def test_a_run_goes_with_all_it_left_behind(root: Path, tmp_path: Path) -> None:
    plain, elsewhere, other = make(), make(run_dir=str(tmp_path / "mine")), make()
    assert candidate(plain).nbytes >= 50_000
    for run in (plain, elsewhere):
        (run.path / "of-the-script.txt").touch()
        assert remove(run) == []
        assert not run.path.exists()
    assert [path.name for path in root.iterdir()] == [other.id]


def test_what_was_in_the_directory_before_stays(root: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").touch()
    run = make(run_dir=str(mine))
    assert candidate(run).nbytes < 2 * 50_000
    assert remove(run) == ["thesis.tex"]
    assert list(root.iterdir()) == []
    assert [path.name for path in mine.iterdir()] == ["thesis.tex"]


def test_one_that_is_going_on_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make("running")
    with pytest.raises(UsageError, match=f"state running.*`paceline stop {run.id}`"):
        remove(run)
    writing = make("succeeded")
    assert writing.lock.take()  # as a controller does until the report is written
    with pytest.raises(UsageError, match="its report is being written"):
        remove(RunDirectory(writing.path))
    assert (writing.path / "run.json").exists()
    writing.lock.give_back()


def test_a_removal_cut_short_can_be_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make()

    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(removing.shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            remove(run)
    assert [each.id for each in list_runs()] == [run.id]
    assert remove(list_runs()[0]) == [] and list_runs() == []


def call(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    return result.exit_code, " ".join((result.stdout + result.stderr).split())


def test_rm(root: Path) -> None:
    first, second, running = make(), make("failed"), make("running")
    code, said = call("rm", first.id, running.id)
    assert (code, first.path.exists()) == (2, True) and f"run {running.id} is going on" in said
    code, said = call("rm", first.id, second.id, first.id, "--dry-run")
    assert code == 0 and first.path.exists()
    assert f"Would remove run {second.id} (failed " in said and "2 runs, " in said
    code, said = call("rm", first.id, second.id)
    assert code == 0 and f"Removed run {first.id} (succeeded" in said and said.endswith("kB freed.")
    assert [run.id for run in list_runs()] == [running.id]


def test_prune(root: Path) -> None:
    failed, running, kept = make("failed"), make("running"), make()
    for words, said in (
        ([], "prune what? Give --older-than"),
        (["--state", "running"], "--state running: there is no such state. Valid: succeeded, failed"),
        (["--older-than", "soon"], "--older-than soon: give seconds, or a duration"),
        (["--larger-than", "big"], "--larger-than big: give bytes, or a size"),
        (["--state", "failed"], "nothing was removed: there is no terminal to ask at; give --yes"),
    ):
        code, answer = call("prune", *words)
        assert code == 2 and said in answer
    assert call("prune", "--older-than", "1d") == (
        0,
        "Nothing to remove: none of 3 runs fulfils all conditions.",
    )
    assert "1 run, " in call("prune", "--larger-than", "40kB", "--state", "failed,stopped", "--dry-run")[1]
    assert failed.path.exists()
    assert call("prune", "--keep", "0", "--state", "failed", "--yes")[0] == 0
    assert [run.id for run in list_runs()] == [kept.id, running.id]
