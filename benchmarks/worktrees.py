"""Is the code of one git worktree slower than that of another? Old and new in alternating blocks.

    python -m benchmarks.worktrees OLD NEW
    python -m benchmarks.worktrees ../old . --cases exchange,overhead --rounds 20 --json FILE

OLD and NEW are worktrees, each with a `.venv`. Every block is a fresh process in one of them, which measures
Paceline's side of a case with that worktree's own `benchmarks` (no peers). Old and new take turns, and each
is first in every second pair, so that a machine that gets slower does so for both.

The ratio new/old of a case is the geometric mean, over the pairs of blocks, of the ratio of their medians.
Below 1 the new code is faster. Its 95 % interval is a bootstrap over the pairs, since rounds of one block
have the same moment of the machine in common and pairs do not. A case is ok if the upper end of the interval
is below the limit.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.harness import MS, SECONDS, Options, Row, Unit, report

LIMIT = 1.03
RESAMPLES = 10_000
_PROGRAM = (
    "import json, sys; from pathlib import Path; from benchmarks import ours\n"
    "seconds = {call}\n"
    "Path(sys.argv[1]).write_text(json.dumps(seconds))"
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A case: the call that returns the seconds of its rounds, and how many rounds a block has."""

    name: str
    call: str
    rounds: int
    unit: Unit = MS


def _exchange(name: str, n: int, rounds: int, *, link: str = "shm", mode: str, workers: int = 1) -> Measured:
    arguments = f"{n}, link={link!r}, mode={mode!r}, workers={workers}, rounds={{rounds}}"
    return Measured(name=f"exchange/{name}", call=f"ours.exchange({arguments})", rounds=rounds)


def _train(name: str, model: str, batch: int, rounds: int, *, workers: int = 1) -> Measured:
    arguments = f"{model!r}, workers={workers}, servers=1, mode='bsp', batch={batch}, steps={{rounds}}"
    return Measured(name=f"overhead/{name}", call=f"ours.train({arguments})", rounds=rounds)


_FIRST_STEP = "ours.first_step(ours.SCRIPTS / 'first_step.py', workers=2, servers=1).seconds"
CASES = (
    _exchange("small/shm", 61_706, 500, mode="asp"),
    _exchange("small/shm-bsp", 61_706, 500, mode="bsp"),
    _exchange("resnet18/shm", 11_689_512, 10, mode="asp"),
    _exchange("resnet18/shm-bsp", 11_689_512, 10, mode="bsp"),
    _exchange("resnet18/tcp", 11_689_512, 10, link="tcp", mode="asp"),
    _exchange("resnet18/shm-2workers-bsp", 11_689_512, 10, mode="bsp", workers=2),
    _train("digits/1worker", "digits", 64, 100),
    _train("resnet18/1worker", "resnet18", 16, 10),
    _train("resnet18/2workers-bsp", "resnet18", 16, 10, workers=2),
    Measured(
        name="startup/digits/first-step",
        call=f"[{_FIRST_STEP} for _ in range({{rounds}})]",
        rounds=1,
        unit=SECONDS,
    ),
)


@dataclass(frozen=True)
class Interval:
    """The ratio new/old, and the ends of its 95 % interval."""

    ratio: float
    low: float
    high: float
    pairs: int


@dataclass(frozen=True, kw_only=True)
class WorktreeRow(Row):
    """A row whose `ours` is the new worktree and whose `peer` is the old one; `ratio` is old/new."""

    new_over_old: Interval


@dataclass(frozen=True, kw_only=True)
class WorktreeOptions(Options):
    """What `report` needs to know."""

    groups: str

    @property
    def command(self) -> str:
        """Without paths of this machine."""
        return f"python -m benchmarks.worktrees OLD NEW --cases {self.groups} --rounds {self.repeats}"


