"""Sandblaster on the lead: an epoch's gradients are added up, and its end is one iteration of L-BFGS.

    add … add ──the epoch is over──► ask ──answers of all servers──► vectors: w is the next point

The lead knows samples and scalars; gradients and all other vectors are on the servers (`Shard.run`). Pure, as
the decider is.
"""

from collections.abc import Sequence
from typing import Any, Self

from paceline.core.modes.lbfgs import Answer, Lbfgs, Ops, merge_answers
from paceline.core.steps import AskStep, Steps, VectorsStep

__all__ = ["Descent"]


_NEWS = {
    "converged": "L-BFGS has converged: the gradient of the whole data set is zero within tolerance_grad, or "
    "no step gains more than tolerance_change. The parameters stay as they are; further epochs only evaluate "
    "them again.",
    "stuck": "L-BFGS cannot step from the present parameters: the gradient of an epoch is not finite there, "
    "or a part of it was lost. They stay as they are, and the next epoch evaluates them again. If it stays "
    "so, look for NaN in the loss, or start from other weights.",
}


class Descent:
    """One minimisation: what is in the sum so far, and the iteration that comes of it."""

    def __init__(self, driver: Lbfgs) -> None:
        self.driver = driver
        self.asking = False
        """Whether servers have been asked and have not all answered: w is about to change."""
        self.outcome = ""
        """Of the last iteration (`Move.outcome`)."""
        self._samples = 0
        self._whole = True
        self._asked: Ops = []
        self._restarted = False

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Self:
        """A new one.

        Args:
            settings: of the parameter group that workers offer, named as in torch.optim.LBFGS. Without a
                line_search_fn it takes the steps of that class; any other one means the driver's own.

        Raises:
            UsageError: they make no sense.
        """
        return cls(
            Lbfgs(
                lr=float(settings["lr"]),
                history=int(settings["history_size"]),
                line_search=None if settings["line_search_fn"] is None else "backtrack",
                tolerance_grad=float(settings["tolerance_grad"]),
                tolerance_change=float(settings["tolerance_change"]),
            )
        )

    # An epoch

    def add(self, samples: int) -> None:
        """A gradient of so many samples is in the sum."""
        self._samples += samples

    def spoil(self) -> None:
        """The sum lacks samples that it should have: this point cannot be judged by it."""
        self._whole = False

    def evaluate(self) -> Steps:
        """The epoch is over: the servers' next step. None if nobody computed anything."""
        if self._restarted or not self._whole:
            return self._decide([])
        if not self._samples:
            return []
        self.asking = True
        self._asked = [["scale", 1 / self._samples, "g"], *self.driver.ask()]
        return [AskStep(self._asked)]

    def answered(self, parts: Sequence[Sequence[Answer]]) -> Steps:
        """What all servers do about their answers to the last `ask`."""
        self.asking = False
        return self._decide(merge_answers(self._asked, parts))

    @property
    def news(self) -> str:
        """What the user should know of the last iteration; mostly nothing."""
        return _NEWS.get(self.outcome, "")

    def restart(self) -> None:
        """Somebody else has set w. What is in the sum belongs to another point, and leads to nothing."""
        self.driver.restart()
        self._restarted = self._restarted or self._samples > 0

    def _decide(self, answers: list[Answer]) -> Steps:
        ops: Ops = []
        if self._restarted:
            self.outcome = ""
        else:
            move = self.driver.tell(answers, whole=self._whole)
            ops, self.outcome = move.ops, move.outcome
        self._samples, self._whole, self._restarted = 0, True, False
        return [VectorsStep(ops, self.driver.vectors)]

    # State

    def snapshot(self) -> dict[str, Any]:
        """As JSON. It belongs to the servers' vectors whenever it is not `asking`."""
        return {
            "driver": self.driver.snapshot(),
            "samples": self._samples,
            "whole": self._whole,
            "restarted": self._restarted,
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go on from a snapshot."""
        self.driver.restore(snapshot["driver"])
        self._samples, self._whole = snapshot["samples"], snapshot["whole"]
        self._restarted = snapshot["restarted"]
