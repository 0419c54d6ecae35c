"""The peers: each file runs one of them in fresh processes and returns the seconds of each round.

floor      one update pass + one copy pass, the least that a push and a pull of a copy can cost
gloo       torch.distributed's all-reduce, and send/recv with a server
torch_rpc  torch.distributed.rpc with an object that holds the parameters
ray_actor  a Ray actor that holds the parameters, arrays through the object store
mpi        Open MPI's in-place all-reduce + a local SGD step
gpu_loop   a training loop on a GPU: plain in one process, DistributedDataParallel (gloo) in more
ddp        a training loop: plain in one process, DistributedDataParallel (gloo) in more
logged     TensorBoard's writer, csv and logging: a call that writes a number down
torchrun   launching a script: command to first step, memory

Run as `python -m benchmarks.peers.NAME …`, a file is its own child process: it reads its arguments,
does its rounds, and prints `{"seconds": […]}` as its last line. `spawn` starts such children.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.harness import MissingPeer

ROOT = Path(__file__).parents[2]
WARM_UP = 20
"""Untimed rounds: that many pass until a tuned heap or a new object store reuses its pages."""
LEARNING_RATE = 0.01
DEADLINE_S = 300.0


def spawn(
    module: str,
    *args: object,
    ranks: int = 1,
    env: Mapping[str, str] | None = None,
    launcher: Sequence[str] = (sys.executable,),
) -> list[float]:
    """Run `module` in `ranks` fresh processes and return the seconds that rank 0 reports.

    Children find RANK, WORLD_SIZE and BENCH_STORE (a file to meet at, so that no port is fixed) in
    their environment, and a temporary folder of their own that is gone afterwards.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        command = [*launcher, "-m", module, *map(str, args)]
        shared = child_env(folder, {**(env or {}), "WORLD_SIZE": str(ranks)})
        with open(Path(folder, "stdout"), "w+") as out, open(Path(folder, "stderr"), "w+") as err:
            children = [
                subprocess.Popen(
                    command,
                    env=shared | {"RANK": str(rank)},
                    cwd=ROOT,
                    stdout=out if rank == 0 else subprocess.DEVNULL,
                    stderr=err,
                )
                for rank in range(ranks)
            ]
            try:
                _wait(children)
            finally:
                for child in children:
                    end_tree(child)
            if any(child.returncode for child in children):
                err.seek(0)
                raise RuntimeError(f"{' '.join(command)} failed:\n{err.read()[-4000:]}")
            out.seek(0)
            seconds: list[float] = json.loads(out.read().splitlines()[-1])["seconds"]
            return seconds


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all have ended, one has failed, or the deadline has passed."""
    deadline = time.monotonic() + DEADLINE_S
    while any(child.poll() is None for child in children):
        if any(child.returncode for child in children):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"a peer did not end within {DEADLINE_S:.0f} s")
        time.sleep(0.05)


def child_env(folder: str, more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a peer's processes: loopback only, temporary files in `folder`."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(":"),
        "TMPDIR": folder,
        "BENCH_STORE": f"{folder}/store",
        "GLOO_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
        **more,
    }


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process and its descendants, and reap it."""
    if process.poll() is None:
        tree = psutil.Process(process.pid)
        for one in [*tree.children(recursive=True), tree]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()


def need(package: str, pip: str) -> None:
    """Raise MissingPeer with the pip command unless `package` can be imported."""
    if importlib.util.find_spec(package) is None:
        raise MissingPeer(f"pip install {pip}")


def timed(round_: Callable[[], object], rounds: int, warm_up: int = WARM_UP) -> list[float]:
    """Seconds of each of `rounds` calls, after a warm-up."""
    seconds = []
    for _ in range(warm_up + rounds):
        began = time.perf_counter()
        round_()
        seconds.append(time.perf_counter() - began)
    return seconds[warm_up:]


def tell(seconds: Sequence[float]) -> None:
    """Print a child's result where `spawn` reads it."""
    print(json.dumps({"seconds": list(seconds)}), flush=True)
