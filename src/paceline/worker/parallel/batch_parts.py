"""A call of a model, cut into parts along the batch, and the outputs of the parts put together again.

Every tensor of a call has the samples in its first dimension, and so has every tensor that the model returns.
What is no tensor, or has no dimension, goes to every part as it is.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from paceline.exceptions import UsageError

__all__ = ["Batch", "BatchPart", "join_outputs"]


class BatchPart:
    """The arguments of a call for some samples of the batch.

    Args:
        leaves: what the arguments consist of, tensors cut.
        gets_gradient: the places of those tensors among them for which a gradient is wanted.
    """

    def __init__(self, leaves: list[Any], spec: Any, rows: int, gets_gradient: Sequence[int]) -> None:
        self.rows = rows
        self._leaves = list(leaves)
        self._spec = spec
        for i in gets_gradient:  # leaves of the part's own graph
            self._leaves[i] = self._leaves[i].detach().requires_grad_()
        self.inputs: list[Tensor] = [self._leaves[i] for i in gets_gradient]
        """Tensors for which a gradient is wanted."""

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """For the model."""
        args, kwargs = pytree.tree_unflatten(self._leaves, self._spec)
        return tuple(args), kwargs


class Batch:
    """The arguments of a call.

    Raises:
        UsageError: tensors that do not have the same number of samples.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], option: str) -> None:
        self._leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._cut = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor) and leaf.dim()]
        sizes = [len(self._leaves[i]) for i in self._cut]
        if len(set(sizes)) > 1:
            shapes = ", ".join(str(list(self._leaves[i].shape)) for i in self._cut)
            raise UsageError(
                f"{option} cuts every tensor that the model is called with along its first dimension, the "
                f"samples, and these differ there: {shapes}. Make what is the same for all samples (a mask) "
                "a buffer of the model, or leave the option out."
            )
        self.rows = sizes[0] if sizes else 0
        """Number of samples; 0 if there is nothing to cut."""
        self._wanted = [
            i for i, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]

    @property
    def inputs(self) -> list[Tensor]:
        """Arguments that require a gradient."""
        return [self._leaves[i] for i in self._wanted]

    def parts(self, count: int, *, needs_gradients: bool) -> list[BatchPart]:
        """Cut into so many parts, as equal as can be, in order.

        Args:
            needs_gradients: whether a backward pass may follow.
        """
        pieces = {i: self._leaves[i].tensor_split(count) for i in self._cut}
        wanted = self._wanted if needs_gradients else []
        return [
            BatchPart(
                [pieces[i][k] if i in pieces else leaf for i, leaf in enumerate(self._leaves)],
                self._spec,
                len(pieces[self._cut[0]][k]),
                wanted,
            )
            for k in range(count)
        ]

    def join_gradients(self, of_parts: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        """The gradients of `inputs`, from those of the parts'."""
        joined: list[Tensor | None] = []
        for place, i in enumerate(self._wanted):
            found = [gradients[place] for gradients in of_parts]
            there = [g for g in found if g is not None]
            if not there:
                joined.append(None)
            elif i in self._cut:
                shapes = self._leaves[i].tensor_split(len(found))
                whole = [torch.zeros_like(s) if g is None else g for g, s in zip(found, shapes, strict=True)]
                joined.append(torch.cat(whole))
            else:
                joined.append(torch.stack(there).sum(0))
        return joined


def join_outputs(
    of_parts: Sequence[Sequence[Any]], rows: Sequence[int], option: str
) -> tuple[list[Any], list[bool]]:
    """What the model returns, from what it returned for the parts; and which of it is a tensor.

    Raises:
        UsageError: something that has no samples in its first dimension, or differs between parts.
    """
    if len({len(outputs) for outputs in of_parts}) > 1:
        raise UsageError(f"{option}: the model returned different structures for different samples.")
    joined: list[Any] = []
    for place, values in enumerate(zip(*of_parts, strict=True)):
        if not all(isinstance(value, Tensor) for value in values):
            if any(isinstance(v, Tensor) or v != values[0] for v in values):
                raise UsageError(
                    f"{option}: value {place + 1} that the model returned, {values[0]!r:.40}, differs "
                    "between the parts of the batch, and cannot be put together."
                )
            joined.append(values[0])
            continue
        for value, samples in zip(values, rows, strict=True):
            if not value.dim() or len(value) != samples:
                raise UsageError(
                    f"{option}: tensor {place + 1} that the model returned for {samples} of the samples has "
                    f"the shape {list(value.shape)}, so it cannot be put together along the samples. Let the "
                    "model return a row for every sample (and compute a loss outside of it), or leave the "
                    "option out."
                )
        joined.append(torch.cat(list(values)))
    return joined, [isinstance(value, Tensor) for value in joined]
