"""Workers in groups: `allreduce`, and `hybrid:MODE` with a mode between the groups."""

import json
import os
import signal
from typing import Any

import pytest
import torch

from paceline.api import resume_run, run_job
from paceline.api.jobs import latest_checkpoint
from paceline.control import find_run
from paceline.plan import Job
from paceline.storage import checkpoint as checkpoints
from tests.integration.conftest import PRELUDE
from tests.integration.test_checkpoints import TRAIN, died_at, everything, train
from tests.integration.test_cuda import SOURCE as CUDA
from tests.integration.test_equivalence import (
    SOURCE,
    assert_close,
    assert_same_bits,
    one_thread,  # noqa: F401 - used by every test
    plain,
    with_state,
)
from tests.speed import first


def go(run: Any, mode: str, *, workers: int, job: dict[str, Any] | None = None, **options: Any) -> Any:
    settings = {"mode": mode, "servers": 1, "threads": 1, **(job or {})}
    ran = run(SOURCE, workers=workers, args=(json.dumps({"single": True, **options}),), **settings)
    assert ran.error is None
    return ran


# --- allreduce and one process -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "workers, shuffle", first(1, [(3, True), (2, False)], ids=["3-shuffled", "2-in-order"])
)
@pytest.mark.parametrize("optimizer", first(1, ["momentum", "adam"]))
def test_allreduce_equals_one_process_with_the_joint_batch(run, optimizer, workers, shuffle):
    """55 steps, a short last row in every epoch: to 1e-10 (float64); and bsp, to the bit."""
    options = {"optimizer": optimizer, "batch": 12 // workers, "shuffle": shuffle}
    ran = go(run, "allreduce", workers=workers, **options)
    sizes = [ran.results()[rank]["sizes"] for rank in range(workers)]
    assert all(len(s) == 55 for s in sizes) and sum(map(sum, sizes)) == 5 * 125
    assert_close(ran.model, plain(optimizer, batch=12, shuffle=shuffle)[0])
    assert ran.status.samples == 5 * 125
    bsp = go(run, "bsp", workers=workers, **options)
    assert_same_bits(with_state(ran), with_state(bsp))


def test_allreduce_over_tcp_equals_one_process(run):
    """gloo's ring sums in its own order."""
    ran = go(run, "allreduce", workers=3, optimizer="adam", batch=4, job={"link": "tcp"})
    assert_close(ran.model, plain("adam", batch=12)[0])
    assert ran.status.samples == 5 * 125


@pytest.mark.parametrize("link", first(1, ["shm", "tcp"]))
def test_a_row_with_fewer_samples_than_workers_still_equals_one_process(run, link):
    """61 = 5 · 12 + 1: worker 0 has the last sample; the others step with it, and count for nothing."""
    options = {"optimizer": "momentum", "batch": 4, "samples": 61, "epochs": 4}
    ran = go(run, "allreduce", workers=3, **options, job={"link": link})
    assert [len(ran.results()[r]["sizes"]) for r in range(3)] == [24, 24, 24]
    assert ran.status.samples == 4 * 61
    assert [(a["applied"], a["unused"]) for a in ran.status.leases[:4]] == [(61, 0)] * 4
    assert_close(ran.model, plain("momentum", batch=12, samples=61, epochs=4)[0])
    if link == "shm":
        bsp = go(run, "bsp", workers=3, **options)
        assert_same_bits(with_state(ran), with_state(bsp))


def test_a_model_of_many_slices_and_dtypes_is_averaged_to_the_bit(run):
    options = {"optimizer": "adamw", "hidden": 700, "samples": 33, "epochs": 2, "batch": 6}
    ran = go(run, "allreduce", workers=2, **options)
    bsp = go(run, "bsp", workers=2, **options)
    assert_same_bits(with_state(ran), with_state(bsp))


# --- hybrid ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", first(1, ["momentum", "adam"]))
@pytest.mark.parametrize("inner", first(1, ["asp", "bsp"]))
def test_hybrid_with_one_group_is_allreduce_to_the_bit(run, inner, optimizer):
    options = {"optimizer": optimizer, "batch": 6, "epochs": 3, "shuffle": True}
    alone = go(run, "allreduce", workers=2, **options)
    grouped = go(run, f"hybrid:{inner}", workers=2, **options)
    assert_same_bits(with_state(grouped), with_state(alone))


@pytest.mark.parametrize("workers, groups, link", first(1, [(3, 2, "tcp"), (4, 2, "shm"), (3, 3, "shm")]))
def test_hybrid_bsp_equals_bsp(run, workers, groups, link):
    options = {"optimizer": "adam", "batch": 3, "epochs": 3, "shuffle": True, "samples": 61}
    job = {"link": link, "servers": 2}
    grouped = go(run, "hybrid:bsp", workers=workers, **options, job={**job, "groups": groups})
    single = go(run, "bsp", workers=workers, **options, job=job)
    assert_close(grouped.model, single.model)
    assert grouped.status.samples == single.status.samples == 3 * 61


# --- every mode between groups ---------------------------------------------------------------------------

LOOP = """
import hashlib, time
o = {"epochs": 2, "samples": 50, "batch": 3, "optimizer": "sgd", "every": 1, "stop": None, "nan": None,
     "readers": 0, "drop_last": False}
o |= json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
torch.set_num_threads(1)
torch.manual_seed(RANK)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
optimizer = (torch.optim.SGD(model.parameters(), lr=0.05) if o["optimizer"] == "sgd"
             else torch.optim.Adam(model.parameters(), lr=0.01))
x = torch.randn(o["samples"], 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
data = TensorDataset(x, (x[:, 0] > 0).long(), torch.arange(o["samples"]))
loader = DataLoader(data, batch_size=o["batch"], shuffle=True, num_workers=o["readers"],
                    drop_last=o["drop_last"])
model, optimizer, loader = paceline.prepare(model, optimizer, loader)

def whole(values):
    with torch.no_grad():
        return nn.functional.cross_entropy(values(x), (x[:, 0] > 0).long()).item()

def fingerprint():
    parts = [p.detach().numpy().tobytes() for p in model.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()

before, seen, marks, steps = whole(model), [], [], 0
for epoch in range(o["epochs"]):
    for i, (inputs, labels, ids) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        if [RANK, steps] == o["nan"]:
            loss = loss * float("nan")
        (loss / o["every"]).backward()
        seen.append([epoch, ids.tolist()])
        if (i + 1) % o["every"] == 0:
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            marks.append(fingerprint())
        if o["stop"] is not None and i + 1 == o["stop"]:
            break
result({"before": before, "after": whole(model), "seen": seen, "marks": marks, "steps": steps})
"""

MODES = ["backup:1", "ssp:1", "asp", "asp+quorum=2", "asp+damping=dc", "ssp:2+period=2", "downpour:2,2"]
MODES += ["easgd:2", "eamsgd:2", "local:2", "diloco:2"]


def loop(run: Any, mode: str, *, workers: int = 4, groups: int | None = None, **more: Any) -> Any:
    options = {k: more.pop(k) for k in list(more) if k not in ("link", "servers", "resume", "deadline_s")}
    return run(
        LOOP, mode=mode, workers=workers, groups=groups, threads=1, args=(json.dumps(options),), **more
    )


def assert_groups_agree(ran: Any, *groups: tuple[int, ...]) -> None:
    """After every step all members of a group have the same parameters, to the bit."""
    for group in groups:
        marks = [ran.results()[rank]["marks"] for rank in group]
        assert marks[0] and all(m == marks[0] for m in marks[1:])


@pytest.mark.parametrize("mode", first(3, MODES))
def test_every_mode_between_groups_counts_exactly_and_keeps_groups_together(run, mode):
    """Two groups of two (backup: three of one and two), 50 samples that divide into neither."""
    workers, groups = (5, 3) if mode == "backup:1" else (4, 2)
    ran = loop(run, f"hybrid:{mode}", workers=workers, groups=groups, servers=2, epochs=3)
    assert ran.error is None
    accounts = ran.status.leases[:3]
    assert [(a["applied"], a["refused"], a["unused"]) for a in accounts] == [(50, 0, 0)] * 3
    if mode == "backup:1":
        assert_groups_agree(ran, (0, 1), (2, 3), (4,))
    else:
        assert_groups_agree(ran, (0, 1), (2, 3))
    result = ran.results()[0]
    assert result["after"] < result["before"]


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_hybrid_asp_reads_every_sample_and_groups_go_at_their_own_pace(run, link):
    ran = loop(run, "hybrid:asp", workers=4, groups=2, link=link, samples=48, epochs=2)
    assert ran.error is None and ran.status.samples == 96
    for epoch in range(2):
        ids = [i for r in ran.results().values() for e, part in r["seen"] if e == epoch for i in part]
        assert sorted(ids) == list(range(48))
    assert_groups_agree(ran, (0, 1), (2, 3))


def test_hybrid_easgd_over_tcp_keeps_groups_together(run):
    ran = loop(run, "hybrid:easgd:2", workers=4, groups=2, link="tcp", epochs=2)
    assert ran.error is None and ran.status.samples == 100
    assert_groups_agree(ran, (0, 1), (2, 3))


def test_hybrid_with_compressed_gradients(run):
    """Only the root's push is compressed; inside the group nothing is."""
    job = {"mode": "hybrid:asp", "workers": 4, "groups": 2, "threads": 1, "compress": "fp16"}
    ran = run(LOOP, **job, args=(json.dumps({"epochs": 1}),))
    assert ran.error is None and ran.status.samples == 50
    assert_groups_agree(ran, (0, 1), (2, 3))


# --- what scripts do -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode, groups", [("allreduce", None), ("hybrid:asp", 2), ("hybrid:bsp", 2)])
@pytest.mark.parametrize("samples", first(1, [53, 17, 50]))
def test_every_sample_is_used_exactly_once_an_epoch(run, mode, groups, samples):
    """Whatever the sizes; where a row is shorter than its group, some are read twice, and count once."""
    ran = loop(run, mode, workers=3, groups=groups, samples=samples, epochs=2)
    assert ran.error is None
    assert ran.status.samples == 2 * samples
    assert [(a["applied"], a["unused"]) for a in ran.status.leases[:2]] == [(samples, 0)] * 2
    for epoch in range(2):
        ids = [i for r in ran.results().values() for e, part in r["seen"] if e == epoch for i in part]
        assert set(ids) == set(range(samples)) and len(ids) <= samples + 4


def test_drop_last_leaves_a_short_row_out(run):
    ran = loop(run, "allreduce", workers=3, samples=50, drop_last=True)
    assert ran.error is None
    assert [(a["applied"], a["unused"]) for a in ran.status.leases[:2]] == [(45, 5)] * 2


@pytest.mark.parametrize("readers", first(1, [2, 0]))
@pytest.mark.parametrize(
    "mode, groups", first(1, [("hybrid:local:2", 2), ("allreduce", None), ("hybrid:asp", 2)])
)
def test_leaving_the_loop_early(run, mode, groups, readers):
    """After 2 of 5 batches of an epoch; with loader processes, members read ahead by different amounts."""
    ran = loop(run, mode, workers=4, groups=groups, samples=60, epochs=3, stop=2, readers=readers)
    assert ran.error is None
    assert [(a["applied"], a["unused"]) for a in ran.status.leases[:2]] == [(24, 36)] * 2
    assert_groups_agree(ran, *([(0, 1, 2, 3)] if groups is None else [(0, 1), (2, 3)]))


@pytest.mark.parametrize("mode, groups", [("allreduce", None), ("hybrid:bsp", 2)])
def test_accumulating_over_batches(run, mode, groups):
    """3 of the 5 rows of an epoch in a step, the other two in the first one of the next."""
    ran = loop(run, mode, workers=4, groups=groups, samples=60, epochs=3, every=3)
    assert ran.error is None
    assert [ran.results()[r]["steps"] for r in range(4)] == [3] * 4
    assert ran.status.samples == 60 + 60 + 36
    assert_groups_agree(ran, *([(0, 1, 2, 3)] if groups is None else [(0, 1), (2, 3)]))


SCHEDULED = (
    LOOP.split("before, seen", 1)[0].replace(
        "model, optimizer, loader = paceline.prepare(model, optimizer, loader)",
        "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)\n"
        "model, optimizer, loader, scheduler = paceline.prepare(model, optimizer, loader, scheduler)",
    )
    + """
rates, marks = [], []
for epoch in range(2):
    model.train()
    for inputs, labels, ids in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
        marks.append(fingerprint())
    model.eval()
    if paceline.is_main():
        whole(model)  # the others wait meanwhile
result({"rates": rates, "marks": marks, "settings": optimizer.state_dict()["param_groups"][0]["lr"]})
"""
)


@pytest.mark.parametrize(
    "mode, groups", first(1, [("hybrid:asp", 2), ("allreduce", None), ("hybrid:local:2", 2)])
)
def test_schedulers_clipping_and_evaluation_on_one_worker(run, mode, groups):
    ran = run(SCHEDULED, mode=mode, workers=4, groups=groups, threads=1)
    assert ran.error is None and ran.status.samples == 100
    for rank in range(4):
        found = ran.results()[rank]
        curve = [0.05 * 0.5 ** ((n + 1) // 2) for n in range(50)]
        if mode == "hybrid:asp":  # schedules follow the run, and a group is at one place
            assert found["rates"] == ran.results()[rank // 2 * 2]["rates"]
            assert found["rates"] == sorted(found["rates"], reverse=True) and set(found["rates"]) <= {*curve}
            assert found["rates"][-1] < 0.05
        else:
            assert found["rates"] == curve[: len(found["rates"])]
        assert found["settings"] == found["rates"][-1]
    assert_groups_agree(ran, *([(0, 1, 2, 3)] if groups is None else [(0, 1), (2, 3)]))


STATE = (
    LOOP.split("before, seen", 1)[0]
    + """
import copy

def epoch():
    for inputs, labels, ids in loader:
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

epoch()
kept = {k: v.clone() for k, v in model.state_dict().items()}
state = copy.deepcopy(optimizer.state_dict())
epoch()
moved = fingerprint()
model.load_state_dict(kept)
optimizer.load_state_dict(state)
again = fingerprint()
assert again != moved
assert all(torch.equal(a, kept[k]) for k, a in model.state_dict().items())
steps = {float(s["step"]) for s in optimizer.state_dict()["state"].values()}
with torch.no_grad():
    for p in model.parameters():
        p.fill_(0.25 + RANK)  # the root's values count
paceline.assign()
assigned = {p.flatten()[0].item() for p in model.parameters()}
epoch()
result({"again": again, "steps": sorted(steps), "assigned": sorted(assigned), "marks": [fingerprint()]})
"""
)


@pytest.mark.parametrize("link", first(1, ["shm", "tcp"]))
@pytest.mark.parametrize("mode, groups", [("allreduce", None), ("hybrid:bsp", 2)])
def test_state_is_read_and_loaded_and_parameters_assigned(run, mode, groups, link):
    options = json.dumps({"samples": 24, "batch": 2, "optimizer": "adam"})
    ran = run(STATE, mode=mode, workers=4, groups=groups, threads=1, args=(options,), link=link)
    assert ran.error is None
    found = ran.results()
    assert len({r["again"] for r in found.values()}) == 1
    assert all(r["steps"] == [3.0] for r in found.values())
    assert all(r["assigned"] == [0.25] for r in found.values())
    assert_groups_agree(ran, (0, 1, 2, 3))
    assert set(ran.model) == {"0.weight", "0.bias", "2.weight", "2.bias"}


NO_LOADER = (
    LOOP.split("data = TensorDataset", 1)[0]
    + """
model, optimizer = paceline.prepare(model, optimizer)
for i in range(6):
    mine = x[RANK :: paceline.world_size()]
    optimizer.zero_grad()
    loss = model[2](model[0](mine)).square().mean() if i % 2 else model[2](x[:2, :1].repeat(1, 8)).sum()
    loss.backward()
    optimizer.step()
result([p.detach().flatten().tolist() for p in model.parameters()])
"""
)


def test_without_a_loader_and_with_tensors_that_get_no_gradient(run):
    """Each second step leaves the first layer out, on all workers: there it keeps its momentum still."""
    options = (json.dumps({"samples": 12, "optimizer": "adam"}),)
    plain_, grouped = (
        run(NO_LOADER, mode=mode, workers=2, threads=1, args=options) for mode in ("bsp", "allreduce")
    )
    assert plain_.error is None and grouped.error is None
    assert grouped.results()[0] == grouped.results()[1] == plain_.results()[0]


SOME = NO_LOADER.replace("if i % 2 else", "if i % 2 == RANK else")


@pytest.mark.slow
def test_a_tensor_with_a_gradient_on_one_worker_only(run):
    options = (json.dumps({"samples": 12, "optimizer": "adam"}),)
    for link in ("shm", "tcp"):
        plain_, grouped = (
            run(SOME, mode=mode, workers=2, threads=1, args=options, link=link)
            for mode in ("bsp", "allreduce")
        )
        assert plain_.error is None and grouped.error is None
        assert grouped.results()[0] == grouped.results()[1] == plain_.results()[0]


STREAM = (
    LOOP.split("data = TensorDataset", 1)[0]
    + """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([(x[i], i) for i in range(o["samples"])])

model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(Stream(), batch_size=o["batch"]))
seen = []
for epoch in range(2):
    for inputs, ids in loader:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        seen.append(ids.tolist())
result({"seen": seen, "parameters": [p.detach().flatten().tolist() for p in model.parameters()]})
"""
)


@pytest.mark.parametrize("samples", first(1, [41, 38, 36]))
def test_streams(run, samples):
    """Worker r of 3 reads batches r, r+3, …; the last ones may not reach all of a group."""
    options = (json.dumps({"samples": samples}),)
    single, grouped, hybrid = (
        run(STREAM, mode=mode, workers=3, threads=1, args=options, groups=groups)
        for mode, groups in [("bsp", None), ("allreduce", None), ("hybrid:bsp", 2)]
    )
    for ran in (single, grouped, hybrid):
        assert ran.error is None
        assert ran.status.samples == 2 * samples
    assert grouped.results()[0]["parameters"] == single.results()[0]["parameters"]
    values = torch.tensor([v for p in hybrid.results()[2]["parameters"] for v in p])
    expected = torch.tensor([v for p in single.results()[0]["parameters"] for v in p])
    assert (values - expected).abs().max() < 1e-10


# --- NaN -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", first(1, ["shm", "tcp"]))
@pytest.mark.parametrize("mode", first(2, ["allreduce", "hybrid:asp", "hybrid:bsp", "hybrid:local:2"]))
def test_nan_on_one_member_voids_its_groups_step_once(run, mode, link):
    groups = None if mode == "allreduce" else 2
    ran = loop(run, mode, workers=4, groups=groups, samples=60, epochs=2, nan=[1, 1], link=link)
    assert ran.error is None
    assert ran.status.refused == 1
    row = 12 if groups is None else 6
    applied = [(a["applied"], a["refused"]) for a in ran.status.leases[:2]]
    if mode == "hybrid:asp":  # there the other group may do so much of the first epoch that it is in the next
        applied.sort()
    assert applied == [(60 - row, row), (60, 0)]
    assert ran.status.samples == 120 - row
    assert_groups_agree(ran, *([(0, 1, 2, 3)] if groups is None else [(0, 1), (2, 3)]))
    first = ran.results()[0]
    assert first["after"] < first["before"]
    if mode in ("allreduce", "hybrid:local:2"):
        assert first["marks"][0] == first["marks"][1]


# --- checkpoints -----------------------------------------------------------------------------------------


def test_a_checkpoint_of_allreduce_holds_what_one_of_bsp_does(run, tmp_path):
    """Every worker sends its part by itself, of the step that the checkpoint is cut after."""
    ran = train(run, job={"mode": "allreduce", "checkpoint_every": 3})
    assert ran.error is None
    assert ran.status.checkpoints == [f"version-{v:012d}" for v in range(3, 25, 3)]
    found = checkpoints.latest(died_at(ran, 9, tmp_path / "dead").run.checkpoints_path)
    assert found.meta["lead"]["samples"] == 44 + 24
    for rank in range(2):
        part = found.tensors(f"worker-{rank}.safetensors")
        assert part["buffer:1.num_batches_tracked"].item() == 9
        assert json.loads(bytes(part["user:scheduler:0"].tolist()))["last_epoch"] == 9
        # All workers have the same optimizer state: one keeps it.
        assert any(key.startswith("inner:") for key in part) == (rank == 0)


@pytest.mark.parametrize("link", first(1, ["shm", "tcp"]))
@pytest.mark.parametrize(
    "mode, workers, groups", first(1, [("hybrid:bsp", 3, 2), ("allreduce", 2, None), ("hybrid:bsp", 2, 1)])
)
def test_resuming_equals_not_having_stopped_to_the_bit(run, tmp_path, mode, workers, groups, link):
    """In the middle of an epoch and at its end; BatchNorm, dropout, all random numbers, schedulers."""
    job = {"mode": mode, "workers": workers, "groups": groups, "link": link}
    whole = train(run, job={**job, "checkpoint_every": 3})
    assert whole.error is None
    last = whole.status.version
    for version in (3, 6):
        dead = died_at(whole, version, tmp_path / f"dead{version}")
        ran = train(run, resume=dead, job=job)
        assert ran.error is None and ran.status.version == last
        for rank in range(workers):
            mine, theirs = ran.results()[rank], whole.results()[rank]
            assert mine["losses"] == theirs["losses"][version:]
            assert mine["seen"] == theirs["seen"][version:]
        assert_same_bits(everything(ran), everything(whole))
        assert [a["applied"] for a in ran.status.leases[:4]] == [44] * 4


@pytest.mark.parametrize("then", first(1, ["bsp", "allreduce"]))
def test_bsp_and_allreduce_go_on_from_each_others_checkpoints(run, tmp_path, then):
    """The optimizer's state moves from the servers to the workers, or back: the same bits either way."""
    first = "allreduce" if then == "bsp" else "bsp"
    options = {"optimizer": "adam"}
    whole = train(run, job={"mode": first, "checkpoint_every": 3}, **options)
    assert whole.error is None
    ran = train(run, resume=died_at(whole, 9, tmp_path / "dead"), job={"mode": then}, **options)
    assert ran.error is None and ran.status.version == 24
    for rank in range(2):
        assert ran.results()[rank]["losses"] == whole.results()[rank]["losses"][9:]
    assert_same_bits(with_state(ran), with_state(whole))


@pytest.mark.parametrize("workers", first(1, [3, 1]))
def test_resuming_allreduce_with_other_workers(run, tmp_path, workers):
    """New workers take worker 0's optimizer state, so that all have the same."""
    whole = train(run, job={"mode": "allreduce", "checkpoint_every": 3}, optimizer="adam")
    dead = died_at(whole, 9, tmp_path / "dead")
    ran = train(run, resume=dead, job={"mode": "allreduce", "workers": workers}, optimizer="adam")
    assert ran.error is None
    assert [a["applied"] for a in ran.status.leases[:4]] == [44] * 4
    bsp = train(
        run,
        resume=died_at(whole, 9, tmp_path / "dead again"),
        job={"mode": "bsp", "workers": workers},
        optimizer="adam",
    )
    assert_same_bits(with_state(ran), with_state(bsp))


def test_a_finished_run_is_resumed_to_the_same_end(run):
    whole = train(run, job={"mode": "allreduce"})
    before = everything(whole)
    ran = train(run, resume=whole, job={"mode": "allreduce"})
    assert ran.error is None and ran.status.version == 24
    assert_same_bits(everything(ran), before)


@pytest.mark.slow
def test_a_hybrid_run_is_resumed_in_a_mode_without_groups(tmp_path, monkeypatch):
    """Its groups were the old mode's: they need not be taken back by hand."""
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path))
    monkeypatch.setenv("TEST_RUN_DIR", str(tmp_path / "run"))
    script = tmp_path / "script.py"
    script.write_text(PRELUDE + TRAIN)
    args = (json.dumps({"epochs": 1}),)
    job = Job(
        script=str(script), args=args, workers=2, groups=2, mode="hybrid:asp", run_dir=str(tmp_path / "run")
    )
    assert run_job(job).error is None
    status = resume_run(find_run(str(tmp_path / "run")), {"mode": "bsp"})
    assert status.error is None and status.state == "succeeded"


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_that_resumes_to_the_same_bits(run, tmp_path):
    job = {"mode": "allreduce"}
    stopping: list[int] = []

    def watch(status: Any, lines: list[str], engine: Any) -> None:
        if status.version >= 5 and not stopping:
            stopping.append(status.version)
            os.kill(os.getpid(), signal.SIGINT)

    stopped = run(
        TRAIN,
        args=(json.dumps({"spin": 0.05}),),
        workers=2,
        threads=1,
        watch=watch,
        keep_checkpoints=50,
        **job,
    )
    assert stopped.status.state == "stopped"
    version = latest_checkpoint(stopped.run).version
    assert 5 <= version < 24
    whole = train(run, job=job)
    ran = train(run, resume=stopped, job=job)
    assert ran.error is None
    assert ran.results()[1]["losses"] == whole.results()[1]["losses"][version:]
    assert_same_bits(everything(ran), everything(whole))


# --- faults ----------------------------------------------------------------------------------------------

TOGETHER = """
import time
def prepared(samples=48, batch_size=4):
    torch.manual_seed(RANK)
    model = nn.Linear(4, 2)
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, torch.arange(samples) % 2), batch_size=batch_size, shuffle=True)
    return paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)

def train(objects, epochs=2, at_step=lambda step: None):
    model, optimizer, loader = objects
    step = 0
    for epoch in range(epochs):
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            at_step(step)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
"""


@pytest.mark.parametrize("link", first(1, ["shm", "tcp"]))
@pytest.mark.parametrize("mode, rank", first(1, [("allreduce", 2), ("allreduce", 0), ("hybrid:asp", 3)]))
def test_a_member_that_is_killed_again_and_again_ends_the_run_with_its_name(run, mode, rank, link):
    source = (
        TOGETHER
        + f"train(prepared(), at_step=lambda s: (RANK, s) == ({rank}, 2) and os.kill(os.getpid(), 9))"
    )
    groups = None if mode == "allreduce" else 2
    ran = run(source, workers=4, mode=mode, groups=groups, link=link, threads=1, max_restarts=1)
    mates = "worker:0, worker:1, worker:2, worker:3" if groups is None else "worker:2, worker:3"
    assert ran.status.state == "failed" and ran.status.restarts == 0
    lost = f"was killed by SIGKILL, and its group ({mates}) cannot go on without it"
    assert any(m.startswith(f"worker:{rank} {lost}") for m in ran.status.messages)
    assert ran.error.startswith(f"worker:{rank}: {lost} after 1 restart, and --max-restarts is 1.")
    assert "\n" not in ran.error


def test_an_error_in_one_members_script_is_the_error_that_is_shown(run):
    source = TOGETHER + "train(prepared(), at_step=lambda s: 1 / 0 if (RANK, s) == (1, 2) else None)"
    ran = run(source, workers=3, mode="allreduce", threads=1)
    assert ran.error.startswith("worker:1: ZeroDivisionError")


@pytest.mark.slow
def test_a_member_that_hangs_is_named_when_the_deadline_is_over(run):
    source = (
        TOGETHER
        + """
os.mkfifo(RUN_DIR / f"never{RANK}")
train(prepared(), at_step=lambda s: (RANK, s) == (1, 2) and os.open(RUN_DIR / f"never{RANK}", os.O_RDONLY))
"""
    )
    ran = run(source, workers=3, mode="allreduce", threads=1, deadline_s=2.0)
    assert ran.error.startswith("worker:0: ") and "DeadlineError" in ran.error
    assert "worker:1 did not come to the group of worker:0, worker:1, worker:2" in ran.error
    assert "2 s (--deadline)" in ran.error


def test_scripts_that_part_ways_are_told_who_does_what(run):
    """At once, and not when the deadline is over."""
    what = "if RANK == 1: objects[1].load_state_dict(objects[1].state_dict())\ntrain(objects)"
    ran = run(TOGETHER + f"objects = prepared()\n{what}\n", workers=2, mode="allreduce", threads=1)
    assert ran.status.state == "failed"
    assert "worker:0 calls optimizer.step() while worker:1 loads an optimizer state" in ran.error
    assert "Check what in the script depends on the rank" in ran.error


@pytest.mark.parametrize(
    "what, said",
    [
        ("train(objects, epochs=2 - (RANK == 1))", "worker:0 calls optimizer.step()"),
        (
            "train(objects)\nif RANK == 0: objects[0].load_state_dict(objects[0].state_dict())",
            "worker:0 assigns its model's parameters",
        ),
    ],
)
def test_a_script_that_ends_before_the_others_of_its_group_ends_them_in_order(run, what, said):
    ran = run(TOGETHER + f"objects = prepared()\n{what}\n", workers=2, mode="allreduce", threads=1)
    assert ran.error is None and ran.status.state == "succeeded"
    assert any(m.startswith(f"worker:1 ended its script while {said}, and the") for m in ran.status.messages)
    assert ran.model


def test_a_data_set_that_is_too_small_is_refused(run):
    ran = run(TOGETHER + "train(prepared(samples=3))", workers=4, mode="hybrid:asp", groups=2, threads=1)
    assert "4 workers but only 3 samples" in ran.error


def test_one_worker_may_be_a_group_of_its_own(run):
    ran = run(TOGETHER + "train(prepared())", workers=1, mode="allreduce", threads=1)
    assert ran.error is None and ran.status.samples == 96


# --- on a GPU --------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("link", ["shm", "tcp"])
@pytest.mark.parametrize("mode", ["allreduce", "hybrid:bsp", "hybrid:local:2", "hybrid:eamsgd:2"])
def test_a_model_on_the_gpu_trains_like_one_on_the_cpu(run, mode, link):
    job = {"workers": 2, "mode": mode, "link": link, "threads": 1, "checkpoint_every": 3}
    gpu, cpu = (run(f"DEVICE = '{device}'{CUDA}", **job) for device in ("cuda", "cpu"))
    assert gpu.error is None and cpu.error is None
    assert gpu.status.samples == cpu.status.samples == 3 * 64
    for name, value in cpu.model.items():
        torch.testing.assert_close(gpu.model[name], value, rtol=1e-4, atol=1e-5)
    assert gpu.results()[0] == gpu.results()[1]
