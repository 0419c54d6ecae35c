"""What a run leaves to look at: spans that add up, staleness that is right, a diagnosis that is true."""

import json
import os
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import psutil
import pytest

from paceline.observe.analyse.diagnosis import diagnose
from paceline.observe.analyse.facts import facts_of
from paceline.observe.analyse.run_data import RunData
from paceline.observe.record.phase import PHASES, Phase

LOOP = """
import time
torch.manual_seed(0)
SLOW_STEP, SLOW_DATA, WIDE = {step}, {data}, {wide}

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return {samples}
    def __getitem__(self, i):
        if SLOW_DATA:  # sleeping for no time lets others run
            time.sleep(SLOW_DATA)
        return torch.full((8,), float(i)), i % 2

model = nn.Sequential(nn.Linear(8, WIDE), nn.Tanh(), nn.Linear(WIDE, 2))
optimizer = {optimizer}
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(Slow(), batch_size=4))
ends, loss = [], torch.zeros(())
for epoch in range({epochs}):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        if SLOW_STEP and RANK == 1:
            time.sleep(SLOW_STEP)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    paceline.log(loss=loss.item())
result(ends)
"""
SGD = "torch.optim.SGD(model.parameters(), lr=0.01)"
USUAL = {"step": 0.0, "data": 0.0, "wide": 16, "samples": 64, "optimizer": SGD, "epochs": 2}


def loop(**settings):
    return LOOP.format(**{**USUAL, **settings})


def limit_of(ran):
    assert ran.error is None, ran.error
    data = RunData(ran.run.path)
    found = diagnose(facts_of(data), data.status.mode)
    assert data.missing == []
    return found


# --- what limited it ---------------------------------------------------------------------------------------


def test_a_straggler_is_named(run):
    found = limit_of(run(loop(step=0.03), workers=3, mode="bsp", threads=1))
    assert found.limit == "straggler", found
    assert "worker:1 takes" in found.sentence and "its script outside the model" in found.sentence
    assert "asp instead of bsp" in found.advice


def test_a_slow_link_is_named(run, monkeypatch):
    monkeypatch.setenv("PACELINE_LINK_CONDITIONS", "latency=30ms")
    found = limit_of(run(loop(), workers=2, mode="asp", link="tcp", threads=1))
    assert found.limit == "network", found
    assert "--prefetch" in found.advice


SLOW_OPTIMIZER = """
import time, torch
class Slow(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(0.02)
        return super().step(closure)
"""


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_a_slow_server_is_named(run, tmp_path, mode):
    (tmp_path / "slow_optimizer.py").write_text(SLOW_OPTIMIZER)
    source = loop(optimizer="__import__('slow_optimizer').Slow(model.parameters(), lr=0.01)")
    found = limit_of(run(source, workers=2, mode=mode, threads=1, optimizers=("slow_optimizer:Slow",)))
    assert found.limit == "server", found
    assert "server:0 took" in found.sentence and "--servers" in found.advice


def test_slow_data_is_named(run):
    found = limit_of(run(loop(data=0.005), workers=2, mode="bsp", threads=1))
    assert found.limit == "data", found
    assert "num_workers" in found.advice


def test_a_run_that_only_computes_is_bound_by_its_workers(run):
    source = loop(samples=32).replace("SLOW_STEP and RANK == 1", "True").replace("(SLOW_STEP)", "(0.1)")
    found = limit_of(run(source, workers=2, mode="asp", threads=1))
    assert found.limit == "worker", found


