"""What a job becomes before anything starts: which roles, where, with how many threads."""

import itertools
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from paceline.comm.faults import Faults
from paceline.comm.impairment import LINK_CONDITIONS, LinkConditions
from paceline.comm.protection import BLOCKS, protection
from paceline.core.local_spec import parse_local
from paceline.core.modes import ModeSpec, parse_mode, parse_schedule
from paceline.exceptions import PlanError, UsageError
from paceline.plan.capacity import Demand, HostLimits, check_capacity
from paceline.plan.devices import on_cuda
from paceline.plan.host import count_gpus, read_limits
from paceline.plan.job import Job
from paceline.plan.program_check import check_program
from paceline.plan.rules import check_modes
from paceline.plan.security import check_tls

__all__ = [
    "LOCAL_HOST",
    "ModelFacts",
    "Plan",
    "RolePlan",
    "available_cores",
    "make_plan",
    "threads_of_workers",
]

LOCAL_HOST = "localhost"
"""Id of this host. Others are `host-1`, `host-2`, …, in the order in which they join."""


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """One process of the run and its place."""

    role: Literal["server", "worker"]
    rank: int
    host: str = LOCAL_HOST
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
    groups: tuple[tuple[int, ...], ...] = ()
    """Ranks of the workers that all-reduce among themselves, in the modes that have groups."""
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
        return self.one_host and self.job.link != "tcp" and not self.job.transfer.inline

    @property
    def one_host(self) -> bool:
        """Whether all roles are on one host."""
        return len({role.host for role in self.roles}) == 1

    @property
    def uses_mps(self) -> bool:
        """Whether the roles of a host share its GPUs by NVIDIA MPS, where that is to be had."""
        return self.job.mps and on_cuda(self.job)

    def to_json(self) -> dict[str, Any]:
        """As plain data, for run.json."""
        return {
            "job": self.job.to_json(),
            "roles": [asdict(role) for role in self.roles],
            "mode": str(self.mode),
            "groups": [list(group) for group in self.groups],
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read back what `to_json` made, as it was decided then: nothing is looked at again."""
        return cls(
            job=Job.from_json(data["job"]),
            roles=tuple(RolePlan(**role) for role in data["roles"]),
            mode=parse_mode(data["mode"]),
            groups=tuple(tuple(group) for group in data["groups"]),
            warnings=tuple(data["warnings"]),
        )


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
        """Steps of one worker in an epoch when all go equally fast; None if that cannot be known."""
        if self.samples is None or self.batch_size is None:
            return None
        return -(-self.samples // (self.batch_size * workers))


def make_plan(job: Job, *, run_id: str | None = None, limits: HostLimits | None = None) -> Plan:
    """The plan for a job on this machine.

    Reads the file system (is the script there? its certificates?), the number of cores and the limits of this
    host; starts nothing.

    Args:
        run_id: of the run that goes on; None for a new one.
        limits: what the host has left; None: what this one has.

    Raises:
        UsageError: settings that contradict each other.
        PlanError: the script cannot be run here, or this host cannot carry that many roles.
    """
    mode = parse_mode(job.mode)
    schedule = parse_schedule(mode, job.schedule)
    schedule.check(job.workers)
    check_modes(job, schedule)
    check_program(job)
    _check_gpus(job)
    _check_environment(job, mode)
    tls_warnings = check_tls(job, run_id)
    groups = _groups(job, mode)
    cores = available_cores()
    # The workers wait while the servers update, and the other way round: both may have every core.
    count = 1 if mode.serverless else job.servers
    hosts_of_workers = _dealt_out(job, job.workers)
    hosts_of_servers = _dealt_out(job, count)
    here = max(1, hosts_of_workers.count(LOCAL_HOST))
    threads = threads_of_workers(job, cores, here)
    shares_memory = job.link != "tcp" and not job.transfer.inline
    demand = Demand(
        workers=here,
        servers=hosts_of_servers.count(LOCAL_HOST),
        worker_threads=max(threads, parse_local(job.local).count, job.pipeline),
        server_threads=cores,
        shares_memory=shares_memory,
    )
    check_capacity(demand, read_limits() if limits is None else limits)
    servers = [
        RolePlan(role="server", rank=rank, host=host, threads=cores)
        for rank, host in enumerate(hosts_of_servers)
    ]
    workers = [
        RolePlan(role="worker", rank=rank, host=host, threads=threads)
        for rank, host in enumerate(hosts_of_workers)
    ]
    return Plan(
        job=job,
        roles=(*servers, *workers),
        mode=mode,
        groups=groups,
        warnings=(*_warnings(job, mode, cores), *_local_warnings(job, threads), *tls_warnings),
    )


def threads_of_workers(job: Job, cores: int, workers: int) -> int:
    """CPU threads of each worker of a host.

    Args:
        cores: of the host.
        workers: on the host.
    """
    return job.threads or _threads_wished() or max(1, cores // workers)


def _dealt_out(job: Job, count: int) -> list[str]:
    """The host of each rank. The first rank is always on this one."""
    hosts = [LOCAL_HOST, *(f"host-{number}" for number in range(1, job.hosts))]
    if job.placement == "blocks":
        return [hosts[rank * job.hosts // max(count, job.hosts)] for rank in range(count)]
    return [hosts[rank % job.hosts] for rank in range(count)]


def _check_gpus(job: Job) -> None:
    """PlanError if the job wants a GPU and this host has none."""
    if (on_cuda(job) or job.server_device == "cuda") and not count_gpus():
        wish = f"device={job.device}" if on_cuda(job) else "server_device=cuda"
        raise PlanError(
            f"{wish}: NVIDIA's driver shows no GPU on this host. Leave it out to train on the CPU, or look "
            "whether nvidia-smi lists the GPU."
        )


def _check_environment(job: Job, mode: ModeSpec) -> None:
    """Read what the roles will read from the environment: what is wrong there is said at once."""
    Faults.from_environment()
    conditions = LinkConditions.from_environment()
    if conditions is not None and (job.link == "shm" or mode.needs_memory):
        raise UsageError(
            f"{LINK_CONDITIONS}={conditions} emulates a network, and link=shm and mode hogwild share memory: "
            "unset it, or use link auto or tcp and another mode"
        )


def _groups(job: Job, mode: ModeSpec) -> tuple[tuple[int, ...], ...]:
    """The groups that the workers are dealt to."""
    if not mode.grouped:
        return ()
    count = job.groups or 1  # one a host, and all roles are on one
    if count > job.workers:
        raise UsageError(
            f"groups={count} for workers={job.workers}: every group needs at least one worker; add workers "
            f"or use groups={job.workers} or less"
        )
    if mode.inner is not None:
        try:
            mode.inner.check(count)
        except UsageError as error:
            raise UsageError(f"mode {mode} runs {mode.inner} between groups={count}: {error}") from None
    each, extra = divmod(job.workers, count)
    ends = [each * g + min(g, extra) for g in range(count + 1)]
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends))


def _warnings(job: Job, mode: ModeSpec, cores: int) -> tuple[str, ...]:
    found = []
    if mode.serverless and job.servers > 1:
        found.append(
            f"mode {mode} does not use parameter servers: --servers {job.servers} is ignored; one process "
            "keeps leases and checkpoints"
        )
    elif -(-job.servers // job.hosts) > cores:
        found.append(
            f"servers={job.servers} share {cores} cores; one server already uses every core, so on "
            "one machine more servers than cores only cost memory and messages"
        )
    if -(-job.workers // job.hosts) > cores:
        found.append(
            f"workers={job.workers} share {cores} cores: they take turns, and all of them together are not "
            f"faster than {cores}"
        )
    if job.threads is not None and job.threads > cores:
        found.append(
            f"threads={job.threads} per worker, but this machine has {cores} cores for us; "
            "threads that share a core slow each other down"
        )
    if job.pin and not hasattr(os, "sched_setaffinity"):
        found.append("pin is ignored: this system cannot keep a process on certain cores (Linux can)")
    if protection.blocks:
        found.append(
            f"{BLOCKS} is set: in every second {protection.blocks} steps NaN and Inf reach the model. "
            "Only the benchmark of what checks cost may do that: unset it"
        )
    return tuple(found)


def _local_warnings(job: Job, threads: int) -> tuple[str, ...]:
    spec = parse_local(job.local)
    count, setting, who = spec.count, f"local={spec}", "replicas"
    if job.pipeline > 1:
        count, setting, who = job.pipeline, f"pipeline={job.pipeline}", "stages"
    if count <= threads:
        return ()
    return (
        f"{setting} in workers of {threads} CPU threads each: the {who} take turns on the cores. Give "
        f"--threads {count} if a worker has that many cores, or fewer workers",
    )


def _threads_wished() -> int | None:
    """OMP_NUM_THREADS, if it is set: the first of several numbers, as OpenMP has it."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else None


def available_cores() -> int:
    """Cores that this process may use, not those built in: taskset and container limits narrow it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
