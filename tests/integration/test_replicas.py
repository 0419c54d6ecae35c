"""With replicas: servers are killed, others go on in their place, and nobody else notices."""

import csv
import itertools
import json
import os
import secrets
import signal
from pathlib import Path

import pytest
import torch

from paceline.storage.atomic import write_text_atomically
from paceline.testing import faulty
from tests.speed import first

SCRIPT = """
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=4, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for epoch in range(int(sys.argv[1]) if len(sys.argv) > 1 else 2):
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
result(os.getpid())
"""


def assert_all_counted(ran, samples: int = 96, epochs: int = 2) -> None:
    assert ran.error is None
    assert ran.status.lost_updates == 0
    accounts = [a for a in ran.status.leases if a["epoch"] < epochs]  # the last ones of many
    assert {(a["applied"], a["unused"], a["refused"]) for a in accounts} == {(samples, 0, 0)}
    assert ran.status.samples == samples * epochs
    with (ran.run.path / "pushes.csv").open() as file:
        pushes = list(csv.DictReader(file))
    ids = [(p["worker"], p["incarnation"], p["sequence"]) for p in pushes]
    assert len(ids) == len(set(ids))
    assert sum(int(p["samples"]) for p in pushes) == samples * epochs


KILLS = [("asp", "tcp", 0), ("ssp:1", "shm", 1)]
KILLS += [
    case for case in itertools.product(["bsp", "asp", "ssp:1"], ["shm", "tcp"], [0, 1]) if case not in KILLS
]


@pytest.mark.parametrize(("mode", "link", "server"), first(2, KILLS))
def test_a_killed_server_costs_nothing(run, mode, link, server):
    with faulty(f"kill server:{server}@7"):
        ran = run(SCRIPT, workers=2, servers=2, replicas=1, mode=mode, link=link)
    assert_all_counted(ran)
    assert any(f"server:{server} was killed" in text for text in ran.status.messages)
    assert all(worker.restarts == 0 for worker in ran.status.workers.values())


@pytest.mark.parametrize(("server", "clip"), [(1, None), (0, None), (0, 0.1)])
def test_in_bsp_the_result_is_bitwise_that_of_an_undisturbed_run(run, server, clip):
    with faulty(f"kill server:{server}@7"):
        ran = run(SCRIPT, workers=2, servers=2, replicas=1, clip_norm=clip)
    undisturbed = run(SCRIPT, workers=2, servers=2, clip_norm=clip)
    assert_all_counted(ran)
    assert all(torch.equal(ran.model[name], value) for name, value in undisturbed.model.items())


# Trains until told to stop.
LONG = """
import time
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 600), nn.Tanh(), nn.Linear(600, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=4, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for epoch, batches in until_enough(loader):
    for x, y in batches:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
result(epoch + 1)
"""


class Through:
    """A watch that does one thing after another, each when the one before came true, and ends the run."""

    def __init__(self, *stages):
        self._stages = list(stages)
        self._done = None
        self.pids = {}

    def __call__(self, status, lines, engine):
        if status.state in ("failed", "succeeded") or (self._done is not None and not self._done(status)):
            return
        if self._done is None and status.version < 10:
            return
        self._done = None
        self.pids.setdefault("first", engine.pids())
        if self._stages:
            self._done = self._stages.pop(0)(status, engine)
        elif "last" not in self.pids:
            self.pids["last"] = engine.pids()
            (Path(status.run_dir) / "enough").touch()


def kill(name):
    """Kill a server, and wait until another one has its copies."""

    def stage(status, engine):
        os.kill(engine.pids()[name], signal.SIGKILL)
        count = sum("holds copies again" in text for text in status.messages)
        return lambda status: sum("holds copies again" in text for text in status.messages) > count

    return stage


def scale(**sizes):
    """Ask for other numbers of workers or servers, and wait until they are there and have done something."""

    def stage(status, engine):
        asked = Path(status.run_dir) / "requests"
        asked.mkdir(exist_ok=True)
        write_text_atomically(asked / f"{secrets.token_hex(4)}.json", json.dumps({"kind": "scale", **sizes}))

        def done(status):
            servers = [name for name in engine.pids() if name.startswith("server:")]
            if sizes.get("servers", len(servers)) != len(servers) or len(status.servers) != len(servers):
                return False
            done.since = getattr(done, "since", None) or status.version
            return status.version > done.since + 40

        return done

    return stage


