"""Sequencer: which steps servers may execute now, and which wait for the second half of an update.

With a bound on the norm (--clip-norm) an update has two halves: all servers reduce, then all commit with a
factor that follows from the norm of the whole. Sandblaster's iteration is alike: all servers answer an ask,
then all move. Steps that follow in the order are held meanwhile.

    order ──► … ReduceStep │ held: AdmitStep …      norms of all slices ──► CommitStep, then what was held
    order ──► … AskStep    │ held: …                answers of all servers ──► an event; then what was held

Checkpoints are cut right behind an update, never between its halves. If a server died between the halves,
the placement without it comes before the checkpoint.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from paceline.core.modes.lbfgs import Answer
from paceline.core.norms import SliceNorms
from paceline.core.steps import ApplyStep, AskStep, CommitStep, PlaceStep, ReduceStep, Steps, VectorsStep

__all__ = ["OrderLog", "Sequenced", "Sequencer"]

Cut = Callable[[], Steps]
"""The step that cuts a checkpoint at the present version, if one is due; else none."""


class Sequenced(NamedTuple):
    """Steps, split by when they may be executed."""

    now: Steps
    held: Steps
    """Steps that are newly held."""


class Sequencer:
    """One owner: the leader.

    Args:
        clip_norm: bound on the norm of the averaged gradient.
    """

    def __init__(self, clip_norm: float | None = None) -> None:
        self.held: Steps = []
        """Steps that wait for the second half of an update."""
        self._clip_norm = clip_norm
        self._due = 0
        self._norms = SliceNorms()
        self._answers: list[list[Answer]] = []

    @property
    def waiting(self) -> bool:
        """Whether an update is half done."""
        return self._due > 0

    def order(self, steps: Steps, servers: int, cut: Cut) -> Sequenced:
        """Steps come next in the order.

        Args:
            servers: number of servers that execute them.
        """
        if self._due:
            self.held += steps
            return Sequenced([], steps)
        updates = [i for i, step in enumerate(steps) if isinstance(step, ApplyStep | VectorsStep)]
        if updates and (checkpoint := cut()):
            at = updates[-1] + 1
            steps = [*steps[:at], *checkpoint, *steps[at:]]
        for i, step in enumerate(steps):
            if isinstance(step, ReduceStep | AskStep):
                self._due = servers
                if isinstance(step, ReduceStep):
                    self._norms.expect(step.number)
                self.held = steps[i + 1 :]
                return Sequenced(steps[: i + 1], self.held)
        return Sequenced(steps, [])

    def reduced(self, number: int, norms: Iterable[Any], slices: int, cut: Cut) -> Steps | None:
        """A server has done the first half of an update.

        Returns:
            The second half, and what was held, once the norms of all slices are known; until then None.
        """
        norm = self._norms.add(number, norms, slices)
        if norm is None:
            return None
        assert self._clip_norm is not None
        held = self._release()
        # torch.nn.utils.clip_grad_norm_'s formula
        commit = CommitStep(min(1.0, self._clip_norm / (norm + 1e-6)))
        if any(isinstance(step, ReduceStep) for step in held):
            return [commit, *held]
        # Servers save what they answer for: those of a server that died meanwhile are placed first.
        at = max((i + 1 for i, step in enumerate(held) if isinstance(step, PlaceStep)), default=0)
        return [commit, *held[:at], *cut(), *held[at:]]

    def answered(self, answers: list[Answer]) -> tuple[list[list[Answer]], Steps] | None:
        """A server has answered an ask.

        Returns:
            The answers of all servers and what was held, once all have answered; until then None.
        """
        self._answers.append(answers)
        self._due -= 1
        if self._due:
            return None
        parts, self._answers = self._answers, []
        return parts, self._release()

    def take_over(self, half_done: int | None, held: Steps) -> None:
        """Go on in the place of a leader that is gone.

        Args:
            half_done: the number of an update whose first half is in the order and whose second is not.
            held: steps that wait for it.
        """
        self.held = held
        if half_done is not None:
            self._due = 1
            self._norms.expect(half_done)

    def _release(self) -> Steps:
        self._due = 0
        held, self.held = self.held, []
        return held


class OrderLog:
    """The last steps of the order, for servers that follow another leader now and lack some.

    Args:
        kept: number of steps; 0 where servers do not take each other's place. Every worker waits for every
            server's answer, so no server is ever further behind than a few steps a worker.
    """

    def __init__(self, kept: int) -> None:
        self.position = 0
        """Number of steps in the order so far."""
        self._kept = kept
        self._last: Steps = []

    def extend(self, steps: Steps) -> None:
        """Steps that come next in the order."""
        self.position += len(steps)
        if self._kept:
            self._last += steps
            if len(self._last) > 2 * self._kept:
                del self._last[: -self._kept]

    def begin_at(self, position: int) -> None:
        """This server takes part from here on."""
        self.position = position

    def since(self, position: int) -> Steps | None:
        """The steps after a position; None if they are not kept any more, or still to come."""
        missing = self.position - position
        if not 0 <= missing <= len(self._last):
            return None
        return self._last[len(self._last) - missing :]
