"""The configuration that roles are started with: fields of ServerConfig, WorkerConfig and
ReaderConfig, as plain JSON."""

from pathlib import Path
from typing import NamedTuple

from paceline.comm import Address
from paceline.control.attempts import Attempt
from paceline.control.host_choice import LocalPlace
from paceline.control.rundir import RunDirectory
from paceline.core.json_types import JsonObject
from paceline.engines import HostInfo
from paceline.observe.record.thinning import value_rows
from paceline.plan import Plan
from paceline.plan.job_settings import settings_for
from paceline.plan.option import RoleKind
from paceline.plan.program_check import search_path

__all__ = ["CommonConfig", "reader_config", "server_config", "worker_config"]

_LAST_RESORT_S = 10.0
"""Seconds that a worker waits for the lead beyond the deadline of any role that the lead might report."""


class CommonConfig(NamedTuple):
    """The part that the controller knows best, and every role gets."""

    rank: int
    incarnation: int
    mode: str
    servers: int
    workers: int
    clock_ns: int
    faults: str


def server_config(
    plan: Plan,
    run: RunDirectory,
    common: CommonConfig,
    lead: int,
    resume: Path | None,
    host: HostInfo,
    store: Address | None,
) -> JsonObject:
    """A server's.

    Args:
        resume: the checkpoint to begin from.
        host: where it runs.
        store: where it reaches the store, on another host than the controller's.
    """
    job = plan.job
    return {
        **common._asdict(),
        **_of_any_role(plan, run, "server", common.rank),
        "worker_threads": sum(role.threads for role in plan.workers),
        "run_dir": str(run.path),
        "lead": lead,
        "resume": None if resume is None else str(resume),
        "import_from": search_path(job) if job.optimizers else None,
        **({} if host.address is None else {"host": host.address, "threads": host.cores}),
        **({} if job.hosts == 1 else {"server_device": "cpu"}),
        "store": None if store is None else store.to_json(),
    }


def worker_config(
    plan: Plan,
    run: RunDirectory,
    common: CommonConfig,
    meeting_at: tuple[str, int],
    attempt: Attempt,
    steps_before: int,
    place: LocalPlace,
) -> JsonObject:
    """A worker's; see `server_config`.

    Args:
        meeting_at: address and port where processes of the script's own torch.distributed meet.
        steps_before: its steps at the checkpoint that the run goes on from, if it did not write them there.
        place: among the workers of its host.
    """
    job = plan.job
    return {
        **common._asdict(),
        **_of_any_role(plan, run, "worker", common.rank),
        # All workers partition the parameters for the servers that the run began with.
        "servers": len(plan.servers),
        "patience_s": (1 + job.max_restarts) * job.deadline_s + _LAST_RESORT_S,
        "tells_norms": job.norm_bound is not None,
        "master": [*meeting_at] if job.torchrun_env else None,
        "local_rank": place.rank,
        "local_workers": place.workers,
        "host_rank": place.host,
        "values_in": str(run.path / "raw"),
        "value_rows": value_rows(job.records_mb, job.workers),
        "attempt": attempt.number,
        "replaces": attempt.after,
        "steps_before": steps_before,
        "ledger_in": str(run.path / "raw"),
        "script": job.script if job.module or job.script is None else str(Path(job.script).resolve()),
        "search": search_path(job),
    }


def reader_config(plan: Plan, run: RunDirectory, every: int, attempt: int, clock_ns: int) -> JsonObject:
    """That of the process that evaluates: fields of ReaderConfig."""
    job = plan.job
    return {
        "run": str(run.path),
        "every": every,
        "attempt": attempt,
        "workers": job.workers,
        "threads": max(1, min(role.threads for role in plan.workers)),
        "value_rows": value_rows(job.records_mb, job.workers),
        "clock_ns": clock_ns,
        "script": job.script if job.module or job.script is None else str(Path(job.script).resolve()),
        "module": job.module,
        "search": search_path(job),
        "args": list(job.args),
    }


def _of_any_role(plan: Plan, run: RunDirectory, role: RoleKind, rank: int) -> JsonObject:
    # A role that joins later is configured like the first of its kind.
    alike = [r for r in plan.roles if r.role == role]
    return {
        **settings_for(role, plan.job),
        "groups": [list(group) for group in plan.groups],
        "threads": next((r for r in alike if r.rank == rank), alike[0]).threads,
        "spans_in": str(run.path / "raw") if plan.job.spans else None,
    }
