"""A training script as a few choices, small enough for hypothesis to shrink.

The first value of every choice is the simplest one: hypothesis shrinks towards it.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

from hypothesis import strategies as st

__all__ = ["NOT_YET", "WAYS", "Case", "cases"]

WAYS = ("asp", "bsp")
"""asp: one worker, compared bit by bit. bsp: two workers, compared with one process and the whole batch."""

NOT_YET: dict[str, str] = {}
"""Choices that the generator leaves out for now, as `field=value`, with the reason."""

BLOCKS = (
    "linear",
    "tanh",
    "late",
    "never",
    "alternating",
    "by_rows",
    "tied",
    "frozen",
    "tied_frozen",
    "shared_buffer",
    "counter",
    "hidden_buffer",
    "mean_buffer",
    "batchnorm",
    "layernorm",
    "dropout",
    "embedding",
    "sparse_embedding",
    "scalar",
    "transposed",
    "conv",
    "weight_norm",
    "spectral_norm",
    "shared_module",
    "parameter_list",
    "mixed_dtype",
    "random_depth",
)

# Blocks that compute something else on half a batch than on the whole one, or draw random numbers.
_NOT_BY_SAMPLE = frozenset(
    ["batchnorm", "dropout", "spectral_norm", "random_depth", "mixed_dtype", "mean_buffer"]
)

OPTIMIZERS = (
    "SGD(lr=0.1)",
    "SGD(lr=0.1, momentum=0.9)",
    "SGD(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)",
    "SGD(lr=0.05, momentum=0.8, dampening=0.5)",
    "SGD(lr=0.002, momentum=0.8, maximize=True)",
    "SGD(lr=0.1, momentum=0.9, foreach=True)",
    "SGD(lr=0.1, momentum=0.9, fused=False)",
    "Adam(lr=0.01)",
    "Adam(lr=0.01, amsgrad=True, weight_decay=0.1)",
    "Adam(lr=0.01, foreach=False)",
    "AdamW(lr=0.01)",
    "AdamW(lr=0.01, fused=True)",
    "NAdam(lr=0.01)",
    "RAdam(lr=0.01)",
    "Adamax(lr=0.01)",
    "Adagrad(lr=0.1, lr_decay=0.01)",
    "Adagrad(lr=0.1, initial_accumulator_value=0.1)",
    "Adadelta(lr=1.0)",
    "RMSprop(lr=0.01)",
    "RMSprop(lr=0.01, momentum=0.9, centered=True)",
    "Rprop(lr=0.01)",
    "ASGD(lr=0.1, t0=3)",
    "Adafactor(lr=0.01)",
)

_CHOICES: dict[str, tuple[Any, ...]] = {
    "way": WAYS,
    "dtype": ("float32", "float64"),
    "loss": ("cross_entropy", "mse"),
    "optimizer": OPTIMIZERS,
    "groups": ("one", "bias", "head", "partial", "named", "trainable"),
    "scheduler": ("none", "step", "exponential", "one_cycle", "lambda", "plateau", "by_hand", "chained"),
    "scheduler_prepared": (False, True),
    "scheduler_after": (False, True),
    "accumulate": (1, 2, 3),
    "flush": (False, True),
    "zero_grad": ("start", "end", "zeros", "model"),
    "clip": ("none", "norm", "value"),
    "scaler": ("none", "plain", "unscale", "overflow"),
    "skip": ("none", "continue", "continue_late", "break", "empty"),
    "peek": (False, True),
    "edit": ("none", "scale", "replace", "drop", "hook", "autograd_grad", "closure"),
    "data": ("tensors", "dataset", "subset", "augmented", "dicts", "stream"),
    "sampler": (
        "shuffle",
        "sequential",
        "replacement",
        "weighted",
        "subset_random",
        "fewer",
        "batch_sampler",
        "uneven_batches",
        "own_generator",
        "loader_generator",
        "python_random",
    ),
    "drop_last": (False, True),
    "num_workers": (0, 0, 0, 0, 0, 0, 0, 0, 0, 1),
    "samples": (8, 9, 10, 12, 13, 16, 23),
    "batch": (4, 1, 2, 3, 5),
    "epochs": (1, 2, 3),
    "evaluate": ("none", "epoch", "steps"),
    "reload": ("none", "model", "optimizer", "both"),
    "average": (False, True),
    "second_optimizer": (False, True),
    "before": ("none", "steps", "state"),
    "default_dtype": (False, True),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One script. Every field but `blocks` is one of `_CHOICES`."""

    blocks: tuple[str, ...] = ("linear",)
    way: str = "asp"
    dtype: str = "float32"
    loss: str = "cross_entropy"
    optimizer: str = OPTIMIZERS[0]
    groups: str = "one"
    scheduler: str = "none"
    scheduler_prepared: bool = False
    scheduler_after: bool = False
    accumulate: int = 1
    flush: bool = False
    zero_grad: str = "start"
    clip: str = "none"
    scaler: str = "none"
    skip: str = "none"
    peek: bool = False
    edit: str = "none"
    data: str = "tensors"
    sampler: str = "shuffle"
    drop_last: bool = False
    num_workers: int = 0
    samples: int = 8
    batch: int = 4
    epochs: int = 1
    evaluate: str = "none"
    reload: str = "none"
    average: bool = False
    second_optimizer: bool = False
    before: str = "none"
    default_dtype: bool = False

    @property
    def world(self) -> int:
        """Number of workers of its run."""
        return 2 if self.way == "bsp" else 1

    @property
    def refused(self) -> str | None:
        """What the error says with which a run refuses this script; None if it takes it."""
        trained = self.blocks[1:] if self.groups == "partial" else self.blocks  # what is pushed
        return "sparse" if "sparse_embedding" in trained else None

    @property
    def draws(self) -> int:
        """Samples that an epoch draws."""
        return self.samples - 2 if self.sampler in ("fewer", "subset_random") else self.samples

    def legal(self) -> "Case":
        """The nearest case that has a defined result and uses nothing that is left out for now."""
        case = self._available()
        change: dict[str, Any] = {}
        if case.data == "stream":
            change |= {
                "sampler": "sequential",
                "peek": False,
                "skip": "none" if "break" in case.skip else case.skip,
            }
        if case.sampler in ("batch_sampler", "uneven_batches"):
            change |= {"drop_last": False}
        if case.scheduler == "none":
            change |= {"scheduler_prepared": False, "scheduler_after": False}
        if case.accumulate == 1:
            change |= {"flush": False}
        if case.edit in ("closure", "autograd_grad"):
            change |= {"accumulate": 1, "flush": False, "scaler": "none", "clip": "none"}
        if "sparse_embedding" in case.blocks or case.edit == "hook":
            change |= {"before": "none"}
        if case.second_optimizer:
            change |= {"groups": "one"}
            if case.scaler != "none" and case.edit == "drop":  # it may leave one of them without a gradient
                change |= {"edit": "none"}
        if "mixed_dtype" in case.blocks:
            change |= {"clip": "none"}
        if "sparse_embedding" in case.blocks:
            change |= {
                "optimizer": "SGD(lr=0.1)",
                "clip": "none",
                "edit": "none",
                "zero_grad": "start",
                "scaler": "none",
                "skip": "none",  # a step, so that the run can refuse it
                "accumulate": 1,
                "flush": False,
            }
        if case.sampler in ("uneven_batches", "batch_sampler") and case.batch == 1:
            change |= {"batch": 2}
        case = replace(case, **change)
        ones = case.sampler == "uneven_batches" or case.batch == 1 or case.draws % case.batch == 1
        if ones and "batchnorm" in case.blocks:  # torch refuses a batch of one sample
            case = replace(case, blocks=tuple(b for b in case.blocks if b != "batchnorm") or ("linear",))
        return case._for_two_workers() if case.way == "bsp" else case

    def _for_two_workers(self) -> "Case":
        """Only what one process with the whole batch defines as well."""
        change: dict[str, Any] = {"dtype": "float64", "num_workers": 0, "average": False, "peek": False}
        blocks = tuple(b for b in self.blocks if b not in _NOT_BY_SAMPLE) or ("tanh",)
        change["blocks"] = blocks
        if self.clip == "value" or (self.clip == "norm" and self.second_optimizer):
            change["clip"] = "none"  # --clip-norm bounds the steps of every optimizer
        if self.scheduler == "plateau":  # every worker has a loss of its own
            change["scheduler"] = "step"
        if self.scheduler in ("one_cycle", "lambda"):
            # A worker without a part of a short last round would be one step behind.
            if self.sampler in ("batch_sampler", "uneven_batches"):
                change["scheduler"] = "step"
            else:
                change["drop_last"] = True
        if self.data in ("stream", "augmented"):
            change["data"] = "tensors"
        if self.evaluate == "steps":  # a short last round may leave a worker without a step
            change["evaluate"] = "epoch"
        if self.edit in ("drop", "closure"):
            change["edit"] = "none"
        if self.accumulate > 1:
            # Both workers must have all batches of a window, with the same number of samples.
            change |= {"drop_last": True, "flush": False}
            if self.sampler in ("batch_sampler", "uneven_batches"):
                change["sampler"] = "shuffle"
        elif self.skip == "continue_late" and self.zero_grad == "end":
            # What is not zeroed is in the next step: the same holds for these two batches.
            change["drop_last"] = True
            if self.sampler in ("batch_sampler", "uneven_batches"):
                change |= {"sampler": "shuffle"}
        if self.skip == "empty" or self.accumulate > 1:
            # Without a step, a worker may read the optimizer state before worker 0 has brought its own.
            change["before"] = "none"
        if self.draws < 2 * self.batch:
            change["batch"] = 2
        return replace(self, **change)

    def _available(self) -> "Case":
        change: dict[str, Any] = {}
        for left_out in NOT_YET:
            name, _, value = left_out.partition("=")
            if name == "blocks":
                kept = tuple(b for b in change.get("blocks", self.blocks) if b != value)
                change["blocks"] = kept or ("linear",)
            elif str(getattr(self, name)) == value:
                change[name] = next(v for v in _CHOICES[name] if f"{name}={v}" not in NOT_YET)
        return replace(self, **change)

    def __str__(self) -> str:
        plain = Case()
        told = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(plain, f.name)
        ]
        return f"Case({', '.join(told)})"


def cases(way: str | None = None) -> st.SearchStrategy[Case]:
    """Strategy of legal cases.

    Args:
        way: of this way only.
    """
    blocks = st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=4).map(tuple)
    chosen: dict[str, st.SearchStrategy[Any]] = {k: _mostly_first(v) for k, v in _CHOICES.items()}
    chosen["way"] = st.sampled_from(WAYS) if way is None else st.just(way)
    for often in ("optimizer", "dtype", "loss", "samples", "batch", "epochs", "num_workers"):
        chosen[often] = st.sampled_from(_CHOICES[often])
    return st.builds(Case, blocks=blocks, **chosen).map(Case.legal)


def _mostly_first(values: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    """The simplest value half of the time: cases with all features at once hide each other's faults."""
    return st.one_of(st.just(values[0]), st.sampled_from(values))
