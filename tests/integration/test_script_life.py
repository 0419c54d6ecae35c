"""A script that is started again gets the epochs that are left, and has what it kept."""

import shutil
from pathlib import Path

from paceline.api import jobs
from paceline.control import RunDirectory
from paceline.observe import Progress
from tests.integration.conftest import Ran

# 24 samples, batches of 4, two workers: 3 rounds an epoch.
SOURCE = """
torch.manual_seed(0)
state = paceline.state(best=-1, history=[], average=torch.zeros(2))
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(24, 4)
loader = DataLoader(TensorDataset(x, x[:, :2]), batch_size=4)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
found = [state.best, state.history, state.average.tolist()]
back = RUN_DIR / "back"
if RANK == 1 and (RUN_DIR / "killed").exists():
    back.touch()
begun = []
for epoch in paceline.epochs(int(sys.argv[1])):
    begun.append(epoch)
    total = batches = 0
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total, batches = total + loss.item(), batches + 1
        if RANK == 1 and epoch == 1 and batches == 2 and not (RUN_DIR / "killed").exists():
            (RUN_DIR / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while RANK == 0 and (RUN_DIR / "killed").exists() and not back.exists():
            os.sched_yield()
    state.best = epoch
    state.history = [*state.history, batches]
    state.average += 1
result({"found": found, "begun": begun, "best": state.best, "history": state.history})
"""


def test_epochs_that_are_left_and_what_the_script_kept_over_a_kill_a_resume_and_going_back(run, tmp_path):
    ran = run(SOURCE, args=("3",), workers=2, mode="bsp", threads=1, checkpoint_every=4, keep_checkpoints=50)
    assert ran.error is None, ran.error
    first, replaced = ran.results()[0], ran.results()[1]
    assert first["begun"] == [0, 1, 2] and first["best"] == 2 and len(first["history"]) == 3
    # Who took worker 1's place has what worker 0 kept at the end of epoch 0, and not its first values.
    assert replaced["begun"] == [1, 2]
    assert replaced["found"] == [0, [3], [1.0, 1.0]]

    halfway = tmp_path / "halfway"
    shutil.copytree(ran.run.path, halfway)
    kept = sorted((halfway / "checkpoints").iterdir())
    assert kept[0].name.endswith("4"), kept  # in epoch 1, after its first round
    for later in kept[1:]:
        shutil.rmtree(later)

    more = run(SOURCE, resume=ran, args=("5",), workers=2, mode="bsp", threads=1)
    assert more.error is None, more.error
    for result in more.results().values():
        assert result["begun"] == [3, 4] and result["best"] == 4
        assert result["history"][3:] == [3, 3]
        assert result["found"][0] == 2

    died = Ran(ran.status, RunDirectory(halfway), None)
    for path in halfway.glob("result-*.json"):
        path.unlink()
    back = run(SOURCE, resume=died, args=("3",), workers=2, mode="bsp", threads=1)
    assert back.error is None, back.error
    for result in back.results().values():
        assert result["begun"] == [1, 2] and result["found"] == [0, [3], [1.0, 1.0]]
        assert result["history"] == [3, 2, 3], "what was left of epoch 1, and epoch 2"


def record_of(run: Path) -> dict[str, bytes]:
    left_out = ("checkpoints", "lock")
    files = [p for p in run.rglob("*") if p.is_file() and p.relative_to(run).parts[0] not in left_out]
    return {str(p.relative_to(run)): p.read_bytes() for p in files}


FEW = """
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for epoch in range(int(sys.argv[1])):
    for (x,) in loader:
        model(x).sum().backward()
        optimizer.step()
    print("epoch", epoch)
"""


def test_a_resume_that_finds_nothing_to_do_leaves_the_record_alone(run, engine, monkeypatch, capfd):
    ran = run(FEW, args=("1",), workers=1, mode="asp", threads=1)
    jobs.write_last(ran.run, ran.status, ran.run.read_job(), ())
    monkeypatch.setattr(jobs, "LocalEngine", lambda program: engine)
    before = record_of(ran.run.path)
    assert "report.html" in before
    with Progress(quiet=True) as progress:
        status = jobs.resume_run(ran.run, {}, progress=progress)
    assert status.state == "succeeded" and status.version == ran.status.version == 2
    assert record_of(ran.run.path) == before
    said = " ".join("".join(capfd.readouterr()).split())
    assert "nothing was left to do: the script made no step. The run's record is as it was before" in said

    # With more epochs there is something to do, and the record says what the script got.
    status = jobs.resume_run(ran.run, {"args": ("2",)})
    assert status.version == 4
    record = ran.run.record()
    assert record["job"]["args"] == ["2"] and record["resumes"][0]["job"]["args"] == ["1"]
    assert [e["now"] for e in ran.run.read_events() if e["kind"] == "arguments"] == [["2"]]
    assert not (ran.run.path / ".before-resume").exists()