def assert_whole(ran, through, workers=2):
    epochs = ran.results()[0]
    assert set(ran.results().values()) == {epochs}
    assert_all_counted(ran, epochs=epochs)
    stayed = [f"worker:{rank}" for rank in range(workers)]
    assert through.pids["last"].keys() >= {*stayed}, ran.status.messages
    assert [through.pids["first"][name] for name in stayed] == [through.pids["last"][name] for name in stayed]


@pytest.mark.parametrize(("mode", "link"), first(1, itertools.product(["asp", "bsp"], ["shm", "tcp"])))
def test_one_server_after_another_is_killed_and_replaced(run, mode, link):
    through = Through(kill("server:0"), kill("server:1"), kill("server:2"), kill("server:0"))
    ran = run(LONG, workers=2, servers=3, replicas=1, mode=mode, link=link, max_restarts=10, watch=through)
    assert_whole(ran, through)


def test_servers_that_remain_give_each_other_more_than_sockets_hold(run):
    """Both sides of a link send before they read."""
    through = Through(kill("server:2"))
    wide = LONG.replace("600", "3000")
    ran = run(wide, workers=2, servers=3, replicas=1, mode="asp", link="tcp", watch=through)
    assert_whole(ran, through)
    assert not any("hangs" in text for text in ran.status.messages), ran.status.messages


SETTINGS = itertools.product(["asp", "bsp"], ["tcp", "shm"], [1, 0])


@pytest.mark.parametrize(("mode", "link", "replicas"), first(0, SETTINGS))
def test_servers_come_and_go(run, mode, link, replicas):
    through = Through(scale(servers=4), scale(servers=2), scale(servers=3))
    ran = run(LONG, workers=2, servers=2, replicas=replicas, mode=mode, link=link, watch=through)
    assert_whole(ran, through)
    assert "from 2 to 4 servers: server:2, server:3 join" in ran.status.messages


def test_a_server_stays_until_every_worker_knows_that_it_leaves(run):
    """Workers are in the middle of long steps when they are to do without it."""
    slow = """
def computes():
    end = time.perf_counter() + 0.15
    while (RUN_DIR / "slow").exists() and time.perf_counter() < end:
        pass
"""
    source = LONG.replace("        optimizer.step()", "        computes()\n        optimizer.step()")
    asked = []

    def watch(status, lines, engine):
        here = Path(status.run_dir)
        if not asked and status.version >= 10:
            (here / "slow").touch()
            asked.append(scale(servers=1)(status, engine))
        elif asked and "server:1" not in engine.pids() and not (here / "enough").exists():
            (here / "slow").unlink()
            (here / "enough").touch()

    ran = run(slow + source, workers=2, servers=2, mode="asp", watch=watch)
    assert ran.error is None and ran.status.restarts == 0, ran.status.messages
    assert len(ran.status.servers) == 1


@pytest.mark.parametrize(("begin", "end", "replicas"), [(1, 2, 0), (2, 1, 0), (2, 3, 1)])
def test_servers_come_or_leave_before_the_script_reaches_prepare(run, begin, end, replicas):
    """The lead has no model yet that it could hand over, and no slices that could change hands."""
    stages = iter([scale(servers=end)])

    def watch(status, lines, engine):
        here = Path(status.run_dir)
        if status.state == "running":
            for stage in stages:
                stage(status, engine)
            if len(status.servers) == max(begin, end) and all(s.pid for s in status.servers.values()):
                (here / "go").touch()
        servers = [name for name in engine.pids() if name.startswith("server:")]
        if status.version >= 10 and len(servers) == len(status.servers) == end and moved(here):
            (here / "enough").touch()

    def moved(here):
        # Without replicas there may be fewer slices than servers: the space is cut for those at the start.
        log = here / "logs" / f"server-{begin}.log"
        return replicas == 0 or "answers for" in log.read_text()

    early = 'while not (RUN_DIR / "go").exists():\n    os.sched_yield()\n'
    source = LONG.replace(
        "model, optimizer, loader = paceline", early + "model, optimizer, loader = paceline"
    )
    ran = run(source, workers=2, servers=begin, replicas=replicas, mode="asp", deadline_s=20.0, watch=watch)
    assert_all_counted(ran, epochs=ran.results()[0])
    assert len(ran.status.servers) == end


