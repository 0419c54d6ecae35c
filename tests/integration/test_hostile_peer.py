"""A peer that holds the secret attacks a run in every mode: the others' result is what it is without it."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.control import Requests
from paceline.observe import RunStatus
from paceline.testing import ATTACKS, HostilePeer
from tests.second_user import MALLORY, needs_root
from tests.speed import first
from tests.unit.test_bad_peers import idle_connections

# Every worker waits, in the middle of the run, until the attacks are over.
SOURCE = """
import time
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(96, 4, generator=torch.Generator().manual_seed(1)), torch.arange(96) % 2)
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(data, batch_size=4))
steps = 0
for epoch in range(3):
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps == 3:
            (RUN_DIR / f"here-{RANK}").touch()
            while not (RUN_DIR / "over").exists():
                time.sleep(0.01)
"""


class Attacking:
    """A watch that attacks a run once all its workers are in the middle of it."""

    def __init__(self, workers: int, attacks: list[str], link: str = "auto") -> None:
        self.workers = workers
        self.attacks = attacks
        self.link = link
        self.refusals: list[str] = []
        self._thread: threading.Thread | None = None
        self._peer: HostilePeer | None = None
        self.done = False

    def __call__(self, status: RunStatus, lines: list[str], engine: Any) -> None:
        where = Path(status.run_dir)
        if self._thread is None and len([*where.glob("here-*")]) == self.workers:
            self._peer = HostilePeer.of(engine, self.link)
            self._thread = threading.Thread(target=self._attack, args=(where,))
            self._thread.start()

    def _attack(self, where: Path) -> None:
        assert self._peer is not None
        try:
            for name in self.attacks:
                self._peer.attack(name)
            self.refusals = self._peer.refusals
            self.done = True
        finally:
            (where / "over").touch()

    def end(self) -> None:
        assert self._thread is not None and self._peer is not None, "it never attacked"
        self._thread.join(60)
        self._peer.close()
        assert self.done


MODES = ("bsp", "asp", "ssp:2", "backup:1", "local:2", "downpour:2,2", "easgd:2", "hogwild", "allreduce")
EXACT = ("bsp", "local:2", "allreduce")
"""Modes whose result does not depend on who is first."""


@pytest.mark.parametrize("mode", first(2, MODES))
def test_in_every_mode_a_hostile_peer_changes_nothing(run: Any, mode: str) -> None:
    settings: dict[str, Any] = {"workers": 2, "servers": 1 if mode == "allreduce" else 2, "mode": mode}
    attacking = Attacking(2, [*ATTACKS])
    attacked = run(SOURCE, watch=attacking, deadline_s=20.0, **settings)
    attacking.end()
    assert attacked.error is None
    assert attacked.status.restarts == 0
    assert attacked.status.samples == 3 * 96
    assert all(account["applied"] == 96 for account in attacked.status.leases[:3])
    assert any("no process of this run" in refusal for refusal in attacking.refusals)
    model = attacked.model
    assert all(bool(tensor.isfinite().all()) for tensor in model.values())
    if mode in EXACT:
        (quiet := Attacking(2, [])).refusals = []
        alone = run(SOURCE, watch=quiet, deadline_s=20.0, **settings)
        quiet.end()
        assert all(torch.equal(model[name], alone.model[name]) for name in model)


def test_over_tcp_too(run: Any) -> None:
    attacking = Attacking(2, [*ATTACKS], link="tcp")
    ran = run(SOURCE, workers=2, servers=2, mode="bsp", link="tcp", watch=attacking, deadline_s=20.0)
    attacking.end()
    assert (ran.error, ran.status.restarts, ran.status.samples) == (None, 0, 3 * 96)


def test_a_worker_that_lies_about_its_samples_is_counted_with_those_of_its_leases(run: Any) -> None:
    lying = """
from paceline.comm import Connection, Kind
send = Connection.send
def lie(self, kind, body=None, *more):
    if kind is Kind.PUSH and RANK == 1:
        body = {**body, "samples": 10**9}
    send(self, kind, body, *more)
Connection.send = lie
(RUN_DIR / "over").touch()
"""
    ran = run(lying + SOURCE, workers=2, mode="asp")
    assert ran.error is None
    assert ran.status.samples == 3 * 96
    assert any("worker:1 says that it computed a step from more samples" in m for m in ran.status.messages)


@needs_root
def test_strangers_do_not_keep_out_a_worker_that_joins(run: Any) -> None:
    """80 idle connections of another user to every server of a run over TCP; then a third worker joins."""
    answers: list[Any] = []
    held: list[Any] = []
    asking: list[threading.Thread] = []

    def watch(status: RunStatus, lines: list[str], engine: Any) -> None:
        where = Path(status.run_dir)
        if not held and len([*where.glob("here-*")]) == 2:
            for address in engine.listening("tcp").values():
                crowd = idle_connections(address, 80, user=MALLORY)
                crowd.__enter__()
                held.append(crowd)
            requests = Requests(where)
            scale = {"kind": "scale", "workers": 3}
            ask = partial(requests.ask, scale, alive=lambda: True, within_s=60)
            asking.append(threading.Thread(target=lambda: answers.append(ask())))
            asking[0].start()
        if (where / "here-2").exists():
            (where / "over").touch()

    source = SOURCE.replace("range(3)", "range(30)")
    try:
        ran = run(source, workers=2, servers=2, mode="asp", link="tcp", watch=watch, deadline_s=20.0)
    finally:
        for crowd in held:
            crowd.__exit__(None, None, None)
        for thread in asking:
            thread.join(65)
    assert len(held) == 2 and "refused" not in answers[0]
    assert (ran.run.path / "here-2").exists(), "the third worker came in"
    assert (ran.error, ran.status.restarts) == (None, 0)
    assert "too many connections authenticating at once" in ran.log("server", 0)
