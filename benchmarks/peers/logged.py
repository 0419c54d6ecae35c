"""What else writes a number down: seconds of a call of each, in a fresh process.

python -m benchmarks.peers.logged tensorboard|csv|logging ROUNDS CALLS NAMES
"""

import csv
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import peers

NAMES = ("tensorboard", "csv", "logging")
PACKAGES = {"tensorboard": "tensorboard"}


def rounds(name: str, calls: int, names: int, count: int) -> list[float]:
    """Mean seconds of a call that writes `names` values, for each of `count` rounds of `calls` calls."""
    if package := PACKAGES.get(name):
        peers.need(package, package)
    return peers.spawn("benchmarks.peers.logged", name, count, calls, names)


def _tensorboard(folder: Path) -> Callable[[dict[str, float], int], None]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))

    def write(values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)

    return write


def _csv(folder: Path) -> Callable[[dict[str, float], int], None]:
    rows = csv.writer((folder / "values.csv").open("w"))

    def write(values: dict[str, float], step: int) -> None:
        now = time.time()
        for key, value in values.items():
            rows.writerow((now, 0, 0, step, step, 0, step, key, value))

    return write


def _logging(folder: Path) -> Callable[[dict[str, float], int], None]:
    logger = logging.getLogger("bench")
    logger.addHandler(logging.FileHandler(folder / "values.log"))
    logger.setLevel(logging.INFO)
    logger.propagate = False

    def write(values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            logger.info("%d %s %r", step, key, value)

    return write


def main() -> None:
    """Be the child."""
    name, count, calls, names = sys.argv[1], *map(int, sys.argv[2:])
    values = {f"value{n}": 0.5 for n in range(names)}
    with tempfile.TemporaryDirectory() as folder:
        write = {"tensorboard": _tensorboard, "csv": _csv, "logging": _logging}[name](Path(folder))
        seconds = []
        for number in range(count + 1):
            began = time.perf_counter()
            for call in range(calls):
                write(values, number * calls + call)
            if number:
                seconds.append((time.perf_counter() - began) / calls)
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
