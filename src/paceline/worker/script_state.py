"""What a script keeps beside its model: a best score, a count, the epoch it is in, how it steps schedulers.

`paceline.state(best=0.0)` is a ScriptState. Every worker's part of a checkpoint holds its own, and worker 0
also sends its own to the servers when it changed, for a worker that joins or replaces another one.

Keys: `script:state` (JSON) and `script:tensor:K` (the tensors in it).
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from paceline.exceptions import UsageError
from paceline.worker.plain import from_json_tensor, from_plain, json_tensor, plain

__all__ = ["KEY", "KeptState", "ScriptState"]

KEY = "script:"
_EVERY_S = 0.5
"""Least time between two shipments to the servers within an epoch."""


class ScriptState:
    """Values by name, as attributes: numbers, text, None, lists, tuples, dicts and tensors.

    A new value counts when it is assigned (`state.best = score`). What is changed inside a list, dict or
    tensor is seen by the next checkpoint.
    """

    _values: dict[str, Any]
    _changed: Callable[[], None]

    def __init__(self, values: dict[str, Any], changed: Callable[[], None]) -> None:
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_changed", changed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(
                f"the script's state has no {name!r}; it has {', '.join(self._values) or 'nothing yet'}. "
                f"Give it a first value: paceline.state({name}=…)"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        _check(name, value)
        self._values[name] = value
        self._changed()

    def __delattr__(self, name: str) -> None:
        getattr(self, name)
        del self._values[name]
        self._changed()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __repr__(self) -> str:
        return f"state({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"


class KeptState:
    """The session's side of a ScriptState: what goes into a checkpoint, and what comes out of one."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self.changed = False
        """Whether there is something new since it was sent."""
        self.bag = ScriptState(self._values, self.mark)
        self.epoch = 0
        """The one that a script without a prepared loader began last (`paceline.epochs`)."""
        self.paces: Callable[[], list[dict[str, int]]] = list
        """How the script steps its schedulers: see schedules.py."""
        self.found_paces: list[dict[str, int]] = []
        """Those that were kept."""
        self._next = -math.inf

    def ask(self, first: Mapping[str, Any]) -> ScriptState:
        """The bag, with first values for what it does not have."""
        for name, value in first.items():
            if name not in self.bag:
                setattr(self.bag, name, value)
        return self.bag

    def begin_epoch(self, epoch: int) -> None:
        """A script without a prepared loader begins an epoch."""
        self.epoch = epoch
        self.mark()

    def mark(self) -> None:
        """There is something new."""
        self.changed = True

    @property
    def due(self) -> bool:
        """Whether there is something new that the servers should have, and it is not too early to send it."""
        return self.changed and time.monotonic() >= self._next

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint or the servers; empty if the script keeps nothing."""
        values, tensors, paces = self._values, list[Tensor](), self.paces()
        if not values and not self.epoch and not paces:
            return {}
        body = {
            "values": [[name, _plain(name, value, tensors)] for name, value in values.items()],
            "epoch": self.epoch,
            "paces": paces,
        }
        found = {f"{KEY}tensor:{k}": tensor for k, tensor in enumerate(tensors)}
        return {f"{KEY}state": json_tensor(body), **found}

    def sent(self) -> None:
        """The servers have what `tensors` gave."""
        self.changed = False
        self._next = time.monotonic() + _EVERY_S

    def put_back(self, found: Mapping[str, Tensor]) -> None:
        """Have what a checkpoint, or the servers, have of it."""
        if f"{KEY}state" not in found:
            return
        body = from_json_tensor(found[f"{KEY}state"])
        count = sum(key.startswith(f"{KEY}tensor:") for key in found)
        tensors = [found[f"{KEY}tensor:{k}"] for k in range(count)]
        self._values.update({name: from_plain(value, tensors) for name, value in body["values"]})
        self.epoch = int(body["epoch"])
        self.found_paces = body.get("paces", [])


def _check(name: str, value: Any) -> None:
    if name.startswith("_"):
        raise UsageError(f"paceline.state: {name!r} begins with an underscore; give it another name.")
    _plain(name, value, [])


def _plain(name: str, value: Any, tensors: list[Tensor]) -> Any:
    try:
        return plain(value, tensors)
    except TypeError as error:
        raise UsageError(
            f"paceline.state: {name} cannot be kept: {error}. Keep numbers, text, None, dense tensors, and "
            "lists, tuples and dicts of these; of an object, its state_dict()."
        ) from None
