"""What a run says it did is what its script counted: steps, samples a second and bytes, in every mode."""

import csv
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.collective import ring_bytes
from paceline.core.modes import parse_mode
from paceline.observe import RunStatus
from paceline.observe.record.pace import pace_of
from tests.speed import first

SOURCE = """
import time
SAMPLES, BATCH, EPOCHS = 96, 4, 3
book = RUN_DIR / "account"
book.mkdir(exist_ok=True)
lines = (book / f"{RANK}.{len(list(book.iterdir()))}.{os.getpid()}").open("w", buffering=1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(15, 32, bias=False), nn.Tanh(), nn.Linear(32, 3, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(SAMPLES, 15), torch.randint(0, 3, (SAMPLES,)))
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(data, batch_size=BATCH))
die_at = int(sys.argv[1]) if len(sys.argv) > 1 and RANK == 1 and not (RUN_DIR / "died").exists() else 0
steps = 0
for epoch in range(EPOCHS):
    batches = iter(loader)
    while True:
        begins = time.perf_counter()
        try:
            x, y = next(batches)
        except StopIteration:
            break
        time.sleep(0.03 if RANK == 1 else 0.01)  # what a real model computes
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        lines.write(f"{begins} {time.perf_counter()} {len(x)}\\n")
        steps += 1
        if steps == die_at:
            (RUN_DIR / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""
SIZE = 4 * (15 * 32 + 32 * 3)
SAMPLES, EPOCHS = 96, 3

ROUNDS = ["bsp", "backup:1", "allreduce", "local:4", "diloco:8"]
FREE = [
    "asp",
    "ssp:2",
    "downpour:2,2",
    "easgd:4",
    "eamsgd:4",
    "hogwild",
    "dogwild",
    "hybrid:asp",
    "hybrid:bsp",
]


def accounts(path: Path, *, after: int = 0) -> SimpleNamespace:
    """What the scripts wrote down, of processes from the so manieth on."""
    steps: Counter[int] = Counter()
    begins, ends, samples, processes = [], [], 0, 0
    for file in path.glob("account/*"):
        rank, number, _ = file.name.split(".")
        rows = [line.split() for line in file.read_text().splitlines()]
        processes += 1
        if not rows or int(number) < after:
            continue
        steps[int(rank)] += len(rows)
        begins.append(float(rows[0][0]))
        ends.append(float(rows[-1][1]))
        samples += sum(int(row[2]) for row in rows)
    seconds = max(ends) - min(begins)
    return SimpleNamespace(steps=dict(steps), seconds=seconds, samples=samples, processes=processes)


def pushes(path: Path) -> Counter[int]:
    with (path / "pushes.csv").open() as file:
        return Counter(int(row["worker"]) for row in csv.DictReader(file))


def expected_bytes(mode: str, steps: int, pushed: int, *, root: bool, members: int) -> tuple[int, int]:
    """Out and in, from the size of the model and how often the worker stepped or pushed."""
    spec = parse_mode(mode)
    around = steps * ring_bytes(SIZE, members)
    if mode == "allreduce":
        return around, around
    if spec.inner is not None:
        shared = steps * SIZE
        return (
            (around + (members - 1) * shared + shared, around + shared) if root else (around, around + shared)
        )
    each = steps if spec.push_every == 1 and mode != "dogwild" else pushed
    return each * SIZE, each * SIZE


def agree(ran, mode: str, *, workers: int, members: int = 1, exact: bool = True) -> None:
    assert ran.error is None, ran.error
    path, status = ran.run.path, ran.status
    mine = accounts(path)
    assert status.told_all and status.samples == EPOCHS * SAMPLES
    assert status.samples_per_s == pytest.approx(EPOCHS * SAMPLES / mine.seconds, rel=0.03)
    assert {rank: worker.clock for rank, worker in status.workers.items()} == mine.steps
    assert status.steps_per_s == pytest.approx(sum(mine.steps.values()) / mine.seconds, rel=0.03)
    counted = pushes(path)
    for rank, worker in status.workers.items():
        out, back = expected_bytes(
            mode, mine.steps[rank], counted[rank], root=rank % members == 0, members=members
        )
        assert (worker.moved_out, worker.moved_in) == (out, back), rank
        assert worker.bytes_out == worker.bytes_in == 0 or ran.run.read_job().link == "tcp"
    # The same everywhere, and of the end.
    kept = RunStatus.from_json(ran.run.read_status())
    assert (kept.samples_per_s, kept.version, kept.steps) == (
        status.samples_per_s,
        status.version,
        status.steps,
    )
    updates = {server.updates for server in status.servers.values()}
    assert mode in ("hogwild", "allreduce") or updates == {status.version}
    assert not (path / "raw").exists()


@pytest.mark.parametrize(
    "mode", first(1, ["asp", "local:4", *[m for m in ROUNDS + FREE if m not in ("asp", "local:4")]])
)
def test_a_run(run, mode):
    members = 2 if parse_mode(mode).grouped else 1
    groups = {"groups": 2} if mode.startswith("hybrid") else {}
    workers = 4 if groups else (2 if members == 2 else 3)
    ran = run(SOURCE, workers=workers, mode=mode, threads=1, spans=False, **groups)
    agree(ran, mode, workers=workers, members=members)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bsp", "asp", "local:4", "allreduce"])
def test_over_tcp_logical_bytes_are_the_same(run, mode):
    members = 2 if mode == "allreduce" else 1
    ran = run(SOURCE, workers=2, servers=2, mode=mode, threads=1, link="tcp")
    agree(ran, mode, workers=2, members=members)
    for worker in ran.status.workers.values():
        assert worker.bytes_out >= worker.moved_out and worker.bytes_in >= worker.moved_in


@pytest.mark.parametrize("mode", first(1, ["local:4", "bsp", "asp", "ssp:2", "easgd:4", "hogwild"]))
def test_with_a_worker_killed(run, mode):
    ran = run(SOURCE, args=("6",), workers=2, mode=mode, threads=1, spans=False)
    assert ran.status.restarts == 1
    agree(ran, mode, workers=2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["allreduce", "hybrid:bsp"])
def test_when_the_run_goes_back_to_a_checkpoint(run, mode):
    """Steps that were lost were made all the same, and their time has passed; their samples count once."""
    ran = run(SOURCE, args=("8",), workers=2, mode=mode, checkpoint_every=5, threads=1)
    assert ran.error is None and ran.status.lost_updates
    status, mine = ran.status, accounts(ran.run.path)
    assert status.samples == EPOCHS * SAMPLES < mine.samples
    assert status.samples_per_s == pytest.approx(EPOCHS * SAMPLES / mine.seconds, rel=0.03)
    assert status.workers[1].clock == mine.steps[1]
    # worker:0 was killed from outside, perhaps between the end of a step and its script's next line.
    assert status.workers[0].clock - mine.steps[0] in (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("modes", [("bsp", "asp"), ("asp", "bsp"), ("ssp:2", "asp")])
def test_with_a_switch(run, modes):
    before, after = modes
    ran = run(SOURCE, workers=2, mode=before, schedule=(f"20={after}",), threads=1)
    assert ran.status.mode == after
    agree(ran, after, workers=2)


@pytest.mark.parametrize("mode", first(1, ["asp", "bsp", "local:4", "allreduce", "hogwild"]))
def test_with_a_resume(run, mode):
    members = 2 if mode == "allreduce" else 1
    common = {"workers": 2, "mode": mode, "threads": 1, "spans": False}
    one = run(SOURCE, max_updates=4 if mode == "local:4" else 20, **common)
    assert one.error is None and one.status.ended_early
    path = one.run.path
    before, earlier = accounts(path), pace_of(one.status)
    assert earlier.samples == one.status.samples == before.samples
    shown = []
    two = run(SOURCE, resume=one, watch=lambda status, *_: shown.append(status.samples), **common)
    assert two.error is None, two.error
    assert shown[0] == before.samples, "nothing jumps when the servers come up: it would count as trained"
    status, all_, mine = two.status, accounts(path), accounts(path, after=before.processes)
    assert status.samples == EPOCHS * SAMPLES == all_.samples
    assert {rank: worker.clock for rank, worker in status.workers.items()} == all_.steps
    assert status.samples_per_s == pytest.approx(mine.samples / mine.seconds, rel=0.03)
    total = pace_of(status, total=True)
    assert total.samples_per_s == pytest.approx(all_.samples / (before.seconds + mine.seconds), rel=0.03)
    counted = pushes(path)
    for rank, worker in status.workers.items():
        expected = expected_bytes(mode, all_.steps[rank], counted[rank], root=rank == 0, members=members)
        assert (worker.moved_out, worker.moved_in) == expected
    summary = json.loads((path / "status.json").read_text())
    assert summary["earlier_s"] == pytest.approx(before.seconds, rel=0.03)


@pytest.mark.slow
def test_sandblaster_fetches_once_an_epoch(run):
    ran = run(SOURCE, workers=2, mode="sandblaster", threads=1)
    mine = accounts(ran.run.path)
    assert {rank: worker.clock for rank, worker in ran.status.workers.items()} == mine.steps
    for rank, worker in ran.status.workers.items():
        assert (worker.moved_out, worker.moved_in) == (mine.steps[rank] * SIZE, EPOCHS * SIZE)


@pytest.mark.slow
def test_compressed_gradients_count_as_they_are_written(run):
    ran = run(SOURCE, workers=2, mode="asp", threads=1, compress="fp16")
    mine = accounts(ran.run.path)
    for rank, worker in ran.status.workers.items():
        steps = mine.steps[rank]
        assert (worker.moved_out, worker.moved_in) == (steps * (SIZE // 2 + 2), steps * SIZE)
