"""The Paceline side of every case: one function a benchmark, through the real client and servers.

Each call starts a fresh run with `paceline run` and ends it. Warm-up rounds are run and not returned.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks import peers
from benchmarks.peers.torchrun import FirstStep, launch

SCRIPTS = Path(__file__).parent / "scripts"


def exchange(n: int, *, link: str, mode: str, workers: int, rounds: int, **settings: Any) -> list[float]:
    """Push a gradient of `n` float32, SGD step (no momentum), pull; one server.

    Args:
        n: number of float32 parameters, in one tensor.
        link: "shm" or "tcp".
        mode: "asp" (parameters copied out) or "bsp" (read in place where the link allows).
        workers: how many push at the same time.
        rounds: rounds of each worker.
        settings: more options of `paceline run`; True for a flag.

    Returns:
        Seconds of each round as a worker sees it, of all workers, taken while all were running:
        at least `rounds` numbers. The gradient lies in the slot before a round begins.
    """
    extra = rounds // 2 if workers > 1 else 0
    reports = _run(
        SCRIPTS / "exchange.py",
        n,
        rounds + extra,
        link=link,
        mode=mode,
        workers=workers,
        servers=1,
        threads=1,  # a worker that only exchanges computes nothing
        **settings,
    )
    all_running = min(report["ends"][-1] for report in reports)
    return [
        seconds
        for report in reports
        for end, seconds in zip(report["ends"], report["seconds"], strict=True)
        if end <= all_running
    ]


def train(
    model: str, *, workers: int, servers: int, mode: str, batch: int, steps: int, **settings: Any
) -> list[float]:
    """Train `benchmarks.models.build(model)` with `benchmarks.models.timed_steps`, prepared.

    Args:
        model: "resnet18" or "digits".
        batch: of each worker.
        settings: more options of `paceline run`, `link` among them.

    Returns:
        Seconds of steps, of all workers.
    """
    reports = _run(
        *(SCRIPTS / "train.py", model, batch, steps),
        mode=mode,
        workers=workers,
        servers=servers,
        **{"link": "auto", **settings},
    )
    return [seconds for report in reports for seconds in report["seconds"]]


def train_gpu(
    model: str, *, workers: int, mode: str, batch: int, rounds: int, **settings: Any
) -> list[float]:
    """Train `benchmarks.gpu_models.build(model)` on a GPU, with one server.

    Args:
        batch: of all workers together.
        settings: more options of `paceline run`.

    Returns:
        Seconds of a step of each worker, in rounds that ended while all were running: as long as the whole
        batch takes.
    """
    reports = _run(
        *(SCRIPTS / "train_gpu.py", model, batch // workers, rounds),
        mode=mode,
        workers=workers,
        servers=1,
        **{"device": "cuda", **settings},
    )
    all_running = min(report["ends"][-1] for report in reports)
    return [
        seconds
        for report in reports
        for end, seconds in zip(report["ends"], report["seconds"], strict=True)
        if end <= all_running
    ]


def train_lenet(*, workers: int, batch: int, rounds: int, device: str) -> list[float]:
    """Train LeNet on drawn digits (scripts/lenet.py) in bsp, with one server.

    Args:
        batch: of each worker.
        device: "cpu" or "cuda"; the script is the same.

    Returns:
        Mean seconds of an iteration in each round, of all workers.
    """
    settings: dict[str, Any] = {"device": device} if device != "cpu" else {}
    reports = _run(*(SCRIPTS / "lenet.py", batch, rounds), workers=workers, servers=1, mode="bsp", **settings)
    assert all(report["on_gpu"] == (device != "cpu") for report in reports), "it trained elsewhere"
    return [seconds for report in reports for seconds in report["seconds"]]


def blocks(
    model: str, variables: Sequence[str], *, batch: int, steps: int, block: int, **settings: Any
) -> list[float]:
    """Train with one worker and one server, which do something in every second block of steps only.

    Args:
        variables: of the environment, that switch it.
        settings: more options of `paceline run`.

    Returns:
        Seconds of each of `steps` steps after the warm-up.
    """
    (report,) = _run(
        *(SCRIPTS / "train.py", model, batch, steps),
        environment=dict.fromkeys(variables, str(block)),
        within_s=max(peers.DEADLINE_S, 5.0 * steps),  # a busy machine is slow, not stuck
        mode="bsp",
        workers=1,
        servers=1,
        **settings,
    )
    seconds: list[float] = report["seconds"]
    return seconds


def emulated(
    *, mode: str, workers: int, batches: int, epochs: int, step_ms: float, slow_rank: int, slower: float
) -> list[float]:
    """Emulated computing (scripts/emulated.py), one server.

    Args:
        batches: in an epoch, of all workers together.
        slow_rank: the worker whose steps take `slower` times as long.

    Returns:
        Seconds of each epoch.
    """
    reports = _run(
        SCRIPTS / "emulated.py",
        batches,
        epochs,
        step_ms,
        slow_rank,
        slower,
        mode=mode,
        workers=workers,
        servers=1,
        threads=1,
    )
    seconds: list[float] = reports[0]["seconds"]
    return seconds


def digits(
    *,
    epochs: int,
    optimizer: str,
    lr: float,
    seed: int = 0,
    step_ms: float = 0,
    conditions: str = "",
    **settings: Any,
) -> list[dict[str, Any]]:
    """Train the digits CNN (scripts/digits.py) with two workers and one server.

    Args:
        step_ms: a step takes at least that long, emulated.
        conditions: of the links, as in PACELINE_LINK_CONDITIONS; "" leaves them as they are.
        settings: options of `paceline run`; True for a flag.

    Returns:
        What the workers report, in rank order.
    """
    script = SCRIPTS / "digits.py"
    args = (epochs, optimizer, lr, seed, step_ms)
    return _run(script, *args, conditions=conditions, workers=2, servers=1, **settings)


def log_calls(*, rounds: int, calls: int, pause_us: int, names: int) -> list[float]:
    """Mean seconds of a call of `paceline.log` with `names` values, for each round of `calls` calls.

    Args:
        pause_us: of computing before each call.
    """
    script = SCRIPTS / "logged.py"
    args = (rounds, calls, pause_us, names)
    (report,) = _run(script, *args, mode="bsp", workers=1, servers=1, threads=1)
    seconds: list[float] = report["seconds"]
    return seconds


def first_step(script: Path, *, workers: int, servers: int) -> FirstStep:
    """Launch `script` (scripts/first_step.py) with `paceline run`, until its first step is done."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        command = [*_paceline(), *_options(Path(folder), workers=workers, servers=servers), str(script)]
        found = launch(command, workers=workers)
    # In order of their start: the controller, the fork server, then the servers.
    names = ["controller", "forkserver", *(f"server:{i}" for i in range(servers))]
    renamed = {f"other:{i}": name for i, name in enumerate(names)}
    memory = {renamed.get(role, role): megabytes for role, megabytes in found.memory_mb.items()}
    return FirstStep(seconds=found.seconds, memory_mb=memory)


