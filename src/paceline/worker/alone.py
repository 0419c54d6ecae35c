"""A script that runs alone, as `python script.py`: what prepare() talks to then.

It draws the same batches and uses the same optimizer kernels as a run with one worker, so that both give
bitwise the same result.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from paceline.data.leases import LeaseBook
from paceline.exceptions import UsageError
from paceline.params import use_fused
from paceline.worker.client import Grant
from paceline.worker.loader import LeasedLoader, StreamLoader, data_facts, lease_loader
from paceline.worker.prepared import Prepared

__all__ = ["AloneSession", "Session", "offer_no_sync"]


class Session:
    """What a script sees of the run it is part of."""

    rank = 0
    world_size = 1
    prepared = False

    @property
    def mode_text(self) -> str:
        """See `paceline.mode`."""
        return "alone"

    def prepare(self, objects: Sequence[Any]) -> list[Any]:
        """See `paceline.prepare`."""
        raise NotImplementedError

    def log(self, metrics: dict[str, float]) -> None:
        """Show metrics in the progress display and keep them in the run directory."""

    def should_stop(self, condition: bool, who: str) -> bool:
        """See `paceline.should_stop`. Alone, the script's own condition decides."""
        return condition

    def assign(self) -> None:
        """Make the servers take over the model's present parameters."""

    @contextlib.contextmanager
    def run_parameters(self) -> Iterator[None]:
        """Within, the model has the run's parameters, not the worker's own."""
        yield


class AloneSession(Session):
    """`python train.py`: one process, no servers."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._objects: list[Any] = []
        self._source: _AloneSource | None = None
        self._hooked: list[Any] = []
        """Optimizers whose steps the source is told of."""

    def prepare(self, objects: Sequence[Any]) -> list[Any]:
        if self._source is not None and self._source.begun:
            raise UsageError(
                "prepare() was called again after the first batch. Call prepare() for everything before the "
                "training loop."
            )
        got = Prepared([*self._objects, *objects])
        got.check()
        self._objects += objects
        self.prepared = True
        for optimizer in got.optimizers:
            use_fused(optimizer)  # as servers do: the results are the same bits
        loader: LeasedLoader | StreamLoader | None = None
        fresh = got.optimizers[len(self._hooked) :]
        if got.loader is not None and any(o is got.loader for o in objects):
            self._source = _AloneSource(data_facts(got.loader))
            loader = lease_loader(got.loader, self._source, seed=self._seed, rank=0, world_size=1)
        if self._source is not None:
            self._hooked += fresh
            for optimizer in fresh:
                optimizer.register_step_post_hook(self._source.stepped)
        for model in got.models:
            offer_no_sync(model)
        return got.give_back(objects, loader)


class _AloneSource:
    """Leases for a script that runs alone."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.begun = False
        """Whether a batch was asked for."""
        self._book: LeaseBook | None = None
        self._epoch = 0
        self.steps = 0
        if "samples" in facts:
            self._book = LeaseBook(by_round=True, **facts)
            self._book.joined(0)

    def take(
        self, epoch: int, limit: int, *, wait: bool, give_back: Sequence[int], order: Sequence[str] = ()
    ) -> Grant:
        self.begun = True
        if self._book is None:
            self._epoch = max(self._epoch, epoch + wait)
            return Grant([], self._epoch > epoch, False)
        self._book.give_back(0, give_back)
        leases = self._book.take(0, epoch, limit)
        if not leases and wait:
            self._book.turn_if_over({0})
            leases = self._book.take(0, epoch, limit)
        self._book.finish(0, [lease.id for lease in leases])
        found = [(lease.id, list(lease.ranges)) for lease in leases]
        return Grant(found, self._book.done(epoch), False)

    def used(self, lease: int | None, samples: int, *, counts: bool = True) -> None:
        pass

    def entering(self, epoch: int) -> None:
        pass

    def entered(self, epoch: int) -> None:
        pass

    def back(self) -> None:
        pass

    def ended(self, epoch: int) -> None:
        pass

    def left(self, epoch: int, *, peek: bool) -> list[int]:
        return []

    def stepped(self, *_: Any) -> None:
        self.steps += 1

    def ends_early(self) -> bool:
        return False


@contextlib.contextmanager
def _no_sync() -> Iterator[None]:
    yield


def offer_no_sync(model: nn.Module) -> None:
    """DDP's no_sync(): here an exchange happens at optimizer.step() only, so there is nothing to skip."""
    if not hasattr(model, "no_sync"):
        model.no_sync = _no_sync  # type: ignore[assignment]
