"""Enters what roles report of their progress into the status."""

from paceline.comm.faults import Faults
from paceline.comm.messages import LeadReport, LoggedMetrics, ServerReport, WorkerReport
from paceline.control.publishing import StatusPublisher
from paceline.control.run_record import RunRecord
from paceline.control.training_guard import TrainingGuard
from paceline.observe.record.thinning import pushes_thinning

__all__ = ["RoleReports"]


class RoleReports:
    """Reports of one run's roles.

    Args:
        records_mb: budget of the run's records, which tells how many pushes are left out of them.
        own_faults: injected faults of the controller.
    """

    def __init__(
        self,
        record: RunRecord,
        guard: TrainingGuard,
        publisher: StatusPublisher,
        *,
        records_mb: int,
        own_faults: Faults,
    ) -> None:
        self._record = record
        self._guard = guard
        self._publisher = publisher
        self._push_records = pushes_thinning(records_mb)
        self._own_faults = own_faults

    def worker(self, rank: int, report: WorkerReport) -> None:
        """Progress of a worker."""
        self._record.status.workers[rank].hear(report._asdict())
        self._publisher.hear_ledger(rank, report.ledger)
        self._record.spans_broken(report.spans_broken)
        self._record.values_broken(report.values_broken)

    def metrics(self, rank: int, logged: LoggedMetrics) -> None:
        """Values that a worker's script has logged."""
        worker = self._record.status.workers[rank]
        worker.metrics.update(logged.log)
        worker.logged_at = logged.log_at
        self._guard.hear_metrics(rank, logged)

    def server(self, rank: int, report: ServerReport) -> None:
        """Progress of a server; nothing if it has left."""
        if (server := self._record.status.servers.get(rank)) is not None:
            server.updates, server.update_s = report.updates, report.update_s
            self._record.spans_broken(report.spans_broken)

    def lead(self, report: LeadReport) -> None:
        """Progress of the run."""
        status = self._record.status
        self._guard.hear_pushes(report)
        if report.samples > status.samples:
            status.progressed_s = self._publisher.elapsed_s
        status.hear({**report._asdict(), "leases": list(report.leases)})
        if left_out := report.pushes - self._push_records.rows_of(report.pushes):
            status.left_out["pushes"] = left_out
        self._own_faults.reached(status.version)