def _paceline() -> list[str]:
    return [sys.executable, "-m", "paceline", "run"]


def _options(folder: Path, **settings: Any) -> list[str]:
    options = ["--quiet", "--run-dir", str(folder / "run")]
    for name, value in settings.items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{name}" if value else f"--no-{name}")
        else:
            options += [f"--{name}", str(value)]
    return options


def _run(
    script: Path,
    *args: Any,
    conditions: str = "",
    environment: Mapping[str, str] = MappingProxyType({}),
    within_s: float = peers.DEADLINE_S,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Run a script of ours and return what its workers report, in rank order."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        command = [*_paceline(), *_options(folder, **settings), str(script), name, *map(str, args)]
        env = peers.child_env(name, {"PACELINE_RUNS": name, **environment})
        if conditions:
            env["PACELINE_LINK_CONDITIONS"] = conditions
        done = subprocess.run(
            command, env=env, cwd=peers.ROOT, capture_output=True, text=True, timeout=within_s
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
        reports = sorted(folder.glob("worker-*.json"))
        return [json.loads(report.read_text()) for report in reports]


def report(folder: str, rank: int, **values: Any) -> None:
    """For our scripts: leave a worker's report."""
    Path(folder, f"worker-{rank:03}.json").write_text(json.dumps(values))
