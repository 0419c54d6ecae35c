"""`python -m benchmarks.chaos`: run the matrix and report."""

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import chaos
from benchmarks.chaos import commands, goodput, paces, rivals, roles, storage
from benchmarks.chaos.outcome import FaultRow, Trial, row_of, table
from benchmarks.chaos.running import Bench
from benchmarks.harness import Options, Row, report
from paceline.comm.faults import FAULTS

RUNS, QUICK_RUNS = 20, 3


@dataclass(frozen=True, kw_only=True)
class ChaosOptions(Options):
    """With what only this benchmark asks."""

    arguments: str

    @property
    def command(self) -> str:
        return f"python -m benchmarks.chaos{self.arguments}"


def trials(bench: Bench) -> Iterator[Trial]:
    """The whole matrix, in the order of its rows."""
    found = [
        *roles.trials(bench),
        *commands.trials(bench),
        *storage.trials(bench),
        *paces.trials(bench),
        *goodput.trials(bench),
    ]
    yield from sorted(found, key=lambda trial: int(trial.row))


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos",
        description=chaos.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_RUNS} runs a row instead of {RUNS}, 1 minute of row 17"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    parser.add_argument("--rows", default="", metavar="1,2,peers", help="only these rows")
    parser.add_argument("--seeds", type=int, metavar="N", help="so many seeded runs a row")
    parser.add_argument("--minutes", type=float, metavar="N", help="how long row 17 kills; 10")
    args = parser.parse_args()
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: there is no folder {args.json.parent}")
    seeds = args.seeds if args.seeds is not None else QUICK_RUNS if args.quick else RUNS
    minutes = args.minutes if args.minutes is not None else 1.0 if args.quick else 10.0
    if seeds < 1 or not minutes > 0:
        parser.error("--seeds and --minutes are numbers above 0")
    os.environ.pop(FAULTS, None)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        os.environ["PACELINE_RUNS"] = name
        bench = Bench(folder=Path(name), quick=args.quick, seeds=seeds, minutes=minutes)
        wanted = set(filter(None, args.rows.split(",")))
        chosen = [trial for trial in trials(bench) if not wanted or trial.row in wanted]
        known = {trial.row for trial in trials(bench)} | {"peers"}
        if wanted - known:
            there = ", ".join([*sorted(known - {"peers"}, key=int), "peers"])
            parser.error(f"--rows {args.rows}: no row {', '.join(sorted(wanted - known))}; there are {there}")
        rows: list[Row] = []
        try:
            rows += [row_of(trial, seeds) for trial in chosen]
            if not wanted or "peers" in wanted:
                rows += rivals.rows(bench, _faults(rows))
        finally:
            bench.close()
    options = ChaosOptions(
        name="chaos",
        cases=(),
        quick=args.quick,
        json=args.json,
        only="*",
        repeats=seeds,
        rounds=1,
        arguments=_arguments(args),
    )
    report(options, rows, {}, table=table)


def _faults(rows: Sequence[Row]) -> list[FaultRow]:
    return [row for row in rows if isinstance(row, FaultRow)]


def _arguments(args: argparse.Namespace) -> str:
    given = " --quick" if args.quick else ""
    for name in ("rows", "seeds", "minutes"):
        value = getattr(args, name)
        given += f" --{name} {value:g}" if isinstance(value, float) else f" --{name} {value}" if value else ""
    return given


if __name__ == "__main__":
    main()
