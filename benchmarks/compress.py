"""What compression saves and costs: bytes, time on slow links, accuracy.

Two bsp workers and a server train the digits CNN. `bytes` is what a push puts on the wire. `100mbit` and
`1gbit` are times of a whole round on links of that rate (injected by the link itself), with replies
compressed too. `accuracy` is the mean of three seeds after 20 epochs of SGD with momentum; signsgd and sbc,
whose residuals a momentum on the servers multiplies, run without it (40 epochs), and so does what they are
compared with.
"""

import argparse
import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import ours
from benchmarks.harness import Options, Row, report

METHODS = (
    *("fp16", "bf16", "fp8", "terngrad", "qsgd:4", "signsgd"),
    *("topk:0.01", "dgc:0.01", "sbc:0.01", "powersgd:2"),
)
LEAST_BYTES = {"terngrad": 14.0, "sbc:0.01": 100.0}
WITHOUT_MOMENTUM = ("signsgd", "sbc:0.01")
NEAR = 0.01


def train(method: str, *, optimizer: str, epochs: int, seed: int = 0, **settings: Any) -> dict[str, Any]:
    """Worker 0's report of one run."""
    print(f"{method} {optimizer} {epochs} epochs, seed {seed} {settings}", file=sys.stderr, flush=True)
    reports = ours.digits(
        epochs=epochs,
        optimizer=optimizer,
        lr=0.05,
        seed=seed,
        mode="bsp",
        compress=method,
        link="tcp",
        **settings,
    )
    return reports[0]


def score(method: str, optimizer: str, *, epochs: int, seeds: int) -> float:
    """Mean accuracy over the seeds; without momentum after twice the epochs."""
    epochs *= 2 if optimizer == "sgd" else 1
    runs = [train(method, optimizer=optimizer, epochs=epochs, seed=seed) for seed in range(seeds)]
    return statistics.fmean(run["accuracy"] for run in runs)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compress",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one seed, few epochs, 100 Mbit/s only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    args = parser.parse_args()
    rows = []
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 4)) as pool:  # of what is not timed
        sent = pool.map(lambda method: train(method, optimizer="sgd", epochs=1), ("none", *METHODS))
        plain, *others = [run["bytes_per_push"] for run in sent]
    for method, found in zip(METHODS, others, strict=True):
        rows.append(_row(f"bytes/{method}/none", found, plain, "bytes", LEAST_BYTES.get(method, 1.0)))
    for rate in ("100mbit",) if args.quick else ("100mbit", "1gbit"):
        base = _round_ms("none", rate)
        for method in METHODS:
            taken = _round_ms(method, rate, compress_replies=True)
            rows.append(_row(f"{rate}/{method}/none", taken, base, "ms", 1.0 if rate == "100mbit" else None))
    epochs, seeds = (2, 1) if args.quick else (20, 3)
    wanted = [("none", "momentum"), ("none", "sgd")]
    wanted += [(method, "sgd" if method in WITHOUT_MOMENTUM else "momentum") for method in METHODS]
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 4)) as pool:
        scores = dict(
            zip(wanted, pool.map(lambda case: score(*case, epochs=epochs, seeds=seeds), wanted), strict=True)
        )
    for method, optimizer in wanted[2:]:
        base = scores["none", optimizer]
        reached = scores[method, optimizer]
        rows.append(_row(f"accuracy/{method}/none", reached, base, "accuracy", (base - NEAR) / base))
    options = Options(
        name="compress", cases=(), quick=args.quick, json=args.json, only="*", repeats=1, rounds=1
    )
    report(options, rows, {})


def _round_ms(method: str, rate: str, **settings: Any) -> float:
    run = train(method, optimizer="sgd", epochs=1, conditions=f"latency=1ms,rate={rate}", **settings)
    seconds: list[float] = run["seconds"]
    return 1e3 * statistics.median(seconds[3:])


def _row(case: str, ours: float, peer: float, unit: str, target: float | None) -> Row:
    better = "higher" if unit == "accuracy" else "lower"
    ratio = ours / peer if better == "higher" else peer / ours
    return Row(
        case=case,
        ours=ours,
        peer=peer,
        unit=unit,
        better=better,
        ratio=ratio,
        target=target,
        ok=None if target is None else ratio >= target,
    )


if __name__ == "__main__":
    main()
