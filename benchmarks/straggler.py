"""One of four workers is three times slower: what do the modes make of it?

Samples per second against bsp. Computing is emulated (a step takes 20 ms without using the CPU), so that four
workers fit two cores; exchanges, leases and waiting are real. A round is an epoch.
"""

from functools import partial

from benchmarks import ours
from benchmarks.harness import Case, Unit, measure, parse

BATCHES = 160
SAMPLES = BATCHES * 8
SAMPLES_PER_S = Unit("samples/s", "higher", lambda seconds: SAMPLES / seconds)
TARGETS = {"asp": 1.66, "ssp:4": None, "ssp:16": None, "backup:1": None, "local:4": None, "easgd:4": None}


def epochs(mode: str, rounds: int) -> list[float]:
    """Seconds of each of so many epochs."""
    return ours.emulated(
        mode=mode, workers=4, batches=BATCHES, epochs=rounds, step_ms=20, slow_rank=3, slower=3
    )


SIDES = {mode: partial(epochs, mode) for mode in ("bsp", *TARGETS)}
CASES = [
    Case(name=f"3x-straggler/{mode}/bsp", ours=mode, peer="bsp", unit=SAMPLES_PER_S, target=target)
    for mode, target in TARGETS.items()
]


def main() -> None:
    """Measure and report."""
    measure(parse("straggler", __doc__, CASES), SIDES)


if __name__ == "__main__":
    main()
