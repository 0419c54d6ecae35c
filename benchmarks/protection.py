"""What protection costs where nothing goes wrong: ResNet-18 with it and without it.

`on/off`: one worker and one server in bsp, real computing. In one and the same run they are protected for
so many steps (gradients checked for NaN and Inf, spans recorded, a checkpoint written) and then not for as
many, in turn: runs of one program differ from each other by more than protection costs. A round is a block;
compared are the medians of the blocks' mean steps, so what a checkpoint takes is in them. A checkpoint in
every 100 steps, of ten seconds together, is far more often than anybody needs one. Not in the difference,
because it cannot be turned off: tags of frames, fencing, push ids and leases.

`replica1/none`: two workers and two servers, each a run of its own, with and without a replica of each shard.
"""

import functools
import statistics

from benchmarks import ours
from benchmarks.harness import Case, Side, measure, parse
from benchmarks.models import WARM_UP
from paceline.comm import protection
from paceline.observe.record import spans

BATCH = 16
BLOCK = 100
LEAST = 0.97
REPLICA_STEPS = 40


@functools.cache
def _run(rounds: int, repeat: int) -> list[float]:
    """Seconds of each step of a run."""
    return ours.blocks(
        "resnet18",
        [protection.BLOCKS, spans.BLOCKS],
        batch=BATCH,
        steps=2 * rounds * BLOCK,
        block=BLOCK,
        # At the beginning of every block with protection.
        checkpoint_every=2 * BLOCK,
    )


def blocks(*, resting: bool) -> Side:
    """Mean steps of the blocks of a run with protection, or without. Both sides share the same runs."""
    repeats = iter(range(10**6))

    def side(rounds: int) -> list[float]:
        found: dict[int, list[float]] = {}
        for i, seconds in enumerate(_run(rounds, next(repeats)), WARM_UP):
            # The first step of a block still ends what the one before began.
            if i // BLOCK % 2 == resting and i % BLOCK:
                found.setdefault(i // BLOCK, []).append(seconds)
        return [statistics.fmean(block) for block in found.values() if len(block) > BLOCK // 2]

    return side


def replicated(replicas: int, rounds: int) -> list[float]:
    """Steps of two workers and two servers."""
    return ours.train(
        "resnet18",
        workers=2,
        servers=2,
        mode="bsp",
        batch=BATCH,
        steps=max(rounds, REPLICA_STEPS),
        replicas=replicas,
    )


SIDES: dict[str, Side] = {
    "on": blocks(resting=False),
    "off": blocks(resting=True),
    "replica1": functools.partial(replicated, 1),
    "none": functools.partial(replicated, 0),
}
CASES = [
    Case(name="resnet18/on/off", ours="on", peer="off", target=LEAST),
    Case(name="resnet18/replica1/none", ours="replica1", peer="none"),
]


def main() -> None:
    """Measure and report."""
    measure(parse("protection", __doc__, CASES, repeats=10, rounds=2), SIDES)


if __name__ == "__main__":
    main()
