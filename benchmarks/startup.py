"""From the command to the first finished step, and what each process holds in memory then.

2 workers and 1 server against `torchrun --nproc-per-node 2` with DDP, on the same script
(benchmarks/scripts/first_step.py). Memory is unique memory (USS): what an extra role costs.
"""

import statistics
from pathlib import Path

from benchmarks import ours
from benchmarks.harness import SECONDS, Case, Row, Side, alternate, compare, parse, report
from benchmarks.peers import torchrun
from benchmarks.peers.torchrun import FirstStep

SCRIPT = Path(__file__).parent / "scripts" / "first_step.py"
CASE = Case(
    name="digits/first-step/torchrun",
    ours="digits/first-step",
    peer="digits/torchrun",
    unit=SECONDS,
    target=1.0,
)


def memory_rows(ours: list[FirstStep], peer: list[FirstStep]) -> list[Row]:
    """One row per role of ours; workers stand beside torchrun's worker of the same rank."""
    theirs = _medians(peer)
    return [
        Row(
            case=f"digits/memory/{role}",
            ours=megabytes,
            peer=theirs.get(role),
            unit="MB",
            better="lower",
            ratio=theirs[role] / megabytes if role in theirs else None,
            target=None,
            ok=None,
        )
        for role, megabytes in _medians(ours).items()
    ]


def _medians(launches: list[FirstStep]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for launch in launches:
        for role, megabytes in launch.memory_mb.items():
            found.setdefault(role, []).append(megabytes)
    return {role: statistics.median(values) for role, values in found.items()}


def main() -> None:
    """Measure and report."""
    options = parse("startup", __doc__, [CASE], repeats=10, rounds=2)
    mine: list[FirstStep] = []
    theirs: list[FirstStep] = []

    def our(rounds: int) -> list[float]:
        mine.extend(ours.first_step(SCRIPT, workers=2, servers=1) for _ in range(rounds))
        return [one.seconds for one in mine[-rounds:]]

    def peer(rounds: int) -> list[float]:
        theirs.extend(torchrun.first_step(SCRIPT, workers=2) for _ in range(rounds))
        return [one.seconds for one in theirs[-rounds:]]

    sides: dict[str, Side] = {"digits/first-step": our, "digits/torchrun": peer}
    times = alternate(sides, repeats=options.repeats, rounds=options.rounds)
    report(options, [compare(CASE, times), *memory_rows(mine, theirs)], times)


if __name__ == "__main__":
    main()
