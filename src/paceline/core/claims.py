"""What a worker claims of its own push, within what its leases allow."""

from paceline.core.events import Push
from paceline.core.leases import LeaseBook

__all__ = ["MOST_OF_A_BATCH", "believed"]

MOST_OF_A_BATCH = 1 << 20
"""Maximum number of samples of a batch, where leases are on whole batches of a script's own batch sampler:
only the worker knows how many samples one of those has."""


def believed(push: Push, book: LeaseBook) -> tuple[Push, str | None]:
    """A push with no more samples than its worker can have computed it from, and what there is to say of it.

    A push was computed from at most a batch for each lease that its worker holds. One without any, or with
    leases that the worker has lost, is at most a batch.
    """
    most = book.most_samples(push.id.worker, push.leases, MOST_OF_A_BATCH)
    if push.samples <= most:
        return push, None
    return push._replace(samples=most), (
        f"worker:{push.id.worker} says that it computed a step from more samples than its leases are on: "
        "as many as those can have are counted. Its process does not do what the others do."
    )
