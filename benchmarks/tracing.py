"""What spans cost: the same training with and without them.

One worker and one server in bsp, real computing, spans on. In one and the same run all roles record for so
many steps and rest for as many, in turn: runs of one program differ from each other by ten times what spans
cost. Compared are the medians of the steps' times. Both have the hooks that call the recorder (2 µs a step)
and the writing of what was recorded, twice a second (0.4 µs a span).
"""

import functools

from benchmarks import ours
from benchmarks.harness import Case, Side, measure, parse
from benchmarks.models import WARM_UP
from paceline.observe.record.spans import BLOCKS

BATCH = {"resnet18": 16, "digits": 64}
BLOCK = 10
LEAST = 0.98


@functools.cache
def _run(model: str, rounds: int, repeat: int) -> list[float]:
    """Seconds of each step of a run."""
    return ours.blocks(model, [BLOCKS], batch=BATCH[model], steps=2 * rounds, block=BLOCK)


def side(model: str, *, resting: bool) -> Side:
    """The steps of a run in which spans were recorded, or not. Both sides take turns at the same runs."""
    repeats = iter(range(10**6))

    def steps(rounds: int) -> list[float]:
        seconds = _run(model, rounds, next(repeats))
        # The first step of a block still ends what the one before began.
        return [s for i, s in enumerate(seconds, WARM_UP) if i // BLOCK % 2 == resting and i % BLOCK]

    return steps


SIDES: dict[str, Side] = {
    f"{model}/{name}": side(model, resting=name == "off") for model in BATCH for name in ("on", "off")
}
CASES = [
    Case(name=f"{model}/on/off", ours=f"{model}/on", peer=f"{model}/off", target=LEAST) for model in BATCH
]


def main() -> None:
    """Measure and report."""
    measure(parse("tracing", __doc__, CASES, repeats=4, rounds=100), SIDES)


if __name__ == "__main__":
    main()
