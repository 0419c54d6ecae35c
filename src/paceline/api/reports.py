"""Pages and traces of runs: what limited one, how several compare, what every role did when."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.control.known_runs import find_run
from paceline.control.rundir import RunDirectory
from paceline.exceptions import UsageError
from paceline.observe.analyse.run_data import RunData
from paceline.storage.plain_files import check_directory

if TYPE_CHECKING:
    from paceline.observe.analyse.comparison import ComparedRun

__all__ = ["WrittenReport", "WrittenTrace", "compared_runs", "write_report", "write_run_trace"]


@dataclass(frozen=True, kw_only=True)
class WrittenReport:
    """A report, and what it says first."""

    path: Path
    diagnosis: str
    figures: tuple[tuple[str, str], ...]
    """Names and values."""
    missing: tuple[str, ...]
    """What the run did not record, or what cannot be read."""
    raw_kept: str | None
    """Why the run's raw records were not turned into tables; None: they were, or there are none."""


@dataclass(frozen=True)
class WrittenTrace:
    """A trace."""

    spans: int
    missing: tuple[str, ...]
    """What the run did not record, or what cannot be read."""


def write_report(
    run: RunDirectory, output: Path | None = None, *, warn: Callable[[str], None], tell: Callable[[str], None]
) -> WrittenReport:
    """Write a run's page. It may be going on, have ended, or have been killed.

    Args:
        output: a file, or a directory; None: report.html in the run directory, or if that cannot be written,
            a file in the present directory.
        warn: called with what is odd about the run's records.
        tell: called when the page goes to another place than was asked for.

    Raises:
        UsageError: the page cannot be written.
    """
    from paceline.observe.analyse.summary import key_figures
    from paceline.observe.show.run_report import write_html

    state = run.state()
    raw_kept = None if run.alive() else _to_parquet(run, warn)
    data = RunData(run.path)
    target = output if output is not None else run.path / "report.html"
    if target.is_dir():
        target = target / "report.html"
    try:
        facts, diagnosis = write_html(data, target, state=state)
    except OSError as error:
        reason = error.strerror or str(error)
        if output is not None:
            raise UsageError(
                f"--output {output} cannot be written: {reason}. Name a file in a directory that exists and "
                "that you may write to"
            ) from error
        target = Path.cwd() / f"report-{run.id}.html"
        tell(f"{run.path} cannot be written ({reason}), so the page goes here; --output says where.")
        try:
            facts, diagnosis = write_html(data, target, state=state)
        except OSError as second:
            raise UsageError(
                f"neither {run.path} nor {target.parent} can be written: {second.strerror or second}. Name "
                "a file that can with --output FILE"
            ) from second
    return WrittenReport(
        path=target.absolute(),
        diagnosis=diagnosis.text,
        figures=tuple(key_figures(data, facts, state)),
        missing=tuple(data.missing),
        raw_kept=raw_kept,
    )


def compared_runs(runs: Sequence[str], *, trust: bool = False) -> "list[ComparedRun]":
    """Several runs, ready to be compared.

    Args:
        trust: they may be other users'.

    Raises:
        RunNotFound: one of them is not there.
        UsageError: one of them is there twice, or another user's.
    """
    from paceline.observe.analyse.comparison import ComparedRun

    found = [find_run(run, trust=trust) for run in runs]
    if twice := {run.id for run in found if sum(run.path == other.path for other in found) > 1}:
        raise UsageError(f"{', '.join(sorted(twice))} is there twice: name different runs")
    return [ComparedRun.of(RunData(run.path), run.state()) for run in found]


def write_run_trace(run: RunDirectory, out: Path, steps: str | None = None) -> WrittenTrace:
    """Write what every role did when, as a trace that Perfetto and chrome://tracing open.

    Args:
        steps: `A:B`, only these steps of the workers and what the servers did meanwhile.
    """
    from paceline.observe.show.perfetto import StepRange, write_trace

    wanted = StepRange.parse(steps) if steps is not None else None
    data = RunData(run.path)
    return WrittenTrace(write_trace(data, out, wanted), tuple(data.missing))


def _to_parquet(run: RunDirectory, warn: Callable[[str], None]) -> str | None:
    """A run that was killed left raw records: they are small and quick to read as Parquet."""
    from paceline.observe.record.tables import to_parquet

    try:
        check_directory(run.path / "raw")
    except OSError:
        return None
    try:
        to_parquet(run.path, warn)
    except OSError as error:
        return f"{run.path}/raw stays as it is: {error.strerror or error}"
    return None
