"""Whether the samples of a run can be dealt out as a mode wants it."""

from paceline.core.leases import LeaseBook
from paceline.core.modes.mode_spec import ModeSpec

__all__ = ["dealing_refusal"]


def dealing_refusal(mode: ModeSpec, book: LeaseBook | None) -> str | None:
    """Why the samples of a run cannot be dealt out as a mode does; None if they can."""
    if not mode.deals_by_speed or book is not None:
        return None
    return (
        f"mode {mode} deals batches by speed, and this run has no prepared DataLoader over a data set with a "
        "length: use the mode without batches=speed"
    )
