"""PacelineTrainer: the Trainer of Hugging Face's transformers in a Paceline run."""

import contextlib
import copy
import functools
import math
import os
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

import paceline
from paceline.exceptions import PlanError, UsageError
from paceline.integrations.epoch_loader import EpochLoader, StopVote

__all__ = ["trainer_class"]

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@functools.cache
def trainer_class() -> type[Any]:
    """The class. Raises PlanError if transformers or accelerate is not installed.

    torchrun's variables, which `paceline run` sets for a script, would make accelerate start DDP: they are
    taken out of this process's environment.
    """
    if paceline.mode() != "alone":
        for name in _TORCHRUN:
            os.environ.pop(name, None)
    try:
        import accelerate  # noqa: F401
        from transformers import Trainer, TrainerCallback
    except ImportError as error:
        raise PlanError(
            f"PacelineTrainer needs transformers and accelerate ({error}): "
            "pip install 'paceline[transformers]'"
        ) from None

    class RunCallback(TrainerCallback):  # type: ignore[misc]
        """Logs what the Trainer logs, and makes its early stop the run's."""

        def __init__(self) -> None:
            self._vote = StopVote()

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self._vote.epoch_begins():
                control.should_training_stop = True

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._vote.training_ends(state.global_step < state.max_steps and control.should_training_stop)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            numbers = {
                name: value
                for name, value in (logs or {}).items()
                if isinstance(value, int | float) and name not in ("epoch", "samples")
            }
            if numbers:
                paceline.log(**numbers)

    class PacelineTrainer(Trainer):  # type: ignore[misc]
        """The Trainer of transformers, in a Paceline run:

            trainer = PacelineTrainer(model=model, args=args, train_dataset=train, …)

        Under `paceline run` each worker is a process with one device; the run's servers have the parameters.
        Worker 0 writes checkpoints and reports. Alone (`python train.py`) it trains like a Trainer.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = kwargs.get("args", args[1] if len(args) > 1 else None)
            if given is not None:
                own = _checked(given)
                if "args" in kwargs:
                    kwargs["args"] = own
                else:
                    args = (args[0], own, *args[2:])
            self._loader: EpochLoader | None = None
            super().__init__(*args, **kwargs)
            self.add_callback(RunCallback())

        @property
        def _is_prepared(self) -> bool:
            return self._loader is not None and self._loader.is_prepared

        def get_train_dataloader(self) -> Any:
            """A plain loader of the training data: the run divides it among the workers."""
            if self._loader is not None:
                raise UsageError("PacelineTrainer.train() was called twice: a run trains once.")
            self._loader = EpochLoader(_plain(super().get_train_dataloader()))
            return self._loader

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            """Join the run: the optimizer is there, and the schedule is the last thing that is made."""
            found = super().create_scheduler(num_training_steps, optimizer)
            if self._loader is not None and not self._is_prepared:
                own: Any = self.optimizer if optimizer is None else optimizer
                own = getattr(own, "optimizer", own)  # accelerate wraps it
                epochs = 0 if self.args.max_steps > 0 else math.ceil(self.args.num_train_epochs)
                self._loader.prepare(self.model, [own], [found], epochs)
            return found

        def _parameters(self) -> contextlib.AbstractContextManager[None]:
            """Within, the model has the run's parameters, in modes where a worker's differ from them."""
            return paceline.run_parameters() if self._is_prepared else contextlib.nullcontext()

        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            """See Trainer. Evaluates the run's parameters."""
            with self._parameters():
                return super().evaluate(*args, **kwargs)

        def predict(self, *args: Any, **kwargs: Any) -> Any:
            """See Trainer. Predicts with the run's parameters."""
            with self._parameters():
                return super().predict(*args, **kwargs)

        def save_model(self, *args: Any, **kwargs: Any) -> None:
            """See Trainer. Worker 0 saves the run's parameters; the others save nothing."""
            with self._parameters():
                if paceline.is_main():
                    super().save_model(*args, **kwargs)

        def is_world_process_zero(self) -> bool:
            """Whether this is worker 0."""
            return paceline.is_main()

        def is_local_process_zero(self) -> bool:
            """Whether this is worker 0."""
            return paceline.is_main()

    return PacelineTrainer


def _checked(args: Any) -> Any:
    """The arguments for this worker: those that are not worker 0 write nothing.

    Raises:
        UsageError: accelerate has started torch.distributed.
    """
    if args.world_size > 1:
        raise UsageError(
            f"PacelineTrainer: accelerate has joined {args.world_size} processes. Import PacelineTrainer "
            "before TrainingArguments is made, or start the run with --no-torchrun-env; and do not start the "
            "script with accelerate or torchrun."
        )
    if paceline.is_main():
        return args
    own = copy.copy(args)
    own.save_strategy = type(args.save_strategy)("no")
    own.load_best_model_at_end = False
    own.report_to = []
    own.disable_tqdm = True
    own.push_to_hub = False
    return own


def _plain(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same loader without accelerate, which would read a batch ahead."""
    sampler = loader.batch_sampler
    if not isinstance(sampler, BatchSampler):
        raise UsageError(
            "PacelineTrainer: the training data must be a map-style dataset with a batch size; streams and "
            "batch samplers of one's own are for a script with paceline.prepare."
        )
    return DataLoader(
        loader.dataset,
        batch_size=sampler.batch_size,
        sampler=sampler.sampler,
        drop_last=sampler.drop_last,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
    )
