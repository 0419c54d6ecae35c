"""Launching a script: seconds from the command to its first step, and memory then."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import peers


@dataclass(frozen=True, kw_only=True)
class FirstStep:
    """What launching a script cost."""

    seconds: float
    """From the command to the end of the last worker's first step."""
    memory_mb: dict[str, float]
    """Role ("worker:0", "other:0", …) to its unique memory (USS): what the machine would get back if that
    role ended."""


def first_step(script: Path, *, workers: int) -> FirstStep:
    """`torchrun --nproc-per-node WORKERS script`; `--standalone`, so that it picks a free port."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return launch([*torchrun, "--nproc-per-node", str(workers), str(script)], workers=workers)


def launch(command: Sequence[str], *, workers: int) -> FirstStep:
    """Run `command` until `workers` processes have left their stamp (see benchmarks/first_step.py).

    Returns:
        Seconds until the last worker's stamp, and the unique memory of every process of the tree:
        workers as "worker:RANK", the rest as "other:0", "other:1", … in order of their start.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        began = time.monotonic()
        with open(Path(folder, "log"), "w+b") as log:
            process = subprocess.Popen(
                command,
                env=peers.child_env(folder, {"BENCH_STAMPS": folder}),
                cwd=peers.ROOT,
                stdout=log,
                stderr=log,
            )
            try:
                stamps = _stamps(process, Path(folder), workers)
                memory = _memory(process, {stamp["pid"]: stamp["rank"] for stamp in stamps})
                Path(folder, "seen").touch()
                process.wait(peers.DEADLINE_S)
            except (subprocess.TimeoutExpired, TimeoutError, ChildProcessError) as error:
                log.seek(0)
                tail = log.read().decode(errors="replace")[-4000:]
                raise RuntimeError(f"{' '.join(command)}: {error}\n{tail}") from error
            finally:
                peers.end_tree(process)
        return FirstStep(seconds=max(s["at"] for s in stamps) - began, memory_mb=memory)


def _stamps(process: subprocess.Popen[bytes], folder: Path, workers: int) -> list[dict[str, Any]]:
    """Wait for the stamps of all workers."""
    deadline = time.monotonic() + peers.DEADLINE_S
    while len(found := list(folder.glob("rank-*.json"))) < workers:
        if process.poll() is not None:
            raise ChildProcessError(f"ended with {process.returncode} before its first step")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no first step within {peers.DEADLINE_S:.0f} s")
        time.sleep(0.02)
    return [json.loads(path.read_text()) for path in sorted(found)]


def _memory(process: subprocess.Popen[bytes], ranks: dict[int, int]) -> dict[str, float]:
    """Unique memory of each process of the tree in MB."""
    launcher = psutil.Process(process.pid)
    tree = sorted([launcher, *launcher.children(recursive=True)], key=lambda p: p.create_time())
    memory: dict[str, float] = {}
    others = 0
    for one in tree:
        if one.pid in ranks:
            name = f"worker:{ranks[one.pid]}"
        else:
            name, others = f"other:{others}", others + 1
        with suppress(psutil.NoSuchProcess):
            memory[name] = one.memory_full_info().uss / 1e6
    return memory


if __name__ == "__main__":
    print(first_step(Path(sys.argv[1]), workers=int(sys.argv[2])))
