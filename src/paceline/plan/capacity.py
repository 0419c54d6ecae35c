"""Whether a host can carry the roles of a plan: processes, open files, memory. Pure: numbers in, verdict out.

The estimates are what roles need at least, before the model is known, so that nothing is refused that would
have worked. A run that starts may still run out of memory with a large model: `paceline plan` shows that.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.exceptions import PlanError

__all__ = ["Demand", "HostLimits", "Limit", "check_capacity", "model_bytes"]

ROLE_BYTES = 20_000_000
"""Memory of a role that shares torch with the fork server, before it has a model (docs/benchmarks.md)."""
BASE_BYTES = 400_000_000
"""Memory of the controller and the fork server, which has torch loaded."""
_SPARE_FILES = 48
"""Logs, libraries, pipes and listening sockets of any role."""
_BASE_TASKS = 4


@dataclass(frozen=True, kw_only=True)
class Limit:
    """How much of something is left on a host, and who says so."""

    left: int
    source: str
    """For people: the limit's name and value, as in `ulimit -n 1,024`."""
    remedy: str
    """What to do to have more of it."""


@dataclass(frozen=True, kw_only=True)
class HostLimits:
    """What a host has left for a run. None: it cannot be read here, and is not checked."""

    tasks: Limit | None = None
    """Processes and threads, which count the same for every limit that systems have."""
    open_files: Limit | None = None
    """Of one process."""
    memory: Limit | None = None
    """Bytes."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a plan asks of its host."""

    workers: int
    servers: int
    worker_threads: int
    server_threads: int
    shares_memory: bool
    """Otherwise a server has a thread for every worker, but no memory of it."""

    @property
    def roles(self) -> int:
        """Number of processes of the run, without the controller and the fork server."""
        return self.workers + self.servers

    @property
    def tasks(self) -> int:
        """Processes and threads of all roles."""
        of_server = self.server_threads + (0 if self.shares_memory else self.workers)
        return _BASE_TASKS + self.servers * of_server + self.workers * self.worker_threads

    @property
    def open_files(self) -> tuple[str, int]:
        """The role that needs the most open files, and how many these are."""
        of_server = self.workers * (2 if self.shares_memory else 1) + self.servers
        needs = {"the controller": self.roles, "a server": of_server, "a worker": self.servers}
        most = max(needs, key=lambda role: needs[role])
        return most, needs[most] + _SPARE_FILES

    @property
    def memory(self) -> int:
        """Bytes, before there is a model."""
        return BASE_BYTES + self.roles * ROLE_BYTES


def check_capacity(demand: Demand, host: HostLimits) -> None:
    """Refuse what the host cannot carry.

    Raises:
        PlanError: with what is needed, what is there, which limit says so, how to raise it, and how many
            workers would fit.
    """
    problems = [*_problems(demand, host)]
    if not problems:
        return
    asked = f"workers={demand.workers:,}, servers={demand.servers:,}"
    lines = "".join(f"\n  {problem}" for problem in problems)
    most = _most_workers(demand, host)
    if most:
        way_out = (
            f"With servers={demand.servers:,} at most workers={most:,} fit: use fewer, or raise the limit"
        )
    else:
        way_out = "Use fewer workers and servers, or raise the limit"
    raise PlanError(f"this host cannot carry {demand.roles:,} roles ({asked}):{lines}\n{way_out}.")


def model_bytes(nbytes: int, *, workers: int, in_place: bool, shares_memory: bool) -> int:
    """Memory for the parameters and gradients of all roles, without optimizer state and activations.

    Args:
        nbytes: of the model.
        in_place: workers read the parameters in the servers' memory.
        shares_memory: servers read gradients in the workers' memory.
    """
    of_worker = nbytes if in_place else 2 * nbytes
    at_server = 0 if shares_memory else 2 * nbytes  # what came from a worker, and what goes to it
    return nbytes + workers * (of_worker + at_server)


def _problems(demand: Demand, host: HostLimits) -> Iterator[str]:
    if (limit := host.tasks) is not None and demand.tasks > limit.left:
        yield (
            f"processes and threads: {demand.tasks:,} are needed, {max(0, limit.left):,} are left "
            f"({limit.source}). {limit.remedy}"
        )
    role, files = demand.open_files
    if (limit := host.open_files) is not None and files > limit.left:
        yield (
            f"open files: {role} needs {files:,}, {limit.left:,} are allowed ({limit.source}). {limit.remedy}"
        )
    if (limit := host.memory) is not None and demand.memory > limit.left:
        yield (
            f"memory: {_gb(demand.memory)} are needed ({ROLE_BYTES // 10**6} MB for each role, without its "
            f"model), {_gb(max(0, limit.left))} are left ({limit.source}). {limit.remedy}"
        )


def _most_workers(demand: Demand, host: HostLimits) -> int:
    """The largest number of workers that would fit beside these servers; 0 if none does."""

    def fits(workers: int) -> bool:
        return not any(_problems(replace(demand, workers=workers), host))

    low, high = 0, demand.workers
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f} GB"
