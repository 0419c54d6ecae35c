"""What spans cost: the same training with and without them.

One worker and one server in bsp, real computing. Spans are on by default; `--no-spans` turns them off. Blocks
of both sides alternate many times over, because runs of the same program differ by more than spans cost.
"""

from functools import partial

from benchmarks import ours
from benchmarks.harness import Case, Side, measure, parse

BATCH = {"resnet18": 16, "digits": 64}
LEAST = 0.98


def steps(model: str, spans: bool, rounds: int) -> list[float]:
    """Seconds of each of so many steps."""
    return ours.train(model, workers=1, servers=1, mode="bsp", batch=BATCH[model], steps=rounds, spans=spans)


SIDES: dict[str, Side] = {
    f"{model}/{name}": partial(steps, model, name == "on") for model in BATCH for name in ("on", "off")
}
CASES = [
    Case(name=f"{model}/on/off", ours=f"{model}/on", peer=f"{model}/off", target=LEAST) for model in BATCH
]


def main() -> None:
    """Measure and report."""
    measure(parse("tracing", __doc__, CASES, repeats=8, rounds=40), SIDES)


if __name__ == "__main__":
    main()
