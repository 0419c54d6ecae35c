"""The leader's report of how far the run is."""

from collections.abc import Iterable

from paceline.comm.messages import LeadReport
from paceline.core.decider import Decider
from paceline.ps.adoption import Offer
from paceline.ps.executor import Executor

__all__ = ["progress_of"]

_MOST_STALENESS = 64
"""Maximum number of different values of staleness in a report."""


def progress_of(
    decider: Decider, executor: Executor, model: Offer | None, norms: Iterable[tuple[int, float]]
) -> LeadReport:
    """The report.

    Args:
        model: what the run trains; None if it has no model yet.
        norms: of gradients since the last report: (worker, norm).
    """
    totals, book = decider.totals, decider.book
    return LeadReport(
        version=decider.version,
        epoch=decider.epoch,
        samples=totals.samples,
        pushes=totals.pushes,
        dropped=totals.dropped,
        dropped_of=dict(totals.dropped_of),
        refused=totals.refused,
        norms=tuple(norms),
        skipped=totals.skipped,
        lost=executor.lost,
        update_s=round(executor.update_s, 6),
        staleness={k: totals.staleness[k] for k in sorted(totals.staleness)[:_MOST_STALENESS]},
        data=model.data if model else None,
        leases=tuple(book.accounts()) if book else (),
        earlier_epochs=book.earlier() if book else {},
        parameters=executor.layout.numel if executor.layout else 0,
    )
