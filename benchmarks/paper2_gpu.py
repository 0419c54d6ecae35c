"""Paper 2's comparison of GPU and CPU: the same training of MNIST's shape, with and without a GPU.

The paper (DistDL, section 5.3) says: "The preliminary result to compare the performance of CPU and GPU with
various iteration and samples is introduced in table 1, get 40% decrease in average compared with CPU
training. … we have trained in the DistDL with 1500 iterations with 6000 samples based on Two CPU Nodes, One
CPU & One GPU Node, and Two GPU Nodes. … the time consumption can reduce up to 80%". Its nodes were EC2's
t2.medium and G2, its mode BSP. It names no network and no batch size.

Here: LeNet as in examples/mnist.py on 6,000 drawn digits, 1,500 iterations in bsp with one server; the two
nodes are two workers on one host, whose cores or whose one GPU they share. `peer` is our own run on the CPU,
`ours` the same script with --device cuda. A time is that of 1,500 iterations from the median of the rounds,
with loading, without start-up. `decrease` has the part of the CPU's time that the GPU needs: the mean over
all cases, and the best. One CPU and one GPU node together are not repeated: a job has one device.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence

import torch

from benchmarks import ours
from benchmarks.harness import Case, MissingPeer, Row, Side, Unit, alternate, compare, parse, report

ITERATIONS = 1500
SETTINGS = {
    "lenet-2workers/batch16": (2, 16),
    "lenet-2workers/batch64": (2, 64),
    "lenet-2workers/batch256": (2, 256),
    "lenet-1worker/batch64": (1, 64),
}
"""Workers, and the batch of each."""
AVERAGE, BEST = 0.40, 0.80
"""The paper's decreases."""
UNIT = Unit("s", "lower", lambda seconds: ITERATIONS * seconds)


def side(workers: int, batch: int, device: str) -> Side:
    """Our training on a device."""

    def train(rounds: int) -> list[float]:
        return ours.train_lenet(workers=workers, batch=batch, rounds=rounds, device=device)

    return train


SIDES: dict[str, Side] = {
    f"{name}/{device}": side(workers, batch, device)
    for name, (workers, batch) in SETTINGS.items()
    for device in ("cpu", "cuda")
}
CASES = [Case(name=name, ours=f"{name}/cuda", peer=f"{name}/cpu", unit=UNIT) for name in SETTINGS]


def decreases(rows: Sequence[Row]) -> list[Row]:
    """What the paper says, as two more rows: of all cases together."""
    needed = [row.ours / row.peer for row in rows if row.ours is not None and row.peer]
    if not needed:
        return []
    return [
        _decrease("decrease/mean", statistics.fmean(needed), AVERAGE),
        _decrease("decrease/best", min(needed), BEST),
    ]


def _decrease(name: str, needed: float, papers: float) -> Row:
    ratio, target = 1 / needed, 1 / (1 - papers)
    note = f"the paper: {papers:.0%} less time; here {1 - needed:.0%}"
    return Row(
        case=name,
        ours=100 * needed,
        peer=100.0,
        unit="%",
        better="lower",
        ratio=ratio,
        target=target,
        ok=ratio >= target,
        note=note,
    )


def main() -> None:
    """Measure and report."""
    options = parse("paper2_gpu", __doc__, CASES, repeats=1, rounds=20)
    if not torch.cuda.is_available():
        sys.exit("benchmarks.paper2_gpu needs a CUDA device, and torch sees none here.")
    names = {name for case in options.cases for name in (case.ours, case.peer)}
    sides = {name: each for name, each in SIDES.items() if name in names}
    times: Mapping[str, list[float] | MissingPeer] = alternate(
        sides, repeats=options.repeats, rounds=options.rounds
    )
    rows = [compare(case, times) for case in options.cases]
    report(options, [*rows, *decreases(rows)], times)


if __name__ == "__main__":
    main()
