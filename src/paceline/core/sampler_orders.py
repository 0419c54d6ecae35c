"""SamplerOrders: all workers must draw the same order of an epoch's samples from the script's sampler."""

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.exceptions import PlanError

__all__ = ["SamplerOrders"]


@dataclass
class SamplerOrders:
    """Fingerprints of the orders that workers have drawn. One owner."""

    drawn: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Of the present epoch and later ones: the order's fingerprint, and the worker that drew it first."""

    def draw(
        self, worker: int, epoch: int, fingerprint: str, sampler: str, over: Callable[[int], bool]
    ) -> None:
        """A worker has drawn the order of an epoch, and asks for leases next.

        Args:
            over: whether an epoch has no more leases.

        Raises:
            PlanError: another worker, or the run before it was resumed, has drawn another order.
        """
        if over(epoch):
            return
        self.drawn = {e: drawn for e, drawn in self.drawn.items() if not over(e)}
        known, first = self.drawn.setdefault(epoch, (fingerprint, worker))
        if known != fingerprint:
            other = f"worker:{first} did" if first >= 0 else "the run did before it was resumed"
            raise PlanError(
                f"worker:{worker} draws another order of the samples of epoch {epoch + 1} than {other}, from "
                f"the DataLoader's sampler ({sampler}): samples would be repeated and lost. All workers must "
                "draw the same, also one that is replaced or resumed. Give the sampler a method "
                "set_epoch(epoch) from which its order follows, or let it draw from a torch.Generator, numpy "
                "Generator or random.Random that is an attribute of it: Paceline seeds those for every epoch."
            )

    def snapshot(self) -> dict[str, str]:
        """For a checkpoint."""
        return {str(epoch): fingerprint for epoch, (fingerprint, _) in self.drawn.items()}

    def restore(self, snapshot: dict[str, str]) -> None:
        """Go on from a checkpoint."""
        self.drawn = {int(epoch): (str(fingerprint), -1) for epoch, fingerprint in snapshot.items()}
