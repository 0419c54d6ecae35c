"""A script that runs alone, as `python script.py`: what prepare() talks to then.

It draws the same batches and uses the same optimizer kernels as a run with one worker, so that both give
bitwise the same result.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from paceline.core.leases import LeaseBook
from paceline.exceptions import UsageError
from paceline.params import use_fused
from paceline.worker.epochs import RemainingEpochs
from paceline.worker.exchange.entry import DataFacts
from paceline.worker.exchange.grants import Grant
from paceline.worker.loader import LeasedLoader, StreamLoader, data_facts, lease_loader
from paceline.worker.plain_copies import copy_plainly
from paceline.worker.prepared import Prepared
from paceline.worker.run_progress import RunPlace, RunProgress, fraction_done
from paceline.worker.script_state import KeptState
from paceline.worker.validation import check_validation

__all__ = ["ORDER_SEED", "AloneSession", "Session", "offer_no_sync", "order_seed"]

ORDER_SEED = "PACELINE_ORDER_SEED"


def order_seed(environment: Mapping[str, str]) -> int:
    """The seed of the epochs' orders, in a script that runs alone: as `--seed` in a run.

    Raises:
        UsageError: it is not a number that `--seed` takes.
    """
    text = environment.get(ORDER_SEED) or "0"
    if not text.isdecimal() or int(text) >= 2**63:
        raise UsageError(
            f"{ORDER_SEED}={text!r:.40}: give a whole number from 0 to 2**63 - 1, as with --seed."
        )
    return int(text)


class Session:
    """What a script sees of the run it is part of."""

    rank = 0
    world_size = 1
    prepared = False

    def __init__(self) -> None:
        self.kept = KeptState()
        """What the script keeps beside its model: see `paceline.state`."""

    @property
    def mode_text(self) -> str:
        """See `paceline.mode`."""
        return "alone"

    def prepare(self, objects: Sequence[Any]) -> list[Any]:
        """See `paceline.prepare`."""
        raise NotImplementedError

    def log(self, metrics: dict[str, float]) -> None:
        """Show metrics in the progress display and keep them in the run directory."""

    def epochs(self, count: int) -> RemainingEpochs:
        """See `paceline.epochs`. Alone, all of them are left."""
        return RemainingEpochs(range(count))

    def run_progress(self) -> RunProgress:
        """See `paceline.progress`."""
        return RunProgress(updates=0, samples=0, epoch=0, fraction=None)

    def should_stop(self, condition: bool, who: str) -> bool:
        """See `paceline.should_stop`. Alone, the script's own condition decides."""
        return condition

    def prepare_validation(self, loader: Any, place: str) -> Any:
        """See `paceline.prepare_validation`. Alone, it is all of the data."""
        check_validation(loader)
        return loader

    def gather(self, place: str, text: str) -> dict[int, str]:
        """The values of all workers that call at this place of the script, by rank. Alone: its own."""
        return {self.rank: text}

    def assign(self) -> None:
        """Make the servers take over the model's present parameters."""

    @contextlib.contextmanager
    def run_parameters(self) -> Iterator[None]:
        """Within, the model has the run's parameters, not the worker's own."""
        yield


class AloneSession(Session):
    """`python train.py`: one process, no servers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._seed = seed
        self._objects: list[Any] = []
        self._source: _AloneSource | None = None
        self._counts = _Counts()
        self._loader: LeasedLoader | StreamLoader | None = None
        self._hooked: list[Any] = []
        """Optimizers whose steps are counted."""
        self._planned: int | None = None

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
            self._source = _AloneSource(data_facts(got.loader), self._counts)
            loader = lease_loader(got.loader, self._source, seed=self._seed, rank=0, world_size=1)
            self._loader = loader
        self._hooked += fresh
        for optimizer in fresh:
            optimizer.register_step_post_hook(self._counts.stepped)
        for model in got.models:
            offer_no_sync(model)
        return got.give_back(objects, loader)

    def epochs(self, count: int) -> RemainingEpochs:
        self._planned = (self._planned or 0) + count
        return super().epochs(count)

    def run_progress(self) -> RunProgress:
        counts, at = self._counts, None
        if isinstance(self._loader, LeasedLoader):
            whole = len(self._loader)
            at = RunPlace(done=counts.batches, whole=whole, batches=whole)
        return RunProgress(
            updates=counts.steps,
            samples=counts.samples,
            epoch=counts.epoch,
            fraction=fraction_done(at, self._planned),
        )


class _Counts:
    """What a script that runs alone has done."""

    def __init__(self) -> None:
        self.steps = self.samples = self.batches = self.epoch = 0
        self._read = (0, 0)

    def read(self, samples: int) -> None:
        """The script got a batch."""
        self._read = (self._read[0] + samples, self._read[1] + 1)

    def begin(self, epoch: int) -> None:
        """The script begins an epoch. What it only looked at does not count."""
        self.epoch, self._read = epoch, (0, 0)

    def stepped(self, *_: Any) -> None:
        """An optimizer made a step."""
        self.steps += 1
        self.samples += self._read[0]
        self.batches += self._read[1]
        self._read = (0, 0)


class _AloneSource:
    """Leases for a script that runs alone."""

    def __init__(self, facts: DataFacts, counts: _Counts) -> None:
        self._counts = counts
        self.begun = False
        """Whether a batch was asked for."""
        self._book: LeaseBook | None = None
        self._epoch = 0
        if "samples" in facts:
            self._book = LeaseBook(
                by_round=True,
                samples=facts["samples"],
                batch_size=facts["batch_size"],
                drop_last=facts["drop_last"],
            )
            self._book.joined(0)

    def take(
        self,
        epoch: int,
        limit: int,
        *,
        wait: bool,
        give_back: Sequence[int],
        order: tuple[str, str] | None = None,
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
        self._counts.read(samples)

    def entering(self, epoch: int) -> None:
        self._counts.begin(epoch)

    def entered(self, epoch: int) -> None:
        pass

    def back(self) -> None:
        pass

    def ended(self, epoch: int) -> None:
        pass

    def left(self, epoch: int, *, peek: bool) -> list[int]:
        return []

    @property
    def steps(self) -> int:
        return self._counts.steps

    def ends_early(self) -> bool:
        return False


def offer_no_sync(model: nn.Module) -> None:
    """DDP's no_sync(): here an exchange happens at optimizer.step() only, so there is nothing to skip."""
    if not hasattr(model, "no_sync"):
        model.no_sync = contextlib.nullcontext  # type: ignore[assignment]
    copy_plainly(model.modules())
