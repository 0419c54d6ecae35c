"""A plan has every role and its place, or is refused with the reason before anything starts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.core.modes import parse_mode
from paceline.exceptions import PlanError, UsageError
from paceline.plan import Job, ModelFacts, make_plan
from paceline.plan import plan as module


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_roles_and_threads(script: str) -> None:
    plan = make_plan(Job(script=script, workers=3, servers=2, mode="ssp:1"))
    names = ["server:0", "server:1", "worker:0", "worker:1", "worker:2"]
    assert [role.name for role in plan.roles] == names
    assert [role.threads for role in plan.roles] == [8, 8, 2, 2, 2]
    assert {role.host for role in plan.roles} == {"localhost"}
    assert [role.rank for role in plan.servers] == [0, 1]
    assert [role.rank for role in plan.workers] == [0, 1, 2]
    assert plan.mode == parse_mode("ssp:1")
    assert plan.warnings == ()


def test_every_worker_has_a_thread(script: str) -> None:
    plan = make_plan(Job(script=script, workers=20))
    assert {worker.threads for worker in plan.workers} == {1}
    assert make_plan(Job(script=script, threads=3)).workers[0].threads == 3


@pytest.mark.parametrize(
    ("mode", "link", "in_place", "shares"),
    [("bsp", "auto", True, True), ("bsp", "tcp", False, False), ("asp", "shm", False, True)],
)
def test_what_travels(script: str, mode: str, link: str, in_place: bool, shares: bool) -> None:
    plan = make_plan(Job(script=script, mode=mode, link=link))
    assert (plan.in_place, plan.shares_memory) == (in_place, shares)


def test_fit_needs_no_script() -> None:
    assert len(make_plan(Job()).roles) == 3


def test_json(script: str) -> None:
    plan = make_plan(Job(script=script, mode="backup:1"))
    data = json.loads(json.dumps(plan.to_json()))
    assert data["mode"] == "backup:1"
    assert data["roles"][0] == {"role": "server", "rank": 0, "host": "localhost", "threads": 8}
    assert Job.from_json(data["job"]) == plan.job


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mode": "backup:4", "workers": 4}, "needs at least 5 workers, got workers=4"),
        ({"mode": "asp", "clip_norm": 2.0}, "clip_norm=2 clips the average"),
        ({"mode": "easgd:4", "norm_bound": 100.0}, "mode easgd:4 pushes none; leave norm_bound out"),
        ({"mode": "allreduce", "norm_bound": 100.0}, "mode allreduce pushes none"),
    ],
)
def test_contradictions_are_refused(script: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refusal:
        make_plan(Job(script=script, **settings))
    assert said in str(refusal.value)


def test_clip_norm_refusal_says_the_mode_and_what_to_do(script: str) -> None:
    with pytest.raises(UsageError, match="got mode=ssp:2. Use mode bsp.*clip_grad_norm_"):
        make_plan(Job(script=script, mode="ssp:2", clip_norm=1.0))


def test_missing_script_with_a_near_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError) as refusal:
        make_plan(Job(script="digit.py"))
    assert str(refusal.value) == (
        f"script 'digit.py' does not exist (looked in {tmp_path}). Did you mean digits.py?"
    )
    with pytest.raises(PlanError, match="script 'no/such.py' does not exist"):
        make_plan(Job(script="no/such.py"))


def test_directory_as_script(tmp_path: Path) -> None:
    (tmp_path / "main.py").touch()
    with pytest.raises(PlanError, match="is a directory; name the Python file.*main.py"):
        make_plan(Job(script=str(tmp_path)))


def test_unreadable_script(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests may run as root, whom permissions do not stop.
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", script)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PlanError, match="cannot be read: Permission denied. Check its permissions"):
        make_plan(Job(script=script))


def test_script_below_a_file(script: str) -> None:
    with pytest.raises(PlanError, match="cannot be read: Not a directory"):
        make_plan(Job(script=f"{script}/train.py"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"servers": 9}, "servers=9 share 8 cores"), ({"threads": 9}, "threads=9 per worker")],
)
def test_only_warned(script: str, settings: dict[str, Any], said: str) -> None:
    (warning,) = make_plan(Job(script=script, **settings)).warnings
    assert said in warning


def test_steps_per_epoch() -> None:
    facts = ModelFacts(
        parameters=1,
        nbytes=4,
        tensors=1,
        slices=1,
        samples=100,
        batch_size=32,
        optimizer="SGD",
        shards=((1, 4),),
    )
    assert [facts.steps_per_epoch(workers) for workers in (1, 2, 4)] == [4, 2, 1]


def test_cores_are_those_we_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert 1 <= module.available_cores() <= 4096


def test_planning_does_not_import_torch() -> None:
    code = "import sys, paceline.plan, paceline.observe; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("given", "threads", "planned"),
    [("3", None, 3), ("3,1", None, 3), ("3", 2, 2), ("", None, 0), ("x", None, 0), ("0", None, 0)],
)
def test_threads_that_the_user_set(
    monkeypatch: pytest.MonkeyPatch, script: str, given: str, threads: int | None, planned: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    (worker,) = make_plan(Job(script=script, workers=1, threads=threads)).workers
    assert worker.threads == (planned or 8)
