"""Every logged value is kept, with the step at which it was logged: held against the script's own account.

The account is a file that each worker process writes: its steps so far, and the value that it logs there.
"""

import os
import signal

import pytest

from paceline.observe.analyse.run_data import RunData
from tests.speed import first

SCRIPT = """
account = (RUN_DIR / f"account-{RANK}-{os.getpid()}").open("a", buffering=1)
first_start = not list(RUN_DIR.glob("checkpoints/version-*"))
steps, values = 0, itertools.count(1_000_000 * os.getpid())

def log(name="v", **more):
    value = next(values)
    paceline.log(**{name: value}, **more)
    account.write(f"{steps} {name} {value}\\n")

def once(name):
    try:
        os.close(os.open(RUN_DIR / name, os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.randn(96, 4)
loader = DataLoader(TensorDataset(x, torch.arange(96) % 2), batch_size=4, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
log("before")
for epoch in range(EPOCHS):
    for a, b in loader:
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        log(loss=float("nan") if steps == 3 else 1 / steps)
        if KILL and RANK == 1 and steps == 5 and once("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if FAIL and epoch == 2 and RANK == 0 and once("failed"):
            log("last")
            raise RuntimeError("on purpose")
    log("epoch")
log("end")
"""


def source(*, epochs: int = 4, kill: bool = False, fail: bool = False) -> str:
    return f"EPOCHS, KILL, FAIL = {epochs}, {kill}, {fail}\n" + SCRIPT


def attempts(ran) -> dict[int, list[tuple[int, int]]]:
    """By worker, of each attempt: its steps before, and the steps that it made. Checks every value."""
    data = RunData(ran.run.path)
    frame = data.metrics
    assert not data.missing
    mine = frame[frame["name"] != "loss"]
    told = {(r.name, int(r.value)): (r.worker, r.attempt, r.step) for r in mine.itertuples(index=False)}
    assert len(told) == len(mine), "each value once"
    began = {(s.worker, s.attempt): s.began for s in data.values.starts}
    found: dict[int, list[tuple[int, int]]] = {}
    kept = 0
    for path in ran.run.path.glob("account-*"):
        rank = int(path.name.split("-")[1])
        lines = [line.split() for line in path.read_text().splitlines()]
        rows = [(told[name, int(value)], int(steps)) for steps, name, value in lines]
        numbers = {attempt for (_, attempt, _), _ in rows}
        assert len(numbers) == 1, "a process is one attempt"
        (number,) = numbers
        before = began[rank, number]
        assert all(worker == rank and step == before + steps for (worker, _, step), steps in rows)
        found.setdefault(rank, []).append((number, before, max(steps for _, steps in rows)))
        kept += len(rows)
    assert kept == len(mine), "nothing that was not logged"
    assert int(frame["value"].isna().sum()) == sum(made > 2 for each in found.values() for _, _, made in each)
    assert data.values.left_out == 0
    starts = {rank: sorted(each) for rank, each in found.items()}
    assert all([number for number, _, _ in each] == [*range(len(each))] for each in starts.values())
    return {rank: [(before, made) for _, before, made in each] for rank, each in starts.items()}


