"""torchft in the chaos benchmark: `lighthouse FOLDER GROUPS`, or a replica group: GROUP FOLDER STEPS STEP_MS.

The same model and emulated step as scripts/chaos.py, one process a replica group. Every process leaves a line
for every step: when it began and ended, its number, whether it was committed, and by how many groups.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.scripts.chaos import BATCH, build, samples

TIMEOUT = timedelta(seconds=30)


def lighthouse(folder: Path, groups: int) -> None:
    """Serve until killed. Groups that are silent for a second are dead (the default is five)."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=max(1, groups - 1),
        join_timeout_ms=100,
        quorum_tick_ms=10,
        heartbeat_timeout_ms=1000,
    )
    port = server.address().rpartition(":")[2]
    (folder / "lighthouse.tmp").write_text(f"http://127.0.0.1:{port}")
    os.replace(folder / "lighthouse.tmp", folder / "lighthouse")
    while True:
        time.sleep(60)


def group(number: int, folder: Path, steps: int, step_s: float) -> None:
    """Train as one replica group."""
    from torchft import Manager, Optimizer, ProcessGroupGloo

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    model = build()
    plain = torch.optim.SGD(model.parameters(), lr=0.01)

    def state() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": plain.state_dict()}

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=(folder / "lighthouse").read_text(),
        replica_id=f"group-{number}-",
        hostname="127.0.0.1",
    )
    optimizer = Optimizer(manager, plain)
    (folder / f"pid-{number}").write_text(str(os.getpid()))
    points, labels = samples(60)
    record = os.open(folder / f"steps-{number}.csv", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    while (step := manager.current_step()) < steps:
        at = (step * 8 + number) * BATCH % len(points)
        began = time.monotonic()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(points[at : at + BATCH]), labels[at : at + BATCH])
        time.sleep(step_s)
        loss.backward()
        # Not its DistributedDataParallel: in 0.2 the hook of that fails an assertion when a peer dies.
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        manager.allreduce(gradient).wait()
        torch.nn.utils.vector_to_parameters(
            gradient, [p.grad for p in model.parameters() if p.grad is not None]
        )
        optimizer.step()
        committed, together = manager.current_step() > step, manager.num_participants()
        os.write(record, f"{began:.6f},{time.monotonic():.6f},{step},{committed:d},{together}\n".encode())
    manager.shutdown(wait=False)


if __name__ == "__main__":
    if sys.argv[1] == "lighthouse":
        lighthouse(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        group(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]) / 1000)
