"""What a run came to, what a row promises, and the table of both."""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Row


class Skipped(Exception):
    """A row cannot be run here; the message says why."""


@dataclass
class Outcome:
    """What one run came to."""

    why: str = ""
    """It did not end well: what went wrong."""
    detected_s: float | None = None
    blackout_s: float | None = None
    duplicated: int = 0
    lost: int = 0
    missing: int = 0
    figure: float | None = None
    """What the row is measured by, if by neither of the two times."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A row of the matrix: how to run it once, and what it promises."""

    row: str
    name: str
    wanted: str
    run: Callable[[int], Outcome]
    """One run, by its seed."""
    measure: str = ""
    """`detected_s`, `blackout_s` or `figure`."""
    limit: float | None = None
    unit: str = "s"
    better: str = "lower"
    most_lost: int = 0
    """In one run."""
    runs: int | None = None
    """If the row needs another number than the others."""

    @property
    def title(self) -> str:
        return f"{self.row}-{self.name}"


@dataclass(frozen=True, kw_only=True)
class FaultRow(Row):
    """A line of the matrix. `ours` is what the row is measured by, `peer` the limit."""

    runs: int = 0
    well: int = 0
    """Runs that ended as they should."""
    detected_s: float | None = None
    blackout_s: float | None = None
    worst_s: float | None = None
    """The longest blackout."""
    duplicated: int = 0
    lost: int = 0
    missing: int = 0
    wanted: str = ""


def row_of(trial: Trial, runs: int) -> FaultRow:
    """Run a row, and hold it against its promise."""
    print(f"row {trial.row}, {trial.name}", file=sys.stderr, flush=True)
    outcomes = []
    try:
        for seed in range(trial.runs or runs):
            outcome = trial.run(seed)
            outcomes.append(outcome)
            if outcome.why:
                print(f"  seed {seed}: {outcome.why}", file=sys.stderr, flush=True)
    except Skipped as skipped:
        print(f"  skipped: {skipped}", file=sys.stderr, flush=True)
        return FaultRow(
            case=f"{trial.title}/ours/limit",
            ours=None,
            peer=trial.limit,
            unit=trial.unit,
            better=trial.better,
            ratio=None,
            target=None,
            ok=None,
            note=f"skipped: {skipped}",
            wanted=trial.wanted,
        )
    return judged(trial, outcomes)


def judged(trial: Trial, outcomes: Sequence[Outcome]) -> FaultRow:
    """The line of a row from its runs."""
    sound = all(not o.why and not o.duplicated and not o.missing for o in outcomes)
    sound = sound and max(o.lost for o in outcomes) <= trial.most_lost
    measured = _median([getattr(o, trial.measure) for o in outcomes]) if trial.measure else None
    within, ratio = trial.limit is None, None
    if measured is not None and trial.limit is not None:
        lower = trial.better == "lower"
        within = measured <= trial.limit if lower else measured >= trial.limit
        over, under = (trial.limit, measured) if lower else (measured, trial.limit)
        ratio = over / under if under > 0 else None
    notes = sorted({o.why for o in outcomes if o.why})[:2] or sorted({o.note for o in outcomes if o.note})[:4]
    blackouts = [o.blackout_s for o in outcomes if o.blackout_s is not None]
    return FaultRow(
        case=f"{trial.title}/ours/limit",
        ours=measured,
        peer=trial.limit,
        unit=trial.unit,
        better=trial.better,
        ratio=ratio,
        target=1.0 if trial.limit is not None else None,
        ok=sound and within,
        note="; ".join(notes),
        runs=len(outcomes),
        well=sum(not o.why for o in outcomes),
        detected_s=_median([o.detected_s for o in outcomes]),
        blackout_s=_median([o.blackout_s for o in outcomes]),
        worst_s=max(blackouts, default=None),
        duplicated=sum(o.duplicated for o in outcomes),
        lost=sum(o.lost for o in outcomes),
        missing=sum(o.missing for o in outcomes),
        wanted=trial.wanted,
    )


def _median(values: Sequence[float | None]) -> float | None:
    found = [v for v in values if v is not None]
    return statistics.median(found) if found else None


def table(rows: Sequence[Row]) -> str:
    """The matrix for a terminal."""
    head = ("row", "runs", "detected", "blackout", "dup", "lost", "missing", "measured", "target", "", "")
    lines = [head, *map(_cells, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    verdict = {True: "ok", False: "MISSED", None: ""}[row.ok]
    if not isinstance(row, FaultRow):
        peer = "-" if row.peer is None else f"{row.peer:.3g} {row.unit}"
        ours = "-" if row.ours is None else f"{row.ours:.3g} {row.unit}"
        ratio = "" if row.ratio is None else f"peer {peer}, ratio {row.ratio:.3g}"
        return (row.case, "", "", "", "", "", "", ours, ratio, verdict, row.note)
    name = row.case.removesuffix("/ours/limit")
    if not row.runs:
        return (name, "0", "", "", "", "", "", "", row.wanted, verdict, row.note)
    measured = "" if row.ours is None else f"{row.ours:.3g} {row.unit}"
    runs = str(row.runs) if row.well == row.runs else f"{row.well}/{row.runs}"
    counts = map(str, (row.duplicated, row.lost, row.missing))
    times = map(_shown, (row.detected_s, row.blackout_s))
    return (name, runs, *times, *counts, measured, row.wanted, verdict, row.note)


def _shown(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"


def leftovers(path: Path) -> list[str]:
    """The names in a directory, if it is there."""
    return sorted(p.name for p in path.iterdir()) if path.is_dir() else []