def interval(old: Sequence[float], new: Sequence[float], *, seed: int = 0) -> Interval:
    """The ratio new/old and its 95 % interval, from the medians of paired blocks.

    One pair has no spread: its interval is the ratio itself.
    """
    logs = [math.log(n / o) for o, n in zip(old, new, strict=True)]
    draw = random.Random(seed)
    means = sorted(statistics.fmean(draw.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
    low, high = means[round(0.025 * (RESAMPLES - 1))], means[round(0.975 * (RESAMPLES - 1))]
    return Interval(math.exp(statistics.fmean(logs)), math.exp(low), math.exp(high), len(logs))


def row(case: Measured, old: Sequence[float], new: Sequence[float]) -> WorktreeRow:
    """The row of a case from the medians of its blocks, in seconds."""
    found = interval(old, new)
    return WorktreeRow(
        case=case.name,
        ours=case.unit.show(statistics.median(new)),
        peer=case.unit.show(statistics.median(old)),
        unit=case.unit.name,
        better=case.unit.better,
        ratio=1 / found.ratio,
        target=1 / LIMIT,
        ok=found.high < LIMIT,
        note=f"new/old {found.ratio:.3f}, 95 % from {found.low:.3f} to {found.high:.3f}",
        new_over_old=found,
    )


def block(worktree: Path, case: Measured) -> list[float]:
    """Seconds of a block's rounds, measured by a fresh process in a worktree."""
    with tempfile.NamedTemporaryFile(prefix="bench-", suffix=".json") as file:
        program = _PROGRAM.format(call=case.call.format(rounds=case.rounds))
        command = [str(worktree / ".venv/bin/python"), "-c", program, file.name]
        environment = {**os.environ, "PYTHONPATH": str(worktree / "src")}
        done = subprocess.run(command, cwd=worktree, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{case.name} in {worktree} failed:\n{done.stderr[-4000:]}")
        seconds: list[float] = json.loads(Path(file.name).read_text())
    return seconds


def pairs(
    case: Measured, rounds: int, old: Callable[[], list[float]], new: Callable[[], list[float]]
) -> dict[str, list[list[float]]]:
    """Blocks of both sides, in turn: old new, new old, old new, …"""
    found: dict[str, list[list[float]]] = {"old": [], "new": []}
    for i in range(rounds):
        print(f"[{i + 1}/{rounds}] {case.name}", file=sys.stderr, flush=True)
        turn = [("old", old), ("new", new)]
        for side, measure in turn if i % 2 == 0 else reversed(turn):
            found[side].append(measure())
    return found


def table(rows: Sequence[Row]) -> str:
    """One line a case."""
    width = max(len(each.case) for each in rows)
    lines = [f"{'case':{width}}  {'old':>8}  {'new':>8}  {'unit':4}  {'new/old':>7}  95 % interval"]
    for each in rows:
        assert isinstance(each, WorktreeRow)
        found = each.new_over_old
        lines.append(
            f"{each.case:{width}}  {each.peer:8.4g}  {each.ours:8.4g}  {each.unit:4}  {found.ratio:7.3f}  "
            f"{found.low:.3f} to {found.high:.3f}  {'ok' if each.ok else f'not below {LIMIT}'}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and report."""
    groups = dict.fromkeys(case.name.partition("/")[0] for case in CASES)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.worktrees",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old", type=Path, help="worktree with the code before")
    parser.add_argument("new", type=Path, help="worktree with the code after")
    parser.add_argument("--cases", default=",".join(groups), help="groups of cases, or names of cases")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of blocks of each case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    args = parser.parse_args()
    chosen = [case for case in CASES if _is_chosen(case.name, args.cases.split(","))]
    if not chosen:
        names = ", ".join((*groups, *(case.name for case in CASES)))
        parser.error(f"--cases {args.cases}: no such case; there are {names}")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1; an interval needs several")
    for worktree in (args.old, args.new):
        if not (worktree / ".venv/bin/python").exists():
            parser.error(f"{worktree}: there is no .venv in it (make setup)")
    rows: list[WorktreeRow] = []
    times: dict[str, list[float]] = {}
    for case in chosen:
        found = pairs(
            case,
            args.rounds,
            partial(block, args.old.resolve(), case),
            partial(block, args.new.resolve(), case),
        )
        medians = {side: [statistics.median(each) for each in blocks] for side, blocks in found.items()}
        rows.append(row(case, medians["old"], medians["new"]))
        times |= {f"{case.name}/{side}": medians[side] for side in medians}
    options = WorktreeOptions(
        name="worktrees",
        cases=(),
        quick=False,
        json=args.json,
        only="*",
        repeats=args.rounds,
        rounds=1,
        groups=args.cases,
    )
    report(options, rows, times, table)


def _is_chosen(name: str, chosen: Sequence[str]) -> bool:
    return any(name == each or name.startswith(f"{each}/") for each in chosen)


if __name__ == "__main__":
    main()
