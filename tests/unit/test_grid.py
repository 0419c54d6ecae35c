"""The runs of a study: every combination once, as jobs, and which are left."""

import pytest

from paceline.exceptions import UsageError
from paceline.plan import Job
from paceline.plan.grid import Axis, job_of, left, startable, trials

AXES = [Axis.parse("mode=bsp,ssp:2,asp"), Axis.parse("workers=2,4"), Axis.parse("arg:lr=0.1,1e-2")]


def test_every_combination_with_every_seed() -> None:
    found = trials(AXES, [0, 1, 2])
    assert len(found) == 36 and len({trial.name for trial in found}) == 36
    assert [trial.seed for trial in found] == [0] * 12 + [1] * 12 + [2] * 12
    assert len({(trial.cell, trial.seed) for trial in found}) == 36
    assert found[2].label == "mode=bsp workers=4 lr=0.1"
    assert found[4].name == "005-ssp-2-2-0.1-seed0"
    assert [trial.name for trial in trials([], [7])] == ["001-seed7"]


def test_jobs() -> None:
    base = Job(script="train.py", args=("--epochs", "3"), max_samples=4096, servers=2)
    found = trials(AXES, [3])
    assert job_of(base, AXES, found[-1], run_dir="there") == Job(
        script="train.py",
        args=("--epochs", "3", "--lr", "1e-2"),
        mode="asp",
        workers=4,
        servers=2,
        max_samples=4096,
        seed=3,
        run_dir="there",
    )
    assert job_of(base, AXES, found[0], run_dir="x", seed_argument="seed").args[-2:] == ("--seed", "3")
    axes = [Axis.parse("mode=asp"), Axis.parse("damping=none"), Axis.parse("compress-replies=true,false")]
    axes += [Axis.parse("deadline=2.5"), Axis.parse("groups=2"), Axis.parse("arg:-k=1")]
    axes = axes[:2] + axes[3:4] + axes[5:]
    job = job_of(base, axes, trials(axes, [0])[0], run_dir="x")
    assert (job.mode, job.deadline_s, job.args[-2:]) == ("asp+damping=none", 2.5, ("-k", "1"))


def test_values_with_commas() -> None:
    assert Axis.parse("mode=bsp;downpour:2,4").values == ("bsp", "downpour:2,4")
    assert Axis.parse("mode=downpour:2,4,asp,3").values == ("downpour:2,4", "asp", "3")
    assert Axis.parse("arg:name=a, b").values == ("a", "b")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mode", "--grid mode: give a name and values"),
        ("mode=", "give at least one value, as in mode=bsp,asp"),
        ("mode=bsp,,asp", "give at least one value"),
        ("mode=bsp,bsp", "bsp is there twice"),
        ("wokers=2", "has no option --wokers. Did you mean workers?"),
        ("lr=0.1", "For an argument of the script write arg:lr=…"),
        ("arg:=1", "needs the name of an argument"),
        ("seed=1,2", "it cannot be varied here; use seeds"),
        ("max_updates=5", "use the budget"),
    ],
)
def test_what_is_wrong_is_named(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Axis.parse(text)
    assert said in str(caught.value)


def test_what_no_job_can_have_is_named() -> None:
    for text, said in (
        ("workers=two", "grid workers=two: give a whole number"),
        ("guard=perhaps", "give true or false"),
        ("mode=fast", "mode=fast: mode 'fast': there is no such mode"),
        ("workers=0", "workers=0: workers=0 is too small"),
    ):
        axes = [Axis.parse(text)]
        with pytest.raises(UsageError) as caught:
            job_of(Job(), axes, trials(axes, [0])[0], run_dir="x")
        assert said in str(caught.value)
    with pytest.raises(UsageError, match="the grid has workers twice"):
        trials([Axis.parse("workers=2"), Axis.parse("workers=3")], [0])
    with pytest.raises(UsageError, match="each once"):
        trials(AXES, [1, 1])


def test_what_is_left() -> None:
    states = dict(a="succeeded", b="failed", c="stopped", d="crashed", e="new", f="running")
    assert left(states) == ["c", "d", "e", "f"]
    assert left(states, again=True) == ["b", "c", "d", "e", "f"]


@pytest.mark.parametrize(
    ("waiting", "running", "at_once", "count"),
    [
        ([2, 2, 2], [], 1, 1),
        ([2, 2, 2], [2], 1, 0),
        ([2, 2, 2], [2], 3, 2),
        ([4, 4, 1], [], None, 2),
        ([4, 4, 1], [4], None, 1),
        ([16, 1], [], None, 1),  # more workers than cores: alone
        ([], [], 4, 0),
    ],
)
def test_how_many_may_start(waiting: list[int], running: list[int], at_once: int | None, count: int) -> None:
    assert startable(waiting, running, at_once=at_once, cores=8) == count
