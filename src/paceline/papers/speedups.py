"""Paper 1's tables 1 to 3: the speed of every kind of parallelism over sequential training. Real runs."""

from dataclasses import dataclass, replace
from pathlib import Path

from paceline.data.options import SYNTHETIC
from paceline.observe.analyse.wording import plural
from paceline.papers.photos import write_photos
from paceline.papers.published import SPEEDUPS
from paceline.papers.results import Experiment, ResultRow
from paceline.papers.scales import Paper1Amounts, UseCase
from paceline.papers.step_times import samples_per_s
from paceline.papers.trials import Trials
from paceline.plan import Job

__all__ = ["rows_of_paper", "speedups"]

_MODULE = "paceline.papers.photo_training"
_ETHERNET = "latency=0ms,rate=10gbit"
"""The paper's nodes have a dedicated Ethernet of 10 Gbit/s."""


@dataclass(frozen=True)
class _SetUp:
    """A way to train in parallel."""

    name: str
    paper: str
    """The paper's row that it stands beside."""
    job: Job
    conditions: str = ""


@dataclass(frozen=True)
class _Absent:
    """A row of the paper that this command does not measure, and why."""

    paper: str
    reason: str


_TABLES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "Table 1. Speedup of Data Parallelism",
        ("CPU single-process", "CPU multi-process", "GPU single-process"),
        "Two cores can be twice as fast as one at most; the paper does not say how many cores its "
        "machine has, and a "
        "speed-up of 15.57 needs sixteen or more. On one core each, the replicas share caches and memory "
        "bandwidth.",
    ),
    (
        "Table 2. Speedup of Model and Hybrid Parallelism",
        ("model", "data and model"),
        "The paper pipelines over GPUs and says that it makes no sense on CPUs: a core gains nothing "
        "from another "
        "core's layers that it could not gain from another core's images.",
    ),
    (
        "Table 3. Speedup of Distributed Deep Learning",
        ("MPI, CPU", "MPI, GPU", "Spark, CPU"),
        "The paper's nodes have cores of their own; here both workers and the servers share this "
        "machine's, and the "
        "network between them is emulated on TCP.",
    ),
)

_ABSENT = (
    _Absent("GPU single-process", "GPU row: this command measures CPUs"),
    _Absent("MPI, GPU", "GPU row: this command measures CPUs"),
    _Absent("Spark, CPU", "needs the Spark engine, which this version does not have"),
)


def _set_ups(cores: int) -> tuple[_SetUp, ...]:
    """Each uses all cores, with one thread each."""

    def job(**settings: object) -> Job:
        return Job(script=_MODULE, **{"mode": "bsp", "threads": 1, **settings})  # type: ignore[arg-type]

    return (
        _SetUp(
            f"--local threads:{cores}: one process, a replica a thread",
            "CPU single-process",
            job(workers=1, threads=cores, local=f"threads:{cores}"),
        ),
        _SetUp(
            f"--local processes:{cores}: a replica a process",
            "CPU multi-process",
            job(workers=1, threads=cores, local=f"processes:{cores}"),
        ),
        _SetUp(f"--workers {cores}: bsp, shared memory", "CPU multi-process", job(workers=cores)),
        _SetUp(
            f"--workers {cores}: bsp, emulated Ethernet of 10 Gbit/s",
            "MPI, CPU",
            job(workers=cores, link="tcp"),
            _ETHERNET,
        ),
        _SetUp("--pipeline 2: one worker, a stage a process", "model", job(workers=1, pipeline=2)),
        _SetUp(
            "--workers 2 --pipeline 2: bsp between two pipelines",
            "data and model",
            job(workers=2, pipeline=2),
        ),
        _SetUp(f"--workers {cores} --mode allreduce", "MPI, CPU", job(workers=cores, mode="allreduce")),
    )


def rows_of_paper(cores: int) -> dict[str, list[str]]:
    """What stands beside each row of the paper: names of set-ups, or why there is none."""
    found: dict[str, list[str]] = {paper: [] for _, papers, _ in _TABLES for paper in papers}
    for set_up in _set_ups(cores):
        found[set_up.paper].append(set_up.name)
    for absent in _ABSENT:
        found[absent.paper].append(f"not run: {absent.reason}")
    return found


