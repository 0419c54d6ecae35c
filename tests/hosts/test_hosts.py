"""One run on several hosts, with no common disk; and what becomes of it when a host fails."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.api import export_run
from paceline.control import RunDirectory
from tests.histories.witness import problems
from tests.hosts.netns import Host, Net, network, unsupported_reason, until

ROOT = Path(__file__).parents[2]
PACELINE = [sys.executable, "-m", "paceline"]
PORT = 7711
RUN_S = 240.0

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]

WITNESS = """
import sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
import paceline
from witness_model import Witness

samples, batch, epochs, step_s = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
model = Witness(samples, epochs)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loader = DataLoader(TensorDataset(torch.arange(samples)), batch_size=batch, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
print("host", __import__("os").uname().nodename, "local", __import__("os").environ["LOCAL_RANK"], flush=True)
for epoch in paceline.epochs(epochs):
    for (chosen,) in loader:
        optimizer.zero_grad()
        model(chosen, epoch, paceline.rank()).backward()
        time.sleep(step_s)  # computing, emulated
        optimizer.step()
print("script ends", flush=True)
"""


@dataclass
class Cluster:
    """Hosts of one test; host a is the controller's."""

    net: Net
    folder: Path
    hosts: dict[str, Host]
    agents: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    command: "subprocess.Popen[bytes] | None" = None

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def output(self) -> str:
        return (self.folder / "a.out").read_text()

    def agent_output(self, name: str) -> str:
        return self._output_of(name).read_text()

    def _output_of(self, name: str) -> Path:
        # Beside the directory that the host does not see: it is opened before.
        return self.folder.parent / f"{self.folder.name}-{name}.out"

    @property
    def status(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self.run_dir / "status.json").read_text())
            return found
        return {}

    @property
    def messages(self) -> str:
        return "\n".join(self.status.get("messages", ()))

    def start(self, *words: str, verb: str = "run") -> None:
        """Start the command on host a, and the agents on the others."""
        where = f"{self.hosts['a'].address}:{PORT}"
        given = ["--hosts", str(len(self.hosts)), "--listen", where, "--threads", "1"]
        given += ["--run-dir", str(self.run_dir)] if verb == "run" else []
        command = [*PACELINE, verb, *given, *words]
        self.command = self.hosts["a"].start(command, files={}, output=self.folder / "a.out")
        until(lambda: (self.run_dir / "join-token").exists() or self.ended, "the token", 60)
        assert not self.ended, self.output
        for name in self.hosts:
            if name != "a":
                self.join(name)
                until(lambda: f"\n{name} (" in self.output or self.ended, f"host {name}")  # noqa: B023

    def join(self, name: str) -> None:
        token = (self.run_dir / "join-token").read_text().strip()
        command = [*PACELINE, "agent", "--join", f"{self.hosts['a'].address}:{PORT}", "--token-file", "token"]
        self.agents[name] = self.hosts[name].start(
            command, files={"token": token}, output=self._output_of(name)
        )

    @property
    def ended(self) -> bool:
        return self.command is not None and self.command.poll() is not None

    def wait(self) -> None:
        """The run ends, and then the agents that are left."""
        until(lambda: self.ended, f"the run's end: {self.output[-1500:]}", RUN_S)
        assert self.command is not None

    def trained(self, updates: int) -> None:
        """So many updates are made."""
        until(lambda: self.status.get("version", 0) >= updates or self.ended, f"update {updates}", RUN_S)
        assert not self.ended, self.output

    def model(self) -> dict[str, torch.Tensor]:
        path = self.folder / "model.safetensors"
        path.unlink(missing_ok=True)
        export_run(RunDirectory(self.run_dir), path)
        return load_file(path)

    def log(self, name: str) -> str:
        return (self.run_dir / "logs" / name).read_text()


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips the test where this machine cannot have such hosts."""
    if reason := unsupported_reason():
        pytest.skip(reason)


@pytest.fixture
def cluster(
    namespaces: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Cluster]]:
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    with network() as net:
        made: list[Cluster] = []

        def make(*names: str) -> Cluster:
            folder = tmp_path / "cluster"
            folder.mkdir()
            code = folder / "code"
            code.mkdir()
            (code / "train.py").write_text(WITNESS)
            shutil.copy(ROOT / "tests" / "histories" / "script.py", code / "witness_model.py")
            hosts = {name: net.add(name, None if name == "a" else folder) for name in ("a", *names)}
            made.append(Cluster(net, folder, hosts))
            return made[-1]

        yield make
        for each in made:
            for process in [*each.agents.values(), *([each.command] if each.command else [])]:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for host in net.hosts:
            host.signal(signal.SIGKILL)
        for each in made:
            for process in [*each.agents.values(), *([each.command] if each.command else [])]:
                process.wait(timeout=30)


def witness(cluster: Cluster, *, samples: int = 256, step_s: float = 0.2) -> list[str]:
    """The script: 2 epochs, batches of 8."""
    return [str(cluster.folder / "code" / "train.py"), *map(str, (samples, 8, 2, step_s))]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- whole runs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("b",), ("b", "c")], ids=["two hosts", "three hosts"])
def test_digits_in_bsp_are_bitwise_those_of_one_host(cluster: Callable[..., Cluster], names: Any) -> None:
    here = cluster(*names)
    shutil.copy(ROOT / "examples" / "digits.py", here.folder / "code")
    settings = ["--workers", "3", "--servers", "3", "--mode", "bsp", "--seed", "5"]
    script = [str(here.folder / "code" / "digits.py"), "--epochs", "1"]
    here.start(*settings, *script)
    here.wait()
    assert here.command is not None and here.command.returncode == 0, here.output
    until(lambda: all(each.poll() == 0 for each in here.agents.values()), "the agents' ends")
    found = here.model()
    assert {host["name"] for host in here.status["hosts"]} == {"a", *names}
    alone = here.folder / "alone"
    subprocess.run(
        [*PACELINE, "run", "-q", "--run-dir", str(alone), "--threads", "1", *settings, *script],
        check=True,
        timeout=RUN_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    export_run(RunDirectory(alone), here.folder / "alone.safetensors")
    assert same(found, load_file(here.folder / "alone.safetensors"))


def test_asp_on_three_hosts_applies_every_sample_once_and_everything_arrives(
    cluster: Callable[..., Cluster],
) -> None:
    here = cluster("b", "c")
    here.start(
        "--workers", "5", "--servers", "3", "--mode", "asp", "--checkpoint-every", "20", *witness(here)
    )
    until(lambda: here.status.get("state") == "running" or here.ended, "running", 120)
    nodes = subprocess.run(
        [*PACELINE, "nodes", str(here.run_dir)], capture_output=True, text=True, check=True
    ).stdout
    for name, roles in (("a", "server:0 worker:0 worker:3"), ("b", "server:1 worker:1"), ("c", "worker:2")):
        (line,) = [line for line in nodes.splitlines() if line.startswith(f"{name} ")]
        assert roles in line and here.hosts[name].address in line, nodes
    here.wait()
    assert here.command is not None and here.command.returncode == 0, here.output
    assert not problems(here.model(), samples=256, epochs=2)
    assert here.status["samples"] == 512 and here.status["restarts"] == 0
    on = {rank: here.log(f"worker-{rank}.out") for rank in range(5)}
    places = {rank: text.split()[1:4:2] for rank, text in on.items()}
    assert sorted(map(tuple, places.values())) == [
        *(("a", "0"), ("a", "1"), ("b", "0"), ("b", "1"), ("c", "0")),
    ]
    assert all("script ends" in text for text in on.values())
    roles = {path.name for path in (here.run_dir / "logs").iterdir()}
    assert {"server-1.log", "server-2.log", "worker-4.out"} <= roles
    spans = load_spans(here.run_dir)
    assert {("worker", rank) for rank in range(5)} | {("server", rank) for rank in range(3)} <= spans
    assert not (here.run_dir / "join-token").exists()


def load_spans(run_dir: Path) -> set[tuple[str, int]]:
    import pyarrow.parquet as parquet

    table = parquet.read_table(run_dir / "spans.parquet", columns=["role", "rank"])
    return set(zip(table["role"].to_pylist(), table["rank"].to_pylist(), strict=True))


def test_a_run_that_was_stopped_goes_on_on_two_hosts_and_on_one(cluster: Callable[..., Cluster]) -> None:
    here = cluster("b")
    settings = ["--workers", "2", "--servers", "2", "--mode", "asp"]
    here.start(*settings, *witness(here, samples=512))
    here.trained(5)
    subprocess.run([*PACELINE, "stop", str(here.run_dir)], check=True, timeout=60, capture_output=True)
    here.wait()
    first = here.status["version"]
    assert here.status["state"] == "stopped" and here.status["checkpoints"]
    until(lambda: all(each.poll() is not None for each in here.agents.values()), "the agents' ends")
    here.start(str(here.run_dir), verb="resume")
    here.trained(first + 5)
    subprocess.run([*PACELINE, "stop", str(here.run_dir)], check=True, timeout=60, capture_output=True)
    here.wait()
    assert here.status["version"] > first
    subprocess.run(
        [*PACELINE, "resume", "--hosts", "1", str(here.run_dir)],
        check=True,
        timeout=RUN_S,
        capture_output=True,
    )
    assert here.status["state"] == "succeeded"
    assert not problems(here.model(), samples=512, epochs=2)


# --- hosts that fail --------------------------------------------------------------------------------------


def test_a_host_whose_agent_is_killed_is_replaced_by_those_that_are_left(
    cluster: Callable[..., Cluster],
) -> None:
    """It held a server: the run goes back to its last checkpoint, and on with the hosts that are left."""
    here = cluster("b")
    settings = ["--workers", "2", "--servers", "2", "--mode", "asp", "--checkpoint-every", "8"]
    here.start(*settings, *witness(here, samples=384))
    here.trained(12)
    os.kill(agent_pid(here, "b"), signal.SIGKILL)
    until(lambda: not here.hosts["b"].pids(), "the ends of its roles", 20)  # they die with the agent
    here.wait()
    assert here.command is not None and here.command.returncode == 0, here.output
    assert "host b (10.178.0.12) is lost" in here.messages and "went back to checkpoint" in here.messages
    assert not problems(here.model(), samples=384, epochs=2)


def agent_pid(here: Cluster, name: str) -> int:
    """The agent's own process: the one that the command became."""
    return here.agents[name].pid


