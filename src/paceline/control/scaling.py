"""Whether a run can have another number of workers or servers. Raises UsageError with the reason if not."""

from dataclasses import replace
from typing import NamedTuple

from paceline.core.modes import ModeSpec
from paceline.core.run_decisions import RunState
from paceline.core.run_machine import RunMachine
from paceline.exceptions import PlanError, UsageError
from paceline.observe import RunStatus
from paceline.plan import Plan
from paceline.plan.capacity import Demand, HostLimits, check_capacity
from paceline.plan.host import read_limits

__all__ = ["Scale", "check_scale", "told_change"]


class Scale(NamedTuple):
    """Numbers of roles that the run is to have."""

    workers: int
    servers: int | None
    """None: as many as there are."""


def check_scale(
    plan: Plan,
    machine: RunMachine,
    status: RunStatus,
    mode: ModeSpec,
    workers: int | None,
    servers: int | None,
) -> Scale:
    """The wanted numbers, if the run can have them.

    Args:
        workers: as a user's request has it; None: as many as there are. So with `servers`.
    """
    if workers is None and servers is None:
        raise UsageError("a scale request needs a number of workers or of servers")
    if servers is not None:
        _check_servers(plan, machine, mode, servers)
    present, data = len(machine.working), status.samples_per_epoch
    workers = present if workers is None else workers
    if workers < 1:
        raise UsageError(f"workers={workers}: a run needs at least one worker")
    if workers != present and (mode.grouped or mode.by_epoch):
        raise UsageError(
            f"in mode {mode} the workers are agreed on when the run begins: stop it, and `paceline "
            f"resume` it with --workers {workers}"
        )
    if workers != present and status.stream:
        raise UsageError(
            "the run's data are a stream (IterableDataset). Every worker counts out its part of it for "
            f"{present} workers, from the first batch on; with another number, "
            f"batches would be lost or done twice. Stop it, and `paceline resume` it with --workers "
            f"{workers} (which begins its epoch again), or make the data a map-style data set"
        )
    mode.check(workers)
    if data is not None and data < workers:
        raise UsageError(f"{workers} workers but only {data} samples: every worker needs at least one")
    _check_running(machine)
    _check_room(plan, machine, workers, len(machine.serving) if servers is None else servers)
    return Scale(workers, servers)


def told_change(role: str, before: set[int], after: set[int]) -> str | None:
    """The message that roles join or leave; None if none do."""
    come = ", ".join(f"{role}:{rank}" for rank in sorted(after - before))
    go = ", ".join(f"{role}:{rank}" for rank in sorted(before - after))
    if not come and not go:
        return None
    what = " and ".join(
        ([f"{come} join{'s' * (len(after - before) == 1)}"] if come else [])
        + ([f"{go} leave{'s' * (len(before - after) == 1)}"] if go else [])
    )
    return f"from {len(before)} to {len(after)} {role}s: {what}"


def _check_servers(plan: Plan, machine: RunMachine, mode: ModeSpec, servers: int) -> None:
    job = plan.job
    if servers < 1:
        raise UsageError(f"servers={servers}: a run needs at least one server")
    if servers <= job.replicas:
        raise UsageError(
            f"servers={servers}: with replicas={job.replicas} every parameter is on {job.replicas + 1} "
            f"servers, so at least {job.replicas + 1} must stay"
        )
    reason = None
    if mode.grouped or mode.by_epoch or mode.needs_memory:
        reason = f"in mode {mode} the servers are agreed on when the run begins"
    elif mode.remembers_reads:
        reason = f"in mode {mode} servers remember what every worker read last, which is not handed on"
    elif job.transfer.pipelined or job.compress_replies:
        reason = "with overlap, prefetch or compress_replies slices cannot change hands"
    if reason is not None:
        raise UsageError(f"{reason}: stop the run, and `paceline resume` it with --servers {servers}")
    _check_running(machine)


def _check_running(machine: RunMachine) -> None:
    if machine.state is not RunState.RUNNING:
        raise UsageError(f"the run is {machine.state.value}: try again when it is running")


def _check_room(plan: Plan, machine: RunMachine, workers: int, servers: int) -> None:
    """Whether this host can carry the roles that would join."""
    joining_workers = max(0, workers - len(machine.working))
    joining_servers = max(0, servers - len(machine.serving))
    if not joining_workers and not joining_servers:
        return
    limits = read_limits()
    demand = Demand(
        workers=workers,
        servers=servers,
        worker_threads=1,
        server_threads=1,
        shares_memory=plan.shares_memory,
    )
    try:
        # The limit of open files is per process, so it counts for all roles. Of the rest, running roles
        # have their part already.
        check_capacity(demand, HostLimits(open_files=limits.open_files))
        joining = replace(demand, workers=joining_workers, servers=joining_servers)
        check_capacity(joining, replace(limits, open_files=None))
    except PlanError as error:
        raise UsageError(f"of roles that would join, {error}") from None
