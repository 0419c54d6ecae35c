"""The arguments of prepare(), sorted; and several models as one.

The parameter space of a run holds the trained tensors of all its models. A tensor of the first model has the
name that it has there; `K:` comes before the names of model K, for K from 1. So a run with one model knows
nothing of this, and a model that is prepared later changes no name.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from paceline.exceptions import UsageError
from paceline.params import describe
from paceline.worker.wrapped import Wrapped

__all__ = ["Models", "Prepared"]

_OF_A_LATER_MODEL = re.compile(r"[1-9][0-9]*:")


class Models:
    """The models of a run, in the order in which prepare() got them."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.each = tuple(models)

    def __len__(self) -> int:
        return len(self.each)

    def _prefixed(self) -> Iterator[tuple[str, nn.Module]]:
        return ((f"{k}:" if k else "", model) for k, model in enumerate(self.each))

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """As torch's, over all models; of a parameter that several models share, the first name counts."""
        seen: set[int] = set()
        for prefix, model in self._prefixed():
            for name, p in model.named_parameters(remove_duplicate=remove_duplicate):
                if remove_duplicate and id(p) in seen:
                    continue
                seen.add(id(p))
                yield prefix + name, p

    def named_buffers(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        """As torch's, over all models. Buffers that several models share appear with each of them."""
        for prefix, model in self._prefixed():
            for name, buffer in model.named_buffers(remove_duplicate=remove_duplicate):
                yield prefix + name, buffer

    def state(self) -> dict[str, Tensor]:
        """The tensors of all models' state_dicts, themselves and not copies of them."""
        return {
            prefix + name: value
            for prefix, model in self._prefixed()
            for name, value in model.state_dict(keep_vars=True).items()
            if isinstance(value, Tensor)
        }

    def modules(self) -> Iterator[nn.Module]:
        """The modules of all models, each once."""
        return iter({id(m): m for model in self.each for m in model.modules()}.values())


class Prepared:
    """The arguments of prepare(), sorted.

    Raises:
        UsageError: an argument that prepare() does not take, or too many or too few of a kind.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self.models = [o for o in objects if isinstance(o, nn.Module)]
        self.optimizers = [o for o in objects if isinstance(o, torch.optim.Optimizer)]
        self.loaders = [o for o in objects if isinstance(o, DataLoader)]
        self.schedulers = [o for o in objects if isinstance(o, LRScheduler | ReduceLROnPlateau)]
        if any(isinstance(o, Wrapped) for o in self.loaders):
            raise UsageError("prepare() got a loader that is prepared already: give it the script's own.")
        sorted_out = [*self.models, *self.optimizers, *self.loaders, *self.schedulers]
        for o in objects:
            if not any(o is s for s in sorted_out):
                raise UsageError(
                    f"prepare() got a {type(o).__name__}; it takes torch models, their optimizers, the "
                    "training DataLoader, and learning-rate schedulers."
                )
        for kind, found in (("model", self.models), ("optimizer", self.optimizers)):
            if len({id(o) for o in found}) < len(found):
                raise UsageError(f"prepare() got the same {kind} twice.")
        if not self.models or not self.optimizers or len(self.loaders) > 1:
            raise UsageError(
                f"prepare() got {len(self.models)} models, {len(self.optimizers)} optimizers and "
                f"{len(self.loaders)} loaders, in all its calls together; it takes one or more models, one "
                "or more optimizers and at most one loader (the training data; evaluation data needs no "
                "preparing, or paceline.prepare_validation)."
            )
        self.loader: DataLoader[Any] | None = self.loaders[0] if self.loaders else None
        self._check_initialized()

    def check(self) -> None:
        """Raise the UsageError that a run would raise about parameters and optimizers."""
        if len(self.optimizers) > 1:
            describe(Models(self.models), self.optimizers)

    def _check_initialized(self) -> None:
        for model in self.models:
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if is_lazy(tensor):
                    raise UsageError(
                        f"{name!r} of a {type(model).__name__} belongs to a lazy module and has no shape "
                        "yet, and prepare() lays out all parameters. Run one batch through the model before "
                        "prepare()."
                    )
                if _OF_A_LATER_MODEL.match(name) and len(self.models) > 1:
                    raise UsageError(
                        f"{name!r} of a {type(model).__name__} begins like the name of a tensor of another "
                        "model in a run with several. Name the module without a colon."
                    )

    def give_back(self, objects: Sequence[Any], loader: Any) -> list[Any]:
        """The objects as they were given, with the prepared loader in place of the script's."""
        return [loader if o is self.loader and loader is not None else o for o in objects]