def test_a_frozen_host_is_lost_and_what_it_does_after_it_thaws_is_nothing(
    cluster: Callable[..., Cluster],
) -> None:
    here = cluster("b")
    settings = ["--workers", "2", "--servers", "1", "--mode", "asp", "--deadline", "60"]
    here.start(*settings, *witness(here, samples=512))
    here.trained(10)
    here.hosts["b"].signal(signal.SIGSTOP)
    until(lambda: "is lost" in here.messages, "the loss", 30)
    assert "said nothing for 4 s" in here.messages
    lost_at = here.status["version"]
    here.trained(lost_at + 5)  # it goes on meanwhile, with worker 1 on host a
    here.hosts["b"].signal(signal.SIGCONT)
    until(lambda: here.agents["b"].poll() is not None, "the end of the agent", 30)
    assert here.agents["b"].returncode == 1 and "error:" in here.agent_output("b")
    until(lambda: not here.hosts["b"].pids(), "the ends of its roles", 20)
    here.wait()
    assert here.command is not None and here.command.returncode == 0, here.output
    assert here.status["restarts"] == 1
    assert not problems(here.model(), samples=512, epochs=2)


def test_a_partition_of_ten_seconds_costs_time_and_nothing_else(cluster: Callable[..., Cluster]) -> None:
    """Row 7 of the matrix. With the usual deadline a host is lost after 15 s."""
    here = cluster("b")
    here.start("--workers", "2", "--servers", "2", "--mode", "bsp", *witness(here, samples=384))
    here.trained(5)
    began = time.monotonic()
    here.hosts["b"].cut()
    until(lambda: time.monotonic() > began + 10, "ten seconds", 20)
    stuck = here.status["version"]
    here.hosts["b"].heal()
    here.wait()
    assert here.command is not None and here.command.returncode == 0, here.output
    assert stuck < 48  # it did wait
    assert here.status["restarts"] == 0 and here.status["lost_updates"] == 0
    assert "is lost" not in here.messages
    assert not problems(here.model(), samples=384, epochs=2)