# --- adding up ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "bsp"},
        {"mode": "asp", "link": "tcp", "servers": 2},
        {"mode": "local:2"},
        {"mode": "hogwild"},
        {"mode": "allreduce"},
        {"mode": "asp", "link": "tcp", "prefetch": 2, "overlap": True},
        {"mode": "asp", "link": "tcp", "compress": "qsgd:4"},
    ],
    ids=lambda s: "-".join(map(str, s.values())),
)
def test_spans_add_up_to_the_time_of_each_step(run, settings):
    """Against the script's own clock, which knows nothing of spans."""
    ran = run(loop(step=0.004, samples=160), workers=2, threads=1, **settings)
    assert ran.error is None, ran.error
    spans = RunData(ran.run.path).spans
    mine = spans[(spans.role == "worker") & (spans.lane == 0)]
    for rank, ends in ran.results().items():
        took = np.diff(ends)
        added = mine[mine["rank"] == rank].groupby("step").ns.sum() / 1e9
        found = added.reindex(range(1, len(ends))).to_numpy()
        # Whatever happens between the script's reading of its clock and ours belongs to the neighbour: of
        # several readings at both ends, the one in the middle counts.
        apart = np.cumsum(found - took)
        drift = np.median(apart[-5:]) - np.median(apart[:5])
        assert abs(drift) < max(0.03, 0.02 * took.sum()), apart
        assert np.median(np.abs(found - took) / np.maximum(took, 0.01)) < 0.02  # some take a millisecond


def test_totals_are_what_spans_add_up_to(run):
    ran = run(loop(), workers=2, mode="bsp", threads=1)
    data = RunData(ran.run.path)
    for table in (data.spans, data.totals):
        assert set(table.role) == {"server", "worker"}
    keys = ["role", "rank", "lane", "phase", "other"]
    spans = data.spans.groupby(keys, observed=True).ns.sum()
    totals = data.totals.groupby(keys, observed=True).ns.sum()
    assert spans.equals(totals)


def test_every_phase_has_its_place(run):
    ran = run(loop(), workers=2, mode="asp", link="tcp", threads=1, checkpoint_every=10, compress="fp16")
    data = RunData(ran.run.path)
    phases = {role: set(rows.phase) for role, rows in data.spans.groupby("role", observed=True)}
    training = {"load", "forward", "backward", "compress", "push", "wait", "pull", "lease", "checkpoint"}
    assert training | {"other"} == phases["worker"]
    assert phases["server"] == {"update", "push", "pull", "checkpoint"}
    facts = facts_of(data)
    carried = [(link.worker, link.server) for link in facts.links]
    assert carried == [(0, 0), (1, 0)]
    assert sum(link.bytes_out for link in facts.links) == facts.servers[0].bytes_in > 0
    # The run's own count has each worker's part of checkpoints in it, too.
    assert sum(worker.bytes_out for worker in ran.status.workers.values()) > facts.servers[0].bytes_in


def test_without_spans_there_are_none(run):
    ran = run(loop(), workers=1, mode="bsp", threads=1, spans=False)
    assert ran.error is None
    assert not (ran.run.path / "raw").exists() and not (ran.run.path / "spans.parquet").exists()
    assert diagnose(facts_of(RunData(ran.run.path))).limit == "unknown"


# --- staleness ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["asp", "ssp:2", "bsp"])
def test_staleness_is_what_the_servers_log_says(run, mode):
    """Counted here from what each push read and which updates were applied before it."""
    ran = run(loop(step=0.002, samples=128), workers=3, mode=mode, threads=1)
    lines = [line.split(",") for line in (ran.run.path / "pushes.csv").read_text().splitlines()]
    columns = {name: [int(row[i]) for row in lines[1:]] for i, name in enumerate(lines[0])}
    counted: dict[int, int] = {}
    for version, read in zip(columns["version"], columns["read_version"], strict=True):
        missed = len({v for v in columns["version"] if read < v < version})
        counted[missed] = counted.get(missed, 0) + 1
    facts = facts_of(RunData(ran.run.path))
    assert dict(facts.staleness) == counted == ran.status.staleness
    by_worker = sum((worker.staleness for worker in facts.workers), start=type(facts.staleness)())
    assert by_worker == facts.staleness
    assert facts.writes == len(lines) - 1 and facts.samples == 2 * 128


