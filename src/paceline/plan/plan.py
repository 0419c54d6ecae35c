"""What a job becomes before anything starts: which roles, where, with how many threads."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.exceptions import PlanError, UsageError
from paceline.modes import ModeSpec, parse_mode
from paceline.plan.job import Job

__all__ = ["ModelFacts", "Plan", "RolePlan", "make_plan"]


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """One process of the run and its place."""

    role: Literal["server", "worker"]
    rank: int
    host: str = "localhost"
    threads: int

    @property
    def name(self) -> str:
        """As in messages: `worker:1`."""
        return f"{self.role}:{self.rank}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A job that can be had: immutable, printable, made by `make_plan`."""

    job: Job
    roles: tuple[RolePlan, ...]
    """Servers first, then workers, each in rank order."""
    mode: ModeSpec
    warnings: tuple[str, ...] = ()
    """What will work but is probably not what the user wants; for people, one line each."""

    @property
    def servers(self) -> tuple[RolePlan, ...]:
        """The servers, in rank order."""
        return tuple(role for role in self.roles if role.role == "server")

    @property
    def workers(self) -> tuple[RolePlan, ...]:
        """The workers, in rank order."""
        return tuple(role for role in self.roles if role.role == "worker")

    @property
    def in_place(self) -> bool:
        """Whether workers read the parameters in the servers' memory, so that nothing is copied."""
        return self.mode.in_place and self.shares_memory

    @property
    def shares_memory(self) -> bool:
        """Whether gradients and parameters travel through shared memory."""
        one_host = len({role.host for role in self.roles}) == 1
        return self.job.link != "tcp" and one_host

    def to_json(self) -> dict[str, Any]:
        """As plain data, for run.json."""
        return {
            "job": self.job.to_json(),
            "roles": [asdict(role) for role in self.roles],
            "mode": str(self.mode),
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What a script's model and data look like: known once it has called `prepare`."""

    parameters: int
    """Trainable numbers."""
    nbytes: int
    tensors: int
    slices: int
    samples: int | None
    """Per epoch; None for an iterable data set."""
    batch_size: int | None
    """Of one worker."""
    optimizer: str
    shards: tuple[tuple[int, int], ...]
    """(slices, bytes) of each server."""

    def steps_per_epoch(self, workers: int) -> int | None:
        """Steps of one worker in an epoch when all go equally fast; None if nobody can know."""
        if self.samples is None or self.batch_size is None:
            return None
        return -(-self.samples // (self.batch_size * workers))


def make_plan(job: Job) -> Plan:
    """The plan for a job on this machine.

    Reads the file system (is the script there?) and the number of cores; starts nothing.

    Raises:
        UsageError: settings that contradict each other.
        PlanError: the script cannot be run here.
    """
    mode = parse_mode(job.mode)
    mode.check(job.workers)
    if job.clip_norm is not None and mode.name != "bsp":
        raise UsageError(
            f"clip_norm={job.clip_norm:g} clips the average of all workers' gradients, which only "
            f"bsp has; got mode={mode}. Use mode bsp, or leave clip_norm out and call "
            "torch.nn.utils.clip_grad_norm_ in the script, which clips each worker's own gradient"
        )
    if job.script is not None:
        _check_script(job.script)
    cores = _cores()
    # The workers wait while the servers update, and the other way round: both may have every core.
    servers = [RolePlan(role="server", rank=rank, threads=cores) for rank in range(job.servers)]
    threads = job.threads or max(1, cores // job.workers)
    workers = [RolePlan(role="worker", rank=rank, threads=threads) for rank in range(job.workers)]
    return Plan(job=job, roles=(*servers, *workers), mode=mode, warnings=_warnings(job, cores))


def _check_script(script: str) -> None:
    path = Path(script)
    where = f" (looked in {Path.cwd()})" if not path.is_absolute() else ""
    try:
        if path.is_dir():
            raise PlanError(
                f"script {script!r} is a directory; name the Python file in it to run"
                + _suggestion(sorted(path.glob("*.py")))
            )
        with path.open("rb"):
            pass
    except FileNotFoundError:
        near = sorted(path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise PlanError(f"script {script!r} does not exist{where}{_near(path, near)}") from None
    except OSError as error:
        raise PlanError(
            f"script {script!r} cannot be read: {error.strerror or error}. "
            "Check its permissions and those of its directories"
        ) from error


def _near(path: Path, there: list[Path]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(path.stem, [each.stem for each in there], n=3)
    return _suggestion([path.parent / f"{stem}.py" for stem in close])


def _suggestion(paths: list[Path]) -> str:
    return f". Did you mean {' or '.join(map(str, paths[:3]))}?" if paths else ""


def _warnings(job: Job, cores: int) -> tuple[str, ...]:
    found = []
    if job.servers > cores:
        found.append(
            f"servers={job.servers} share {cores} cores; one server already uses every core, so on "
            "one machine more servers than cores only cost memory and messages"
        )
    if job.threads is not None and job.threads > cores:
        found.append(
            f"threads={job.threads} per worker, but this machine has {cores} cores for us; "
            "threads that share a core slow each other down"
        )
    return tuple(found)


def _cores() -> int:
    # What we may use, not what is built in: taskset and container limits narrow it.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
