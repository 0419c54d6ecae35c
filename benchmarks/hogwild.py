"""hogwild on two cores: two workers write into one shared memory without locks.

Samples per second against two bsp workers and against DistributedDataParallel on gloo, with the same loop,
model and batch; real computing.
"""

from functools import partial

from benchmarks import ours
from benchmarks.harness import Case, Unit, measure, parse
from benchmarks.peers import ddp

BATCH = {"digits": 16, "resnet18": 16}
WORKERS = 2


def _unit(model: str) -> Unit:
    return Unit("samples/s", "higher", lambda seconds: WORKERS * BATCH[model] / seconds)


def steps(model: str, mode: str, rounds: int) -> list[float]:
    """Seconds of each of so many steps of one of our workers."""
    return ours.train(model, workers=WORKERS, servers=1, mode=mode, batch=BATCH[model], steps=rounds)


SIDES = {
    **{f"{model}/{mode}": partial(steps, model, mode) for model in BATCH for mode in ("hogwild", "bsp")},
    **{f"{model}/ddp": partial(ddp.steps, model, BATCH[model], WORKERS) for model in BATCH},
}
CASES = [
    Case(
        name=f"{model}/hogwild/{peer}",
        ours=f"{model}/hogwild",
        peer=f"{model}/{peer}",
        unit=_unit(model),
        target=1.0,
    )
    for model in BATCH
    for peer in ("bsp", "ddp")
]


def main() -> None:
    """Measure and report."""
    measure(parse("hogwild", __doc__, CASES), SIDES)


if __name__ == "__main__":
    main()