def test_a_longer_partition_loses_the_host_and_its_side_does_not_train_on(
    cluster: Callable[..., Cluster],
) -> None:
    here = cluster("b")
    settings = ["--workers", "2", "--servers", "2", "--mode", "asp", "--deadline", "60"]
    here.start(*settings, "--checkpoint-every", "8", *witness(here, samples=512))
    here.trained(12)
    here.hosts["b"].cut()
    until(lambda: here.agents["b"].poll() is not None, "the end of the agent", 30)
    assert "the controller has said nothing for 4 s" in here.agent_output("b")
    until(lambda: not here.hosts["b"].pids(), "the ends of its roles", 20)
    until(lambda: "is lost" in here.messages, "the loss", 30)
    here.hosts["b"].heal()
    here.wait()
    assert here.command is not None and here.command.returncode == 0, here.output
    assert not problems(here.model(), samples=512, epochs=2)


def test_the_loss_of_the_controllers_host_ends_the_run_and_its_checkpoint_is_whole(
    cluster: Callable[..., Cluster],
) -> None:
    here = cluster("b")
    settings = ["--workers", "2", "--servers", "2", "--mode", "asp", "--checkpoint-every", "8"]
    here.start(*settings, *witness(here, samples=512))
    until(lambda: len(here.status.get("checkpoints", ())) > 0 or here.ended, "a checkpoint", RUN_S)
    here.trained(here.status["version"] + 3)
    here.hosts["a"].signal(signal.SIGKILL)
    until(lambda: here.agents["b"].poll() is not None, "the end of the agent", 40)
    assert here.agents["b"].returncode == 1
    assert "paceline resume" in here.agent_output("b")
    until(lambda: not here.hosts["b"].pids(), "the ends of its roles", 20)
    subprocess.run(
        [*PACELINE, "resume", "--hosts", "1", str(here.run_dir)],
        check=True,
        timeout=RUN_S,
        capture_output=True,
    )
    assert here.status["state"] == "succeeded"
    assert not problems(here.model(), samples=512, epochs=2)


def test_a_run_on_two_hosts_is_scaled_and_switched_while_it_runs(cluster: Callable[..., Cluster]) -> None:
    here = cluster("b")
    here.start("--workers", "2", "--servers", "2", "--mode", "asp", *witness(here, samples=1536))
    here.trained(5)
    run = str(here.run_dir)
    for words in (["scale", run, "--workers", "4", "--servers", "3"], ["switch", run, "ssp:2"]):
        done = subprocess.run([*PACELINE, *words], timeout=90, capture_output=True, text=True)
        assert done.returncode == 0, f"{words[0]}: {done.stderr} {here.messages}"
    here.trained(here.status["version"] + 20)
    on = {worker["rank"]: worker["host"] for worker in here.status["workers"].values()}
    assert sorted(on.values()) == ["host-1", "host-1", "localhost", "localhost"]
    subprocess.run([*PACELINE, "scale", run, "--workers", "2", "--servers", "2"], check=True, timeout=90)
    here.wait()
    assert here.command is not None and here.command.returncode == 0, here.output
    assert here.status["mode"] == "ssp:2" and here.status["restarts"] == 0
    assert not problems(here.model(), samples=1536, epochs=2)
