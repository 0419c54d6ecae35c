"""Runs with TLS on their TCP links: the same result, strangers stay out, keys stay secret."""

import contextlib
import socket
import ssl
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch

from paceline.comm import Address, Kind, Secret, connect
from paceline.comm.certificates import Authority, Certificates, make_directory
from paceline.control import beginning as module
from paceline.exceptions import LinkError
from tests.certificates import certificate

SOURCE = """
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(12, 300), nn.Tanh(), nn.Linear(300, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = TensorDataset(torch.randn(96, 12), torch.arange(96) % 3)
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
for epoch, batches in EPOCHS:
    for x, y in batches:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
GOES_ON = SOURCE.replace("EPOCHS", "until_enough(loader)")
SHORT = SOURCE.replace("EPOCHS", "[(epoch, loader) for epoch in range(3)]")


def _port(pid: int) -> int:
    """Where a server listens."""
    (found,) = [
        each.laddr.port
        for each in psutil.Process(pid).net_connections(kind="inet")
        if each.status == psutil.CONN_LISTEN
    ]
    return found


@pytest.mark.parametrize(
    "settings",
    [{"servers": 2}, pytest.param({"overlap": True}, marks=pytest.mark.slow)],
    ids=["plain", "overlap"],
)
def test_tls_changes_nothing_bitwise(run, settings):
    runs = [run(SHORT, workers=2, link="tcp", tls=tls, threads=1, **settings) for tls in (True, False)]
    assert [each.error for each in runs] == [None, None]
    secured, plain = (each.model for each in runs)
    assert secured.keys() == plain.keys()
    for name, tensor in plain.items():
        assert torch.equal(secured[name], tensor), name


def test_strangers_are_turned_away_and_recorded_and_keys_stay_secret(run, monkeypatch):
    """While a run goes on: somebody without a certificate, and others with the secret and a wrong one."""
    secret = bytes(range(100, 132))
    made: list[Certificates] = []
    said: dict[str, str] = {}
    seen: dict[str, bytes] = {}
    for_run = Certificates.for_run.__func__

    def remembered(cls, name):
        made.append(for_run(cls, name))
        return made[-1]

    def knock(port: int) -> None:
        address = Address(unix=None, host="127.0.0.1", port=port)
        worker = made[0].by_role["worker"]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port)) as sock,
            context.wrap_socket(sock) as stranger,
        ):
            stranger.recv(1)
        strangers = {
            "no TLS": secret,
            "another authority": Secret(secret, certificate("worker", worker.run, number=1)),
        }
        for name, credentials in strangers.items():
            with pytest.raises(LinkError) as caught:
                connect(address, credentials, peer="server:0", link="tcp")
            said[name] = str(caught.value)
        # Whose certificate is right but of another role, and who says so in its HELLO.
        link = connect(address, Secret(secret, worker), peer="server:0", link="tcp")
        link.sock.settimeout(10)
        link.send(Kind.HELLO, {"role": "server", "rank": 1})
        said["role"] = link.receive().body["message"]
        link.close()

    def watch(status, lines, engine):
        if status.version and not said:
            for name, pid in engine.pids().items():
                for what in ("cmdline", "environ"):
                    seen[f"{name} {what}"] = Path(f"/proc/{pid}/{what}").read_bytes()
            knock(_port(engine.pids()["server:0"]))
            Path(status.run_dir, "enough").touch()

    monkeypatch.setattr(module, "new_secret", lambda: secret)
    monkeypatch.setattr(Certificates, "for_run", classmethod(remembered))
    ran = run(GOES_ON, workers=2, link="tcp", tls=True, threads=1, mode="asp", watch=watch)
    assert ran.error is None and ran.status.state == "succeeded" and ran.status.restarts == 0
    assert "says that it is a server, and its certificate is a worker's" in said["role"]
    assert set(said) == {"no TLS", "another authority", "role"}

    recorded = [event["reason"] for event in ran.run.read_events() if event["kind"] == "stranger"]
    assert len(recorded) == 4 and all(reason.startswith("server:0: ") for reason in recorded)
    for part in ("it showed no certificate", "does not speak TLS", "certificate is a worker's"):
        assert any(part in reason for reason in recorded), part

    assert {each.run for each in made[0].by_role.values()} == {ran.run.id}
    files = {str(path): path.read_bytes() for path in ran.run.path.rglob("*") if path.is_file()}
    assert len(seen) == 6 and len(files) > 5
    lines = [each.key.splitlines()[1].encode() for each in made[0].by_role.values()]
    assert [name for name, text in {**seen, **files}.items() for line in lines if line in text] == []


def test_certificates_made_beforehand_are_used(run, tmp_path):
    make_directory(tmp_path / "certs", "run0", hosts=["127.0.0.1"])
    ran = run(SHORT, workers=1, link="tcp", certs=str(tmp_path / "certs"), threads=1)
    assert ran.error is None


def test_a_role_whose_certificate_has_expired_is_refused_and_the_run_says_so(run, monkeypatch):
    """As when a worker is replaced after they expired: the server refuses it, and the run says why."""

    def some_expired(cls, name):
        authority = Authority.new(name)
        hours = {"worker": -1, "server": 1, "controller": 1}
        return cls({role: authority.issue(role, lasting=timedelta(hours=h)) for role, h in hours.items()})

    monkeypatch.setattr(Certificates, "for_run", classmethod(some_expired))
    ran = run(SHORT, workers=1, link="tcp", tls=True, threads=1, max_restarts=0)
    assert ran.error is not None
    assert "server:0: the connection broke while authenticating" in ran.error
    assert "the other side refused this role's certificate: it has expired" in ran.error
