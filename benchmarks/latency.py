"""Idleness on slow links, plain and with overlap or prefetch.

Two workers and a server train the digits CNN; every link has 10, 100 or 200 ms of latency each way (injected
by the link itself, paceline.testing), and computing is emulated at 80 ms a step. Idleness is the part of a
step in which a worker waits. `prefetch` is the number of steps that a round trip takes, and one more.
"""

import argparse
import math
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import ours
from benchmarks.harness import Options, Row, report

STEP_MS = 80
LIMIT = 10.0
NEAR = 0.02
EPOCHS = 12


def measure(latency_ms: int, epochs: int, **settings: Any) -> tuple[float, float]:
    """Median idleness in per cent, and the test accuracy of the run."""
    print(f"{latency_ms} ms {settings}", file=sys.stderr, flush=True)
    reports = ours.digits(
        epochs=epochs,
        optimizer="adam",
        lr=0.001,
        step_ms=STEP_MS,
        conditions=f"latency={latency_ms}ms",
        **settings,
    )
    warm_up = 10
    idle = statistics.median(value for each in reports for value in each["idle"][warm_up:])
    return 100 * idle, reports[0]["accuracy"]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.latency",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="200 ms and two epochs only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    args = parser.parse_args()
    rows = []
    for latency_ms in (200,) if args.quick else (10, 100, 200):
        # At a lower latency only idleness is at stake, and a few steps show it.
        epochs = 2 if args.quick or latency_ms < 200 else EPOCHS
        steps = math.ceil(2 * latency_ms / STEP_MS) + 1
        # Side by side: a step is mostly sleep, so they do not disturb each other.
        sides: list[dict[str, Any]] = [
            {"mode": "asp"},
            {"mode": "asp", "prefetch": steps, "overlap": True},
            {"mode": "bsp"},
            {"mode": "bsp", "overlap": True},
        ]
        with ThreadPoolExecutor(len(sides)) as pool:
            futures = [pool.submit(measure, latency_ms, epochs, **side) for side in sides]
            found = [future.result() for future in futures]
        (plain, plain_score), (hidden, hidden_score), (tied, tied_score), (overlapped, overlapped_score) = (
            found
        )
        rows.append(_idle(f"{latency_ms}ms/asp-prefetch/plain", hidden, plain, 1.0))
        rows.append(_idle(f"{latency_ms}ms/bsp-overlap/plain", overlapped, tied, 1.0))
        if latency_ms == 200:
            rows.append(_idle("200ms/asp-prefetch/limit", hidden, LIMIT, 1.0))
            rows.append(_score("200ms-accuracy/asp-prefetch/plain", hidden_score, plain_score))
            rows.append(_score("200ms-accuracy/bsp-overlap/plain", overlapped_score, tied_score))
    options = Options(
        name="latency", cases=(), quick=args.quick, json=args.json, only="*", repeats=1, rounds=1
    )
    report(options, rows, {})


def _idle(case: str, ours: float, peer: float, target: float) -> Row:
    ratio = peer / max(ours, 0.1)
    return Row(
        case=case,
        ours=ours,
        peer=peer,
        unit="% idle",
        better="lower",
        ratio=ratio,
        target=target,
        ok=ratio >= target,
    )


def _score(case: str, ours: float, peer: float) -> Row:
    target = (peer - NEAR) / peer
    return Row(
        case=case,
        ours=ours,
        peer=peer,
        unit="accuracy",
        better="higher",
        ratio=ours / peer,
        target=target,
        ok=ours / peer >= target,
    )


if __name__ == "__main__":
    main()
