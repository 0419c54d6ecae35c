"""The kills of the chaos benchmark, tried on torchrun with DDP and on a Ray actor with the parameters."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks import peers
from benchmarks.scripts.chaos import BATCH

DDP = Path(__file__).parents[1] / "scripts" / "killed_ddp.py"
STEPS, STEP_MS, EVERY = 400, 10, 20
PATIENCE_S = 90.0
PARAMETERS = 11_018
"""As many as the chaos benchmark's model has."""


@dataclass(frozen=True)
class Killed:
    """What a kill came to."""

    seconds: float
    """Until the end of the next step that began after it."""
    lost: int
    """Steps that were made, and are no more."""
    samples: int | None = None
    """Samples of those steps, where they are known."""
    back_s: float | None = None
    """Until all take part again, where that is another moment."""


def torchrun(seed: int, *, processes: int = 4) -> Killed:
    """One of several DDP processes gets SIGKILL; torchrun has --max-restarts 3."""
    chance = random.Random(f"torchrun {seed}")
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
        command += ["--nproc-per-node", str(processes), str(DDP), name, str(STEPS), str(STEP_MS), str(EVERY)]
        environment = peers.child_env(name, {"OMP_NUM_THREADS": "1"})
        with (folder / "log").open("w+b") as log:
            process = subprocess.Popen(command, env=environment, cwd=peers.ROOT, stdout=log, stderr=log)
            try:
                after = EVERY + chance.randint(5, 60)
                _wait(process, folder, lambda: len(_steps(folder)) >= after)
                victim = int((folder / f"pid-{chance.randrange(processes)}").read_text())
                at = time.monotonic()
                os.kill(victim, signal.SIGKILL)
                _wait(process, folder, lambda: any(began > at for began, _, _ in _steps(folder)))
            finally:
                peers.end_tree(process)
        made = _steps(folder)
        before = max(step for began, _, step in made if began <= at)
        ended, first = min((ended, step) for began, ended, step in made if began > at)
        lost = max(0, before + 1 - first)
        return Killed(ended - at, lost, samples=lost * processes * BATCH)


def _wait(process: "subprocess.Popen[bytes]", folder: Path, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"torchrun did not go on:\n{(folder / 'log').read_text()[-2000:]}")
        time.sleep(0.01)


def _steps(folder: Path) -> list[tuple[float, float, int]]:
    """Of rank 0: when each step began and ended, and its number."""
    found = []
    with suppress(OSError):
        for line in (folder / "steps-0.csv").read_text().splitlines():
            began, ended, step = line.split(",")
            found.append((float(began), float(ended), int(step)))
    return found


def ray_actor(seed: int, *, restarts: bool) -> Killed:
    """A Ray actor that holds the parameters gets SIGKILL; four more push to it.

    Args:
        restarts: Ray starts it again (`max_restarts=-1`, `max_task_retries=-1`); else whoever called it makes
            another one when the call fails, which is the least that a program could do.
    """
    peers.need("ray", "ray")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        command = [sys.executable, "-m", __name__, str(seed), str(int(restarts))]
        environment = peers.child_env(folder, {"RAY_USAGE_STATS_ENABLED": "0"})
        with open(Path(folder, "log"), "w+b") as log:
            process = subprocess.Popen(
                command, env=environment, cwd=peers.ROOT, stdout=subprocess.PIPE, stderr=log
            )
            try:
                out, _ = process.communicate(timeout=PATIENCE_S)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"Ray did not go on within {PATIENCE_S:g} s") from None
            finally:
                peers.end_tree(process)
            if process.returncode:
                log.seek(0)
                raise RuntimeError(log.read().decode(errors="replace")[-2000:])
        return Killed(**json.loads(out.splitlines()[-1]))


def _ray(seed: int, restarts: bool) -> None:
    """The driver: four tasks' worth of pushes in turn, as many a second as the steps of the benchmark."""
    import numpy as np
    import ray
    from ray.exceptions import RayActorError

    class Server:
        def __init__(self) -> None:
            self.parameters = np.ones(PARAMETERS, dtype=np.float32)
            self.updates = 0

        def pid(self) -> int:
            return os.getpid()

        def push_pull(self, gradient: "np.ndarray[tuple[int], np.dtype[np.float32]]") -> "tuple[object, int]":
            self.parameters -= np.float32(peers.LEARNING_RATE) * gradient
            self.updates += 1
            return self.parameters, self.updates

    ray.init(
        num_cpus=2,
        object_store_memory=2**28,
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
        _temp_dir=os.environ["TMPDIR"],
    )
    try:
        kind = ray.remote(Server)
        if restarts:
            kind = kind.options(max_restarts=-1, max_task_retries=-1)
        server = kind.remote()
        gradient = np.full(PARAMETERS, 1e-3, dtype=np.float32)
        before = 0
        for _ in range(50 + random.Random(f"ray {seed}").randint(0, 100)):
            _, before = ray.get(server.push_pull.remote(gradient))
            time.sleep(STEP_MS / 1000 / 4)
        pid = ray.get(server.pid.remote())
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        while True:
            try:
                _, after = ray.get(server.push_pull.remote(gradient))
                break
            except RayActorError:
                server = kind.remote()
        print(json.dumps({"seconds": time.monotonic() - at, "lost": before + 1 - after}), flush=True)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    _ray(int(sys.argv[1]), bool(int(sys.argv[2])))
