"""What a script changes in its model behind the servers' back would be lost: it is told so instead."""

from collections.abc import Sequence

import torch
from torch import nn

from paceline.exceptions import UsageError
from paceline.worker.prepared import Models

__all__ = ["OwnershipGuard"]

_ADVICE = (
    "The servers own the parameters, so the change would be lost: call paceline.assign() right after it (on "
    "every worker), or change it before prepare()."
)


class OwnershipGuard:
    """Watches prepared models.

    Args:
        parameters: those that are trained.
        names: theirs.
    """

    def __init__(
        self,
        models: Models,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
    ) -> None:
        self._models, self._parameters, self._names = models, parameters, names
        given = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
        self._frozen = [
            (n, p) for n, p in models.named_parameters() if id(p) in given and not p.requires_grad
        ]
        self.accept()

    def accept(self) -> None:
        """The parameters are as they should be."""
        self._seen = self._whereabouts()

    def check_parameters(self) -> None:
        """UsageError if one was written to, or looks at other memory, since `accept`."""
        seen = self._whereabouts()
        if seen == self._seen:
            return
        pairs = zip(self._names, seen, self._seen, strict=True)
        changed = next(name for name, now, before in pairs if now != before)
        raise UsageError(f"parameter {changed!r} was changed after prepare(). {_ADVICE}")

    def check_loaded(self) -> None:
        """UsageError if the model has other parameter objects than it was prepared with."""
        present = {id(p) for _, p in self._models.named_parameters()}
        for name, p in zip(self._names, self._parameters, strict=True):
            if id(p) not in present:
                raise UsageError(
                    f"parameter {name!r} was replaced by another object after prepare(), so the servers and "
                    "the optimizer do not know it. Call load_state_dict() without assign=True, or before "
                    "prepare()."
                )

    def check_frozen(self) -> None:
        """UsageError if one that was not to be trained got a gradient."""
        for name, p in self._frozen:
            if p.grad is not None:
                raise UsageError(
                    f"parameter {name!r} got a gradient, but had requires_grad=False at prepare(), so the "
                    "servers do not hold it. Let it require a gradient before prepare(); to train it later "
                    "only, set its grad to None until then."
                )

    @staticmethod
    def check_pages(private: int) -> None:
        """UsageError if memory shared with the servers has private pages: no version counter sees
        `p.data.clamp_()`, but the kernel does."""
        if private:
            raise UsageError(
                f"a parameter was written to through .data or .numpy() after prepare(). {_ADVICE}"
            )

    def _whereabouts(self) -> list[tuple[int, int]]:
        return [(p._version, p.data_ptr()) for p in self._parameters]