class _Case:
    """Measures one of the paper's use cases.

    Args:
        data: a directory with a folder for every class, or "synthetic".
        folder: for drawn photos.
    """

    def __init__(self, case: UseCase, data: str, trials: Trials, folder: Path, rounds: int) -> None:
        self.case, self._trials, self._rounds = case, trials, rounds
        if data == SYNTHETIC:
            data = str(folder / f"photos-{case.name}")
            write_photos(Path(data), case.photos, case.size)
        self._data = data

    def alone(self, threads: int) -> float:
        """Samples a second of one plain process."""
        name = f"{self.case.name}: sequential, threads: {threads}"
        return max(
            samples_per_s(
                self._trials.alone(f"{name}, round {n}", _MODULE, self._arguments(1), threads=threads)
            )
            for n in self._numbers()
        )

    def run(self, set_up: _SetUp) -> float:
        """Samples a second of a run."""
        job = replace(set_up.job, args=self._arguments(set_up.job.workers))
        name = f"{self.case.name}: {set_up.name}"
        return max(
            samples_per_s(self._trials.run(f"{name}, round {n}", job, conditions=set_up.conditions).workers)
            for n in self._numbers()
        )

    def _numbers(self) -> range:
        return range(1, self._rounds + 1)

    def _arguments(self, workers: int) -> tuple[str, ...]:
        case = self.case
        return (
            *("--data", self._data, "--network", case.network, "--size", str(case.size)),
            *("--hidden", str(case.hidden), "--batch-size", str(max(1, case.batch_size // workers))),
            *("--epochs", str(case.epochs)),
        )


def speedups(
    amounts: Paper1Amounts, data: str, trials: Trials, folder: Path, *, cores: int
) -> list[Experiment]:
    """Tables 1 to 3.

    Args:
        data: a directory with a folder for every class, or "synthetic".
        folder: for drawn photos.
        cores: to train on; sequential training takes one.
    """
    set_ups = _set_ups(cores)
    speed: dict[tuple[str, str], float] = {}
    sequential: dict[str, float] = {}
    own_threads: dict[str, float] = {}
    for case in amounts.cases:
        measured = _Case(case, data, trials, folder, amounts.rounds)
        sequential[case.name] = measured.alone(1)
        own_threads[case.name] = measured.alone(cores)
        for set_up in set_ups:
            speed[case.name, set_up.name] = measured.run(set_up)
    tables = [
        _table(title, papers, why, amounts, set_ups, speed, sequential) for title, papers, why in _TABLES
    ]
    tables[0].rows[:0] = [
        ResultRow(case=f"{name}: sequential, one thread", unit="photos/s", ours=rate)
        for name, rate in sequential.items()
    ] + [
        ResultRow(
            case=f"{name}: sequential, torch's own {cores} threads",
            unit="speed-up",
            ours=rate / sequential[name],
            note="not in the paper",
        )
        for name, rate in own_threads.items()
    ]
    return tables


def _table(
    title: str,
    papers: tuple[str, ...],
    why: str,
    amounts: Paper1Amounts,
    set_ups: tuple[_SetUp, ...],
    speed: dict[tuple[str, str], float],
    sequential: dict[str, float],
) -> Experiment:
    cases = amounts.cases
    described = "; ".join(
        f"{case.name}: {case.network}, hidden layers of {case.hidden}, {case.photos:,} photos of "
        f"{case.size}×{case.size}, "
        f"batch {case.batch_size}"
        for case in cases
    )
    made = Experiment(
        title=title,
        how=f"Real runs on this machine, photos read from JPEG files; {described}. Speed-up over one "
        "process with one "
        f"thread; the best of {plural(amounts.rounds, 'round')}.",
        why=why,
    )
    for paper in papers:
        published = dict(zip((case.name for case in cases), SPEEDUPS[paper], strict=True))
        for case in cases:
            for set_up in set_ups:
                if set_up.paper == paper:
                    made.rows.append(
                        ResultRow(
                            case=f"{case.name}: {paper}; {set_up.name}",
                            unit="speed-up",
                            paper=published[case.name],
                            ours=speed[case.name, set_up.name] / sequential[case.name],
                            note="emulated network" if set_up.conditions else "",
                        )
                    )
            made.rows += [
                ResultRow(
                    case=f"{case.name}: {paper}",
                    unit="speed-up",
                    paper=published[case.name],
                    note=f"not run: {absent.reason}",
                )
                for absent in _ABSENT
                if absent.paper == paper
            ]
    return made
