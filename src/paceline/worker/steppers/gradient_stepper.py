"""bsp, backup, ssp, asp, sandblaster: every step is a push of the gradient."""

from collections.abc import Iterator
from typing import Any

from paceline.params import tensor_views
from paceline.worker.steppers.gradient_memory import GradientMemory
from paceline.worker.steppers.stepper import Request, Stepper

__all__ = ["GradientStepper"]


class GradientStepper(Stepper):
    """bsp, backup, ssp, asp: every step is an exchange, and the servers' optimizer makes it.

    In sandblaster a push brings nothing back: parameters change when an epoch is over, and are fetched then.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        views = tensor_views(self.memory.slot, self._layout)
        self.gradients = GradientMemory(
            self._parameters,
            views,
            self._slot,
            [t.name for t in self._layout.tensors],
            checks=self.memory.checks_gradients,
        )

    def overwritten(self) -> None:
        """The slot held parameters meanwhile."""
        super().overwritten()
        self.gradients.overwritten()

    def _step(self) -> Iterator[Request]:
        return self._exchange()

    def _exchange(self) -> Iterator[Request]:
        missing, finite = self.gradients.collect()
        self.unsent = 0
        yield Request(fetch=not self.mode.by_epoch, missing=tuple(missing), finite=finite)
