"""What a run keeps to itself: its secret, its ports, its memory (docs/security.md has the whole list)."""

import contextlib
import os
import stat
from pathlib import Path

import psutil
import pytest

from paceline.control import beginning as module

SECRET = bytes(range(200, 232))
SOURCE = """
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(64, 4), torch.arange(64) % 2)
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(data, batch_size=4))
for epoch in range(20):
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def known_secret(monkeypatch):
    monkeypatch.setattr(module, "new_secret", lambda: SECRET)
    return [SECRET, SECRET.hex().encode(), SECRET.hex().upper().encode()]


def test_the_secret_is_on_no_command_line_in_no_environment_and_in_no_file(run, known_secret):
    seen: dict[str, bytes] = {}

    def watch(status, lines, engine):
        for name, pid in engine.pids().items():
            with contextlib.suppress(OSError):  # it has just ended
                for what in ("cmdline", "environ"):
                    seen[f"{name} {what}"] = Path(f"/proc/{pid}/{what}").read_bytes()

    ran = run(SOURCE, workers=2, servers=2, mode="asp", threads=1, watch=watch)
    assert ran.error is None
    assert {"server:0 cmdline", "worker:1 environ"} <= set(seen)
    files = [path for path in ran.run.path.rglob("*") if path.is_file()]
    assert len(files) > 5
    texts = {**seen, **{str(path): path.read_bytes() for path in files}}
    found = [name for name, text in texts.items() for form in known_secret if form in text]
    assert found == []


def test_servers_listen_on_loopback_only_and_the_controller_on_no_port(run):
    ports: dict[str, set[str]] = {}

    def watch(status, lines, engine):
        for name, pid in {**engine.pids(), "controller": os.getpid()}.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in psutil.Process(pid).net_connections(kind="inet"):
                    if each.status == psutil.CONN_LISTEN:
                        ports.setdefault(name, set()).add(each.laddr.ip)

    ran = run(SOURCE, workers=2, servers=2, mode="asp", link="tcp", threads=1, watch=watch)
    assert ran.error is None
    assert ports == {"server:0": {"127.0.0.1"}, "server:1": {"127.0.0.1"}}


def test_what_a_run_writes_is_its_owners(run):
    ran = run(SOURCE, workers=1, mode="asp", threads=1, checkpoint_every=50)
    assert ran.error is None
    open_to_others = [
        str(path.relative_to(ran.run.path))
        for path in (ran.run.path, ran.run.path / "run.json", ran.run.logs_path, *ran.run.logs_path.iterdir())
        if stat.S_IMODE(path.stat().st_mode) & 0o077
    ]
    assert open_to_others == []
