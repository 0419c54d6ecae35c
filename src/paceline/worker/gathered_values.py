"""A worker's side of gather, mean, broadcast and barrier: values as text, and the way to the others.

Nothing is ever unpickled: a value is JSON, with its tensors in safetensors' format. The lead passes texts on
as they are (`ps/collectives.py`). Members of a group meet first, and their root calls for all of them.
"""

import base64
import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from paceline.collective import Group
from paceline.exceptions import UsageError
from paceline.worker.exchange.client import Client
from paceline.worker.plain import from_plain, plain

__all__ = ["MOST_BYTES", "Collectives", "from_text", "mean_of", "to_text"]

MOST_BYTES = 64 << 10
"""Largest value of one call, as text."""


def to_text(value: Any, call: str) -> str:
    """A value as text that `from_text` turns back.

    Args:
        call: the function that got it, for messages.

    Raises:
        UsageError: a value of another kind, or one that is too large.
    """
    tensors: list[Tensor] = []
    try:
        kept = plain(value, tensors)
        if sum(t.nbytes for t in tensors) > MOST_BYTES:
            raise _too_large(call, sum(t.nbytes for t in tensors))
        blob = base64.b64encode(save({str(i): t.clone() for i, t in enumerate(tensors)})).decode()
        text = json.dumps([kept, blob] if tensors else [kept])
    except (TypeError, KeyError, SafetensorError) as error:
        kind = str(error).partition(" is not")[0]
        raise UsageError(
            f"paceline.{call}() got a value with a {kind} in it. It takes numbers, text, None, tensors, and "
            "lists, tuples and dicts of these."
        ) from None
    except RecursionError:
        raise UsageError(f"paceline.{call}() got a value that is nested too deeply.") from None
    if len(text) > MOST_BYTES:
        raise _too_large(call, len(text))
    return text


def _too_large(call: str, size: int) -> UsageError:
    return UsageError(
        f"paceline.{call}() got a value of {size:,} bytes, and takes {MOST_BYTES:,}: it is for metrics and "
        "decisions. Reduce it first (sums, counts), or write it to a file of this worker's own."
    )


def from_text(text: str) -> Any:
    """The inverse of `to_text`. Tensors are on the CPU."""
    kept, *blob = json.loads(text)
    found = load(base64.b64decode(blob[0])) if blob else {}
    return from_plain(kept, [found[str(i)] for i in range(len(found))])


def mean_of(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """The weighted mean, number by number, of values of the same shape.

    Raises:
        UsageError: they have different shapes, or hold something that has no mean.
    """
    first = values[0]
    if all(isinstance(v, bool | int | float) for v in values):
        return _mean_of_numbers(values, weights)
    if isinstance(first, Tensor) and all(isinstance(v, Tensor) and v.shape == first.shape for v in values):
        return _mean_of_tensors(values, weights)
    if isinstance(first, list | tuple) and all(
        type(v) is type(first) and len(v) == len(first) for v in values
    ):
        return type(first)([mean_of(each, weights) for each in zip(*values, strict=True)])
    if isinstance(first, dict) and all(isinstance(v, dict) and v.keys() == first.keys() for v in values):
        return {key: mean_of([v[key] for v in values], weights) for key in first}
    seen = " and ".join(dict.fromkeys(_described(v) for v in values))
    raise UsageError(
        f"paceline.mean() got {seen}: it takes numbers and tensors, and lists, tuples and dicts of these, of "
        "the same shape on every worker. For anything else use paceline.gather()."
    )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, dict):
        return f"a dict of {sorted(map(str, value))}"
    return f"{value!r:.40}"


def _mean_of_numbers(values: Sequence[float], weights: Sequence[float]) -> float:
    total = math.fsum(weights)
    if len(set(weights)) == 1:
        weights, total = [1.0] * len(values), float(len(values))
    products = [w * float(v) for v, w in zip(values, weights, strict=True)]
    exact = all(map(math.isfinite, products))
    return (math.fsum(products) if exact else sum(products)) / total


def _mean_of_tensors(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    kept = values[0].dtype
    floating = kept.is_floating_point or kept.is_complex
    wide = torch.complex128 if kept.is_complex else torch.float64
    total = math.fsum(weights)
    parts = [v.to(wide) * (w / total) for v, w in zip(values, weights, strict=True)]
    return torch.stack(parts).sum(dim=0).to(kept if floating else torch.get_default_dtype())


class Collectives:
    """Of one worker.

    Args:
        group: the workers that it acts together with, if the mode has groups.
    """

    def __init__(self, client: Client, group: Group | None, rank: int) -> None:
        self._client = client
        self._group = group
        self._rank = rank

    def gather(self, place: str, text: str) -> dict[int, str]:
        """The values of all workers that call at this place, by rank."""
        mine = {str(self._rank): text}
        if self._group is None:
            return _by_rank(self._client.call(place, json.dumps(mine)))
        facts = self._group.meet(f"calls paceline.{place}", value=text)
        news: dict[str, Any] = {}
        if self._group.is_root:
            ours = {str(rank): fact["value"] for rank, fact in zip(self._group.ranks, facts, strict=True)}
            news = {"values": self._client.call(place, json.dumps(ours))}
        return _by_rank(self._group.tell(**news)["values"])


def _by_rank(answer: Sequence[str]) -> dict[int, str]:
    found = {int(rank): text for part in answer for rank, text in json.loads(part).items()}
    return dict(sorted(found.items()))
