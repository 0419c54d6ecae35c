"""Judges what was trained: every sample of every epoch exactly once, whatever happened."""

from collections.abc import Mapping

from torch import Tensor

from tests.histories.script import ENORMOUS

__all__ = ["problems"]

_REPEATED = ENORMOUS / 1e4
"""Below it: what a mode may make of one step. Above: a sample that was applied again."""


_OVERWRITTEN = 0.1
"""The part of an epoch's samples that may leave no mark where workers write without locks."""


def problems(
    model: Mapping[str, Tensor],
    *,
    samples: int,
    epochs: int,
    normalised: bool = False,
    lossy: bool = False,
) -> list[str]:
    """What is wrong with the trained parameters, in words; at most a few.

    Args:
        normalised: the servers' optimizer takes steps of equal length (Adagrad), so a repeated sample
            shows as a step of twice the length.
        lossy: workers write without locks (hogwild), so one may overwrite what another has just written:
            a few samples may leave no mark.
    """
    found = []
    for epoch in range(epochs):
        marks = model[f"epochs.{epoch}"]
        assert marks.shape[0] == samples, marks.shape
        applied = (marks != 0).sum(dim=1)
        lost = (applied == 0).nonzero().flatten().tolist()
        if lossy and len(lost) <= samples * _OVERWRITTEN:
            lost = []
        shared = (applied > 1).nonzero().flatten().tolist()
        limit = 1.5 if normalised else _REPEATED
        again = (marks.abs().amax(dim=1) > limit).nonzero().flatten().tolist()
        if not bool(marks.isfinite().all()):
            found.append(f"epoch {epoch}: numbers that are not finite")
        for what, which in (
            ("never applied", lost),
            ("applied by several workers", shared),
            ("applied again by the same worker", again),
        ):
            if which:
                found.append(f"epoch {epoch}: {len(which)} of {samples} samples {what}: {which[:8]}")
    return found[:6]