def test_a_server_leaves_although_the_lead_dies_meanwhile(run):
    """The lead was asked to let server 2 go, and dies before the workers say that they are ready."""
    slow = """
def computes():
    end = time.perf_counter() + 0.5
    while (RUN_DIR / "slow").exists() and time.perf_counter() < end:
        pass
"""
    source = LONG.replace("        optimizer.step()", "        computes()\n        optimizer.step()")
    stages = ["ask", "kill", "wait", "over"]

    def watch(status, lines, engine):
        here, said = Path(status.run_dir), "\n".join(status.messages)
        if stages[0] == "ask" and status.version >= 10:
            (here / "slow").touch()
            scale(servers=2)(status, engine)
            stages.pop(0)
        elif stages[0] == "kill" and "from 3 to 2 servers: server:2 leaves" in said:
            os.kill(engine.pids()["server:0"], signal.SIGKILL)
            stages.pop(0)
        elif stages[0] == "wait" and "led by" in said:
            (here / "slow").unlink()
            stages.pop(0)
        elif stages[0] == "over" and "server:2" not in engine.pids():
            (here / "enough").touch()

    ran = run(slow + source, workers=2, servers=3, replicas=1, mode="asp", watch=watch)
    assert_all_counted(ran, epochs=ran.results()[0])
    left = ran.status.messages.index("server:2 has given all it held to the others, and left")
    led = next(i for i, text in enumerate(ran.status.messages) if "led by server:1" in text)
    assert led < left and set(ran.status.servers) == {0, 1}


@pytest.mark.parametrize("servers", [1, 3])
def test_workers_are_replaced_and_join_after_servers_came_or_went(run, servers):
    """They cut the parameters as those before them did."""

    def kill_worker(status, engine):
        os.kill(engine.pids()["worker:1"], signal.SIGKILL)
        return lambda status: status.restarts == 1 and "worker:2" in engine.pids()

    def join(status, engine):
        scale(workers=3)(status, engine)
        return lambda status: "worker:2" in engine.pids()

    through = Through(scale(servers=servers), join, kill_worker)
    ran = run(LONG, workers=2, servers=2, mode="asp", watch=through)
    assert ran.error is None and ran.status.restarts == 1
    assert {*ran.results()} == {0, 1, 2}


@pytest.mark.parametrize(
    ("servers", "clip"),
    first(
        1,
        [
            # Every update has two halves. The space is cut for three servers, so those that join hold slices.
            ((3, 1, 3), 0.1),
            ((1, 3, 1), None),
        ],
    ),
)
def test_in_bsp_servers_that_come_and_go_change_no_bit(run, servers, clip):
    begin, *later = servers
    through = Through(*(scale(servers=count) for count in later))
    ran = run(LONG, workers=2, servers=begin, watch=through, clip_norm=clip)
    assert_whole(ran, through)
    epochs = ran.results()[0]
    source = LONG.replace("until_enough(loader)", f"[(epoch, loader) for epoch in range({epochs})]")
    undisturbed = run(source, workers=2, servers=begin, clip_norm=clip)
    assert all(torch.equal(ran.model[name], value) for name, value in undisturbed.model.items())


def test_workers_that_joined_later_go_back_with_the_others(run):
    """Without replicas: the run was scaled up, then a server dies, and all three begin again."""

    def killed(status, engine):
        os.kill(engine.pids()["server:0"], signal.SIGKILL)
        at = status.version
        return lambda status: any("went back" in m for m in status.messages) and status.version > at + 20

    def joined(status, engine):
        scale(workers=3)(status, engine)
        return lambda status: len(status.workers) == 3 and status.workers[2].clock > 3

    ran = run(LONG, workers=2, servers=1, mode="asp", checkpoint_every=20, watch=Through(joined, killed))
    assert ran.error is None
    epochs = ran.results()[0]
    assert set(ran.results()) == {0, 1, 2} and set(ran.results().values()) == {epochs}
    accounts = [a for a in ran.status.leases if a["epoch"] < epochs]
    assert {(a["applied"], a["unused"]) for a in accounts} == {(96, 0)}
    assert ran.status.samples == 96 * epochs
