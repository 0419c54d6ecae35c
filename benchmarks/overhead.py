"""What Paceline adds to a training step.

One worker and one server against the plain loop: at most 3 % or 0.5 ms slower, whichever is more.
Two bsp workers and one server against DistributedDataParallel on gloo: not slower. All sides run
the same loop (benchmarks/models.py); batches are of each worker.
"""

from functools import partial

from benchmarks import ours
from benchmarks.harness import Case, Side, measure, parse
from benchmarks.peers import ddp

BATCH = {"resnet18": 16, "digits": 64}


def least_ratio(plain: float) -> float:
    """The ratio at 3 % or 0.5 ms above the plain loop's seconds, whichever is more."""
    return plain / (plain + max(0.03 * plain, 0.5e-3))


def our(model: str, workers: int) -> Side:
    """Our side, with one server."""

    def side(steps: int) -> list[float]:
        return ours.train(model, workers=workers, servers=1, mode="bsp", batch=BATCH[model], steps=steps)

    return side


SIDES: dict[str, Side] = {
    "resnet18/plain": partial(ddp.steps, "resnet18", BATCH["resnet18"], 1),
    "resnet18/1worker": our("resnet18", 1),
    "digits/plain": partial(ddp.steps, "digits", BATCH["digits"], 1),
    "digits/1worker": our("digits", 1),
    "resnet18/ddp": partial(ddp.steps, "resnet18", BATCH["resnet18"], 2),
    "resnet18/2workers-bsp": our("resnet18", 2),
}

CASES = [
    Case(
        name="resnet18/1worker/plain",
        ours="resnet18/1worker",
        peer="resnet18/plain",
        target=least_ratio,
    ),
    Case(
        name="digits/1worker/plain",
        ours="digits/1worker",
        peer="digits/plain",
        target=least_ratio,
    ),
    Case(
        name="resnet18/2workers-bsp/ddp",
        ours="resnet18/2workers-bsp",
        peer="resnet18/ddp",
        target=1.0,
    ),
]


def main() -> None:
    """Measure and report."""
    # Many short blocks: two cores of a shared machine are faster and slower by a third for half a minute.
    measure(parse("overhead", __doc__, CASES, repeats=8, rounds=30), SIDES)


if __name__ == "__main__":
    main()