@pytest.mark.parametrize(
    ("mode", "more"),
    first(
        2,
        [
            ("bsp", {"schedule": ("12=asp",)}),
            ("allreduce", {}),
            ("asp", {}),
            ("local:4", {}),
            ("bsp", {}),
            ("ssp:2", {"overlap": True}),
            ("hybrid:asp", {"workers": 4, "groups": 2}),
            ("easgd:2", {}),
            ("diloco:4", {}),
            ("hogwild", {}),
        ],
    ),
)
def test_values_agree_with_the_scripts_account_over_a_kill_a_switch_and_a_resume(run, mode, more):
    settings = {"workers": 2, "threads": 1, "mode": mode, "checkpoint_every": 3, **more}
    one = run(
        source(kill=True), **settings, max_updates=16 if not mode.startswith(("local", "diloco")) else 6
    )
    assert one.error is None
    assert one.status.ended_early
    before = attempts(one)
    killed = before[1]
    assert len(killed) == 2 and killed[0] == (0, 5)
    if mode.startswith(("allreduce", "hybrid")):  # without one of its members a group goes back
        assert killed[1][0] <= 5 and len(before[0]) == 2
    else:
        assert killed[1][0] == 5, "the steps of a worker that was replaced go on"
        assert len(before[0]) == 1
    two = run(source(), **settings, resume=one)
    assert two.error is None
    after = attempts(two)
    for rank, starts in after.items():
        assert starts[:-1] == before[rank]
        assert starts[-1][0] == sum(starts[-2]), "steps go on after a resume"
    frame = RunData(two.run.path).metrics
    last = frame[frame["name"] == "end"]
    assert last["samples"].max() <= 4 * 96
    if mode in ("bsp", "local:4", "diloco:4", "allreduce") and not more:
        assert set(last["samples"]) == {4 * 96}, "of the run"
    assert set(last["epoch"]) == {3}
    assert last["version"].max() <= two.status.version
    for _, mine in RunData(two.run.path).standing_metrics.groupby(["worker", "name"]):
        assert mine["step"].is_monotonic_increasing


@pytest.mark.slow
def test_what_was_logged_before_an_error_is_kept_and_steps_made_again_are_told_apart(run):
    one = run(source(fail=True), workers=2, threads=1, mode="bsp", checkpoint_every=5, max_restarts=0)
    assert "on purpose" in one.error
    before = attempts(one)
    assert len(RunData(one.run.path).metrics.query("name == 'last'")) == 1
    two = run(source(), workers=2, threads=1, mode="bsp", resume=one)
    assert two.error is None
    after = attempts(two)
    for rank, starts in after.items():
        assert starts[0] == before[rank][0]
        assert starts[1][0] % 5 == 0 and starts[1][0] <= sum(starts[0]), "from the checkpoint"
    data = RunData(two.run.path)
    again = data.metrics.query("name == 'v' and worker == 0")
    assert len(again) > again["step"].nunique()
    curve = data.standing_metrics.query("name == 'v' and worker == 0")
    assert curve["step"].tolist() == [*range(1, sum(after[0][1]) + 1)], "a curve over steps has no overlap"
    first_epoch = curve[curve["step"] <= 12]
    assert (first_epoch["version"] == first_epoch["step"]).all(), first_epoch.to_string()
    assert (first_epoch["samples"] == 8 * first_epoch["step"]).all()
    assert curve["samples"].is_monotonic_increasing and curve["version"].is_monotonic_increasing


@pytest.mark.slow
def test_values_before_a_go_back_are_kept(run):
    killed = []

    def watch(status, lines, engine):
        if not killed and len(status.checkpoints) > 1:
            killed.append(status.version)
            os.kill(engine.pids()["server:0"], signal.SIGKILL)

    ran = run(source(epochs=200), workers=2, threads=1, mode="asp", checkpoint_every=20, watch=watch)
    assert killed and ran.error is None
    found = attempts(ran)
    assert all(len(starts) == 2 and 0 < starts[1][0] <= sum(starts[0]) for starts in found.values())


MANY = """
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.arange(8) % 2), batch_size=4)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for a, b in loader:
    nn.functional.cross_entropy(model(a), b).backward()
    optimizer.step()
    optimizer.zero_grad()
    paceline.log(**{f"{i:05}-{'x' * LENGTH}": i / 7 for i in range(NUMBER)})
"""


@pytest.mark.parametrize(("number", "length"), [(3_000, 30)], ids=["150 kB a step"])
def test_thousands_of_values_of_one_step_are_all_kept(run, number, length):
    """More than fits into a small message: 64 KB."""
    ran = run(f"NUMBER, LENGTH = {number}, {length}\n" + MANY, workers=2, mode="bsp")
    assert ran.status.state == "succeeded", ran.error
    data = RunData(ran.run.path)
    assert len(data.metrics) == 2 * number and data.metrics["name"].nunique() == number
    assert not data.left_out
    wanted = {f"{i:05}-{'x' * length}": i / 7 for i in range(number)}
    for worker in ran.status.workers.values():
        assert worker.metrics == wanted
    assert data.status.metrics == wanted
