"""What a call of `paceline.log` costs the step that makes it, against what else writes numbers down.

A round is the mean of 200 calls, each of one value (`one`) or of four (`four`); `paced` has 200 µs of
computing before each call, so that caches behave as in a training. Ours is a real run; ten times a second a
call also sends the newest values to the display (17 µs of CPU), which a median of rounds this short leaves
out. Every side writes time, step, name and value; `csv` and `tensorboard` write when a
buffer is full, `logging` at every call. What `paceline.log` has taken survives a kill of the process; of the
peers only `logging` can say that.
"""

from functools import partial

from benchmarks import ours
from benchmarks.harness import Case, Side, Unit, measure, parse
from benchmarks.peers import logged

US = Unit("µs", "lower", lambda seconds: seconds * 1e6)
CALLS = 200
MOST_US = 3.0
"""For a call with one value."""


def our(names: int, pause_us: int = 0) -> Side:
    """Calls in a run."""
    return lambda rounds: ours.log_calls(rounds=rounds, calls=CALLS, pause_us=pause_us, names=names)


SIDES: dict[str, Side] = {
    "one": our(1),
    "paced": our(1, pause_us=200),
    "four": our(4),
    **{name: partial(logged.rounds, name, CALLS, 1) for name in logged.NAMES},
    **{f"{name}-four": partial(logged.rounds, name, CALLS, 4) for name in logged.NAMES},
}
LEAST = {"tensorboard": 1.0, "csv": 0.5, "logging": 1.0}
"""`csv` only formats a line into a buffer."""
CASES = [
    *(
        Case(name=f"one/{n}", ours="one", peer=n, unit=US, target=LEAST[n], most=MOST_US)
        for n in logged.NAMES
    ),
    Case(name="paced/logging", ours="paced", peer="logging", unit=US, target=1.0, most=MOST_US),
    *(Case(name=f"four/{n}", ours="four", peer=f"{n}-four", unit=US, target=LEAST[n]) for n in logged.NAMES),
]


def main() -> None:
    """Measure and report."""
    measure(parse("logging", __doc__, CASES, repeats=3, rounds=100), SIDES)


if __name__ == "__main__":
    main()
