"""PacelineStrategy: PyTorch Lightning's training loop in a Paceline run."""

import contextlib
import functools
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

import paceline
from paceline.exceptions import PlanError, UsageError
from paceline.integrations.epoch_loader import EpochLoader, StopVote
from paceline.worker import current_session

__all__ = ["strategy_class"]


@functools.cache
def strategy_class() -> type[Any]:
    """The class. Raises PlanError if Lightning is not installed."""
    try:
        from lightning.pytorch import Callback
        from lightning.pytorch.loggers.logger import Logger
        from lightning.pytorch.strategies import SingleDeviceStrategy
        from lightning.pytorch.utilities.rank_zero import rank_zero_only
    except ImportError as error:
        raise PlanError(
            f"PacelineStrategy needs PyTorch Lightning ({error}): pip install 'paceline[lightning]'"
        ) from None

    class RunLogger(Logger):  # type: ignore[misc]
        """What a LightningModule logs is logged by this worker, too."""

        @property
        def name(self) -> str:
            return "paceline"

        @property
        def version(self) -> str:
            return ""

        def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
            paceline.log(**{name: value for name, value in metrics.items() if name != "epoch"})

        def log_hyperparams(self, *_: Any, **__: Any) -> None:
            """The run keeps the script's arguments."""

    class EpochEnds(Callback):  # type: ignore[misc]
        """Tells Lightning when an epoch is over: how many batches it has for this worker shows at its end."""

        def __init__(self, strategy: "PacelineStrategy") -> None:
            self._strategy = strategy

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if self._strategy.vote.epoch_begins():
                trainer.should_stop = True

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            loader, limit = self._strategy.train_loader, trainer.limit_train_batches
            if isinstance(limit, int) and batch_idx + 1 >= limit:
                return  # Lightning ends the epoch: a batch that were read now would be lost
            ends = trainer.should_stop or 0 < trainer.max_steps <= trainer.global_step
            if loader is not None and not ends and not loader.has_next():
                trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            loader = self._strategy.train_loader
            if loader is not None and loader.is_over:
                trainer.should_stop = True

    class PacelineStrategy(SingleDeviceStrategy):  # type: ignore[misc]
        """Trains a LightningModule in a Paceline run:

            trainer = Trainer(strategy=PacelineStrategy(), …)

        Under `paceline run` each worker is a process with one device; the run's servers have the parameters.
        Alone (`python train.py`) it trains like Lightning on one device.
        """

        strategy_name = "paceline"

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.global_rank = paceline.rank()
            self.local_rank = self.global_rank
            self.world_size = paceline.world_size()
            rank_zero_only.rank = 0 if paceline.is_main() else max(1, self.global_rank)
            self.train_loader: EpochLoader | None = None
            self.vote = StopVote()
            self._reads_training_data = False
            self._is_prepared = False
            self._parameters = contextlib.ExitStack()

        @property
        def is_global_zero(self) -> bool:
            """Whether this worker writes logs and checkpoints."""
            return paceline.is_main()

        def setup(self, trainer: Any) -> None:
            """See Strategy."""
            super().setup(trainer)
            if trainer.state.fn != "fit":
                return
            limit = trainer.limit_train_batches
            if isinstance(limit, float) and limit != 1.0:
                raise UsageError(
                    f"Trainer(limit_train_batches={limit}): how many batches of an epoch a worker gets shows "
                    "at its end. Give a number of batches for each worker, as in limit_train_batches=100."
                )
            trainer.callbacks.insert(0, EpochEnds(self))
            trainer.loggers = [*trainer.loggers, RunLogger()]

        def process_dataloader(self, dataloader: Any) -> Any:
            """The training loader, which comes first, is prepared when training starts."""
            trainer = self.lightning_module.trainer
            is_training = trainer.state.fn == "fit" and not (trainer.sanity_checking or trainer.validating)
            if not is_training or not isinstance(dataloader, DataLoader):
                return super().process_dataloader(dataloader)
            if self.train_loader is not None:
                raise UsageError(
                    "Lightning asked for a second training loader: Paceline prepares one. "
                    "reload_dataloaders_every_n_epochs must be 0, and several loaders cannot be combined."
                )
            self.train_loader = EpochLoader(dataloader)
            return self.train_loader

        def on_train_start(self) -> None:
            """Join the run: Lightning has made the optimizers and restored what it resumes from."""
            module = self.lightning_module
            trainer = module.trainer
            if self.train_loader is None:
                raise UsageError("PacelineStrategy: the training data must come from a torch DataLoader.")
            schedulers = [config.scheduler for config in self.lr_scheduler_configs]
            epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs > 0 else 0
            self.train_loader.prepare(module, self.optimizers, schedulers, epochs)
            if current_session().resumed:
                raise UsageError(
                    "PacelineStrategy: a Lightning script cannot go on from a checkpoint of the run yet: "
                    "what it computes then differs from a run that was not stopped. Start a new run, and use "
                    "--replicas so that a dead server does not send it back."
                )
            self._is_prepared = True
            self._read_to_the_end(trainer)
            super().on_train_start()

        def _read_to_the_end(self, trainer: Any) -> None:
            """An epoch has as many batches as this worker gets, not as many as its share would be."""
            assert self.train_loader is not None
            if isinstance(trainer.limit_train_batches, int):
                return
            share, loop = len(self.train_loader), trainer.fit_loop
            interval = trainer.val_check_interval
            if isinstance(interval, float):
                trainer.val_check_batch = math.inf if interval == 1.0 else max(1, int(share * interval))
            loop.max_batches = math.inf
            # Lightning has no public way to say: the length is not known, and do not read ahead.
            loop._combined_loader.limits = [math.inf]  # noqa: SLF001
            loop._data_fetcher.length = 1 << 60  # noqa: SLF001

        def on_train_end(self) -> None:
            """See Strategy."""
            self.vote.training_ends(bool(self.lightning_module.trainer.should_stop))
            super().on_train_end()

        def on_validation_start(self) -> None:
            """Validate the run's parameters, in modes where a worker's differ from them."""
            if self._is_prepared:
                self._parameters.enter_context(paceline.run_parameters())
            super().on_validation_start()

        def on_validation_end(self) -> None:
            """See Strategy."""
            super().on_validation_end()
            self._parameters.close()

        def lightning_module_state_dict(self) -> dict[str, Any]:
            """The run's parameters, for Lightning's checkpoints: copies, while training goes on."""
            if not self._is_prepared:
                return dict(super().lightning_module_state_dict())
            with paceline.run_parameters():
                state = super().lightning_module_state_dict()
                return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}

        def on_exception(self, exception: BaseException) -> None:
            """See Strategy."""
            self._parameters.close()
            super().on_exception(exception)

    return PacelineStrategy
