"""Repeats a paper's experiments on this machine."""

import datetime
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from paceline.data.cifar10 import cifar10
from paceline.data.image_folder import image_folder
from paceline.data.options import SYNTHETIC
from paceline.exceptions import UsageError
from paceline.papers.accuracy_by_workers import accuracy_by_workers
from paceline.papers.batch_sizes import batch_sizes
from paceline.papers.idleness import idleness
from paceline.papers.resource_profile import resource_profile
from paceline.papers.results import Experiment, Results
from paceline.papers.scales import PAPER1, PAPER4, Paper1Amounts, Paper4Amounts, amounts_of
from paceline.papers.server_counts import server_counts
from paceline.papers.speedups import speedups
from paceline.papers.trials import Trials

__all__ = ["PAPERS", "repeat"]

PAPERS = ("paper1", "paper4")
_TITLES = {
    "paper1": "Paper 1, Distributed Deep Learning From Single-Node to Multi-Node Architecture",
    "paper4": "Paper 4, Performance and Consistency Analysis for Distributed Deep Learning Applications",
}


def repeat(
    paper: str,
    *,
    scale: str = "small",
    data: str = SYNTHETIC,
    tell: Callable[[str], None] = lambda _: None,
) -> Results:
    """Run a paper's experiments.

    Args:
        paper: paper1 or paper4.
        scale: small or full; tiny is for tests.
        data: for paper1 a directory with a folder of photos for every class, for paper4 one with CIFAR-10; or
            "synthetic".
        tell: shows a line of progress.

    Raises:
        UsageError: there is no such paper or scale, or the data cannot be used.
        PacelineError: a run failed.
        KeyboardInterrupt: it was interrupted.
    """
    if paper not in PAPERS:
        raise UsageError(f"{paper}: give one of {', '.join(PAPERS)}; the others are not repeated yet")
    amounts: Paper1Amounts | Paper4Amounts
    amounts = amounts_of(PAPER1, scale) if paper == "paper1" else amounts_of(PAPER4, scale)
    if data != SYNTHETIC:
        data = str(Path(data).expanduser().absolute())
        _check(paper, data)
    results = Results(
        paper=_TITLES[paper],
        scale=scale,
        data="synthetic data" if data == SYNTHETIC else data,
        machine=_machine(),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as place:
        trials = Trials(Path(place), tell)
        if isinstance(amounts, Paper1Amounts):
            results.experiments = _paper1(amounts, data, trials, Path(place))
        else:
            results.experiments = _paper4(amounts, data, trials, tell)
    results.seconds = time.monotonic() - begun
    return results


def _paper1(amounts: Paper1Amounts, data: str, trials: Trials, place: Path) -> list[Experiment]:
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        raise UsageError("paper1 compares parallel with sequential training: it needs two cores or more")
    return speedups(amounts, data, trials, place, cores=cores)


def _paper4(
    amounts: Paper4Amounts, data: str, trials: Trials, tell: Callable[[str], None]
) -> list[Experiment]:
    return [
        resource_profile(amounts, data, trials),
        *accuracy_by_workers(amounts, data, tell),
        server_counts(amounts, data, trials),
        batch_sizes(amounts, data, trials),
        idleness(amounts, trials),
    ]


def _check(paper: str, data: str) -> None:
    """Read the user's data once, before anything starts."""
    if paper == "paper1":
        image_folder(data)
    else:
        cifar10(data, train=True), cifar10(data, train=False)


def _machine() -> str:
    cores = len(os.sched_getaffinity(0))
    return f"{_processor()}, {cores} cores"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