# --- a run that was killed ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_run_can_be_looked_at(tmp_path):
    """SIGKILL of everything: what it did until then is there."""
    script = tmp_path / "endless.py"
    text = loop(epochs=100_000).replace("RANK == 1", "True").replace("result(ends)", "")
    head = "import torch, paceline\nfrom torch import nn\nfrom torch.utils.data import DataLoader\n"
    script.write_text(head + text.replace("{step}", "0"))
    command = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--threads", "1", str(script)]
    where = tmp_path / "run"
    command[4:4] = ["--run-dir", str(where), "--mode", "asp"]
    environment = {**os.environ, "PACELINE_RUNS": str(tmp_path / "runs")}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "running" in line and "version" in line:
                break
        status = json.loads((where / "status.json").read_text())
    finally:
        # Stopped first: it would replace the fork server, as that would replace it.
        process.send_signal(signal.SIGSTOP)
        for each in psutil.Process(process.pid).children(recursive=True):
            each.kill()
        process.kill()
        process.communicate()
    data = RunData(where)
    facts = facts_of(data)
    assert facts.writes > 0 and len(facts.workers) == 2
    assert all(worker.steps > 0 for worker in facts.workers)
    assert diagnose(facts).limit != "unknown"
    assert status["state"] == "running"
    assert data.missing == []
    assert -process.returncode == signal.SIGKILL


def test_a_resumed_run_keeps_what_it_did_before(run):
    first = run(loop(), workers=1, mode="bsp", threads=1)
    before = len(RunData(first.run.path).spans)
    again = run(loop(epochs=4), workers=1, mode="bsp", threads=1, resume=first)
    assert again.error is None
    spans = RunData(first.run.path).spans
    assert len(spans) > before
    assert (np.diff(spans[spans.role == "server"].start) > 0).all()  # one clock, whatever restarted


# --- the files ---------------------------------------------------------------------------------------------


def test_damaged_files_are_named_and_left_out(run):
    ran = run(loop(), workers=1, mode="bsp", threads=1)
    path = ran.run.path / "spans.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    data = RunData(ran.run.path)
    facts = facts_of(data)
    assert facts.workers[0].seconds  # from the totals
    assert facts.push.count == 0
    assert [m.partition(" ")[0] for m in data.missing] == ["spans.parquet", "there"]


def test_parquet_has_the_documented_columns(run):
    import pyarrow.parquet as pq

    ran = run(loop(), workers=1, mode="bsp", threads=1)
    spans = pq.read_table(ran.run.path / "spans.parquet")
    assert set(spans.column_names) == {
        *("start", "ns", "bytes", "step", "slice", "other", "phase", "lane", "role", "rank", "incarnation"),
    }
    assert set(spans.column("phase").to_pylist()) <= set(PHASES)
    assert PHASES[Phase.LEASE] == "lease"
    assert not (ran.run.path / "raw").exists()


def test_where_the_run_directory_cannot_be_written_the_run_goes_on(run, monkeypatch):
    """The spans' files are made by the roles: a file stands where their directory should be."""

    def in_the_way(status, lines, engine):
        pass

    from paceline.control import RunDirectory

    made = RunDirectory.create

    def create(*args, **kwargs):
        where = made(*args, **kwargs)
        (where.path / "raw").write_text("not a directory")
        return where

    monkeypatch.setattr(RunDirectory, "create", create)
    ran = run(loop(), workers=1, mode="bsp", threads=1, watch=in_the_way)
    assert ran.error is None
    assert any("spans cannot be written" in message for message in ran.status.messages)


def test_the_lead_says_who_was_waited_for(run):
    """Each of the fast workers was blocked on the slow one, and hardly on each other."""
    ran = run(loop(step=0.02), workers=3, mode="bsp", threads=1)
    facts = facts_of(RunData(ran.run.path))
    for worker in facts.workers:
        if worker.rank != 1:
            assert worker.blocked_on[1] > 0.8 * sum(worker.blocked_on.values())
    assert sum(facts.workers[1].blocked_on.values()) < 0.2 * facts.workers[0].blocked_on[1]
    slowest, factor = facts.straggler
    assert slowest.rank == 1 and factor > 2


def test_in_a_group_the_last_to_come_is_named(run):
    ran = run(loop(step=0.02), workers=3, mode="allreduce", threads=1)
    facts = facts_of(RunData(ran.run.path))
    for worker in facts.workers:
        if worker.rank != 1:
            assert worker.blocked_on[1] > 0.8 * sum(worker.blocked_on.values()), worker.blocked_on


def test_paths_and_times_are_those_of_the_run(run):
    ran = run(loop(), workers=1, mode="bsp", threads=1)
    data = RunData(Path(ran.run.path))
    created = datetime.fromisoformat(data.record["created"]).timestamp()
    assert 0 < data.spans.start.min() / 1e9 - created < 300
