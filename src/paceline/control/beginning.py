"""What a controller starts from: a new run, a checkpoint, or the journal of a controller that died."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.comm import Certificate, Listener, new_secret
from paceline.comm.faults import Faults
from paceline.control.journal import Journal
from paceline.control.processes import Credentials, Origin
from paceline.control.run_record import checkpoint_names
from paceline.control.rundir import RunDirectory
from paceline.core.run_machine import RunMachine
from paceline.engines import Handover
from paceline.observe import RunStatus, ServerStatus, WorkerStatus
from paceline.observe.record.counting import go_on_from
from paceline.observe.record.spans import unix_clock_ns
from paceline.plan import Plan, certificates_of

__all__ = ["Beginning", "Predecessor", "new_run", "taken_over"]


@dataclass(frozen=True, kw_only=True)
class Predecessor:
    """The controller that died."""

    pid: int
    handover: Handover
    going_back: str | None
    """Why it was going back to a checkpoint; None: it was not."""
    unanswered: Sequence[str]
    """Switch requests that it has not answered."""


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """The state that a controller is built from."""

    status: RunStatus
    machine: RunMachine
    origin: Origin
    started: float
    """On this host's monotonic clock."""
    clock_ns: int
    credentials: Credentials
    listener: Listener
    own_faults: Faults
    """Injected faults of the controller itself: they hit the first one only."""
    meeting_port: int | None = None
    """The port that is reserved already."""
    bad_after: int | None = None
    """See TrainingGuard."""
    predecessor: Predecessor | None = None


def new_run(plan: Plan, run: RunDirectory, resume: Path | None, *, address: str | None = None) -> Beginning:
    """A run that starts now.

    Args:
        resume: the checkpoint to start from.
        address: where roles of other hosts reach this one; None: there are none.
    """
    status = _first_status(plan, run)
    origin = Origin() if resume is None else Origin.at(resume)
    if resume is not None:
        status.samples = status.samples_before = origin.samples
        go_on_from(status, run.known_status())
    status.first_losses = run.known_status().first_losses
    return Beginning(
        status=status,
        machine=_machine(plan),
        origin=origin,
        started=time.monotonic(),
        clock_ns=unix_clock_ns(),
        credentials=Credentials(new_secret(), certificates_of(plan, run.id)),
        listener=Listener(tcp=False) if address is None else Listener(host=address),
        own_faults=Faults.from_environment().of("controller", 0, 0),
    )


def taken_over(plan: Plan, run: RunDirectory, handover: Handover, listener: Listener) -> Beginning:
    """A run whose controller died: the state in its journal, and the roles that the fork server has.

    Training has not stopped: servers and workers go on, and dial the socket that this process inherits.

    Args:
        run: its lock is held.

    Raises:
        UsageError: the journal cannot be read.
    """
    journal = Journal(run.path)
    known = journal.read()
    status = _first_status(plan, run)
    for written in (run.read_status(), status.to_json()):
        with contextlib.suppress(ValueError):
            status = RunStatus.from_json({**written, **known.status})
            break
    machine = _machine(plan)
    try:
        machine.restore(known.machine)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise journal.not_understood(error) from error
    for left in handover.roles:
        machine.seen(left.role, left.rank, left.incarnation)
    for rank in machine.incarnations:
        status.workers.setdefault(rank, WorkerStatus(rank=rank))
    status.checkpoints = checkpoint_names(run)
    certificates = handover.succession.certificates.items()
    return Beginning(
        status=status,
        machine=machine,
        origin=Origin.from_json(known.origin),
        started=known.started,
        clock_ns=known.clock_ns,
        credentials=Credentials(
            bytes.fromhex(handover.succession.secret),
            {role: Certificate.from_json(shown) for role, shown in certificates},
        ),
        listener=listener,
        own_faults=Faults(),
        meeting_port=known.meeting_port,
        bad_after=known.bad_after,
        predecessor=Predecessor(
            pid=known.pid, handover=handover, going_back=known.going_back, unanswered=known.switching
        ),
    )


def _first_status(plan: Plan, run: RunDirectory) -> RunStatus:
    status = RunStatus(run_dir=str(run.path), run_id=run.id, mode=str(plan.mode))
    status.workers = {rank: WorkerStatus(rank=rank) for rank in range(plan.job.workers)}
    status.servers = {rank: ServerStatus(rank=rank) for rank in range(len(plan.servers))}
    status.checkpoints = checkpoint_names(run)
    return status


def _machine(plan: Plan) -> RunMachine:
    return RunMachine(
        servers=len(plan.servers),
        workers=plan.job.workers,
        max_restarts=plan.job.max_restarts,
        groups=plan.groups,
        replicas=plan.job.replicas,
    )
