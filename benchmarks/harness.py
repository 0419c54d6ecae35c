"""What all benchmarks share: arguments, alternating blocks, medians, the table and the JSON.

A *side* is one thing to be timed, ours or a peer's: a function that takes a number of rounds and
returns that many seconds or more. A *case* compares two sides. `alternate` runs the sides in
turn, block by block, so that a machine that gets slower or busier does so for all of them.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import psutil
import torch

Side = Callable[[int], list[float]]
Target = float | Callable[[float], float] | None


class MissingPeer(Exception):
    """A peer's package is not installed; the message holds the pip command."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for on the command line."""

    name: str
    cases: tuple["Case", ...]
    quick: bool
    json: Path | None
    only: str
    repeats: int
    rounds: int

    @property
    def command(self) -> str:
        """The command to repeat this run, without paths of this machine."""
        only = "" if self.only == "*" else f" --only '{self.only}'"
        return f"python -m benchmarks.{self.name}{' --quick' * self.quick}{only}"


@dataclass(frozen=True)
class Unit:
    """How a median in seconds is shown, and which way is better."""

    name: str
    better: str
    show: Callable[[float], float]


MS = Unit("ms", "lower", lambda seconds: seconds * 1e3)
SECONDS = Unit("s", "lower", lambda seconds: seconds)
RATE = Unit("rounds/s", "higher", lambda seconds: 1 / seconds)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison, by the names of its two sides."""

    name: str
    ours: str
    peer: str
    unit: Unit = MS
    target: Target = None
    """The least ratio; a function computes it from the peer's median seconds."""
    most: float | None = None
    """Our median must not be above this either, in the case's unit."""

    def least_ratio(self, peer: float | None) -> float | None:
        """The target in numbers, given the peer's median seconds if there are any."""
        if callable(self.target):
            return None if peer is None else self.target(peer)
        return self.target


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the result. `ratio` above 1 always means that ours is better."""

    case: str
    ours: float | None
    peer: float | None
    unit: str
    better: str
    """Which way `ours` and `peer` are better. lower: ratio = peer / ours; higher: ours / peer."""
    ratio: float | None
    target: float | None
    ok: bool | None
    """None: nothing was promised, or the case was skipped; `note` says which."""
    note: str = ""


def parse(
    name: str, doc: str | None, cases: Sequence[Case], *, repeats: int = 3, rounds: int = 10
) -> Options:
    """Read the command line.

    Args:
        name: of the benchmark's module.
        doc: what `--help` says about it.
        cases: all that it has; `--only` chooses among them.
        repeats: blocks of each side.
        rounds: rounds in a block; repeats * rounds is at least 20.
    """
    assert repeats * rounds >= 20
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds: to try, not to quote")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases, as in 'small/*'")
    args = parser.parse_args()
    chosen = tuple(case for case in cases if fnmatch(case.name, args.only))
    if not chosen:
        names = ", ".join(case.name for case in cases)
        parser.error(f"--only {args.only}: no such case; there are {names}")
    # Said now rather than after minutes of measuring.
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: there is no folder {args.json.parent}")
    if args.quick:
        repeats, rounds = 1, min(rounds, 5)
    return Options(
        name=name,
        cases=chosen,
        quick=args.quick,
        json=args.json,
        only=args.only,
        repeats=repeats,
        rounds=rounds,
    )


def alternate(
    sides: Mapping[str, Side], *, repeats: int, rounds: int
) -> dict[str, list[float] | MissingPeer]:
    """Time all sides in alternating blocks: A B C, A B C, …

    Returns:
        The seconds of all rounds of each side, or why the side cannot run here.
    """
    times: dict[str, list[float] | MissingPeer] = {}
    for repeat in range(repeats):
        for name, side in sides.items():
            so_far = times.setdefault(name, [])
            if isinstance(so_far, MissingPeer):
                continue
            print(f"[{repeat + 1}/{repeats}] {name}", file=sys.stderr, flush=True)
            try:
                so_far.extend(side(rounds))
            except MissingPeer as missing:
                print(f"  skipped: {missing}", file=sys.stderr)
                times[name] = missing
    return times


def compare(case: Case, times: Mapping[str, list[float] | MissingPeer]) -> Row:
    """The row of one case from the medians of its two sides; without a ratio if one is missing."""
    seconds: list[float | None] = []
    notes = []
    for side in (times[case.ours], times[case.peer]):
        if isinstance(side, MissingPeer):
            notes.append(f"skipped: {side}")
            seconds.append(None)
        else:
            seconds.append(statistics.median(side))
    ours, peer = seconds
    shown = None if ours is None else case.unit.show(ours)
    # Rates are shown, but seconds divided: so one quotient serves both, and above 1 is better.
    ratio = None if ours is None or peer is None else peer / ours
    target = case.least_ratio(peer)
    ok = None if ratio is None or target is None else ratio >= target
    if case.most is not None:
        notes.append(f"ours at most {case.most:g} {case.unit.name}")
        ok = None if ok is None or shown is None else ok and shown <= case.most
    return Row(
        case=case.name,
        ours=shown,
        peer=None if peer is None else case.unit.show(peer),
        unit=case.unit.name,
        better=case.unit.better,
        ratio=ratio,
        target=target,
        ok=ok,
        note="; ".join(notes),
    )


def measure(options: Options, sides: Mapping[str, Side]) -> None:
    """Run the chosen cases and report them: what most benchmarks' `main` is."""
    names = {name for case in options.cases for name in (case.ours, case.peer)}
    times = alternate(
        {name: side for name, side in sides.items() if name in names},
        repeats=options.repeats,
        rounds=options.rounds,
    )
    report(options, [compare(case, times) for case in options.cases], times)


def report(
    options: Options,
    rows: Sequence[Row],
    times: Mapping[str, list[float] | MissingPeer],
    table: Callable[[Sequence[Row]], str] | None = None,
) -> None:
    """Print the table (`table`: in another form), and write the JSON where the user asked for it."""
    result = {
        "benchmark": options.name,
        "command": options.command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "rows": [asdict(row) for row in rows],
        "sides": {n: _spread(s) for n, s in times.items() if not isinstance(s, MissingPeer)},
    }
    print((table or _table)(rows))
    print(f"\n{result['command']}   {result['date']}")
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def machine() -> dict[str, Any]:
    """What the numbers depend on; nothing that names the machine."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {
        "rounds": len(ordered),
        "median_s": statistics.median(ordered),
        "p10_s": ordered[round(last * 0.1)],
        "p90_s": ordered[round(last * 0.9)],
    }


def _table(rows: Sequence[Row]) -> str:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"

    width = max([len("case"), *(len(row.case) for row in rows)])
    lines = [f"{'case':{width}}  {'ours':>8}  {'peer':>8}  {'unit':8}  {'ratio':>6}  {'target':>6}"]
    for row in rows:
        verdict = {True: "ok", False: "MISSED", None: ""}[row.ok]
        lines.append(
            f"{row.case:{width}}  {number(row.ours):>8}  {number(row.peer):>8}  {row.unit:8}  "
            f"{number(row.ratio):>6}  {number(row.target):>6}  {verdict:6}  {row.note}".rstrip()
        )
    return "\n".join(lines)
