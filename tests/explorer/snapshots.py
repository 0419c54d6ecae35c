"""Snapshots of a process of the model: what it can be made of again, and a form that equal states share."""

import dataclasses
import pickle
from collections import deque
from enum import Enum
from typing import Any

from paceline.core.layout import Layout
from paceline.core.modes import ModeSpec
from paceline.core.placement import Placement

__all__ = ["canonical", "copy_of", "packed"]

_ORDERED = {"_held", "_pending"}
"""Dicts whose order decides something: the order in which pushes are averaged."""
_UNREAD = {
    "staleness",  # counts for reports
    "dropped_of",
    "since",  # times, which stand still here
    "heard_at",
    "records",  # what pushes.csv is written from
    "_applied",
    "acting",  # who is blamed for a wait, in reports
}
"""Attributes that decide nothing of what the explorer looks at."""


def packed(obj: object) -> bytes:
    """All of an object, as bytes."""
    return pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)


def copy_of(data: bytes) -> Any:
    """The object that was packed, made anew."""
    return pickle.loads(data)  # what this process packed itself


def canonical(obj: object) -> Any:
    """A hashable form that two objects share if they will do the same.

    Sets and dicts are sorted, but for dicts whose order decides something. Objects that occur twice are
    written once, so that a cycle ends.
    """
    return _Walk().of(obj)


class _Walk:
    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def of(self, obj: Any, *, ordered: bool = False) -> Any:
        kind = type(obj)
        if obj is None or kind in (int, str, float, bool, bytes):
            return obj
        if kind is list or kind is deque:
            return ("[", *[self.of(each) for each in obj])
        if kind is tuple:
            return tuple([self.of(each) for each in obj])
        if kind is set or kind is frozenset:
            return ("{", *sorted([self.of(each) for each in obj], key=_key))
        if issubclass(kind, dict):
            items = [(self.of(k), self.of(v)) for k, v in obj.items()]
            return ("d", *(items if ordered else sorted(items, key=_key)))
        if issubclass(kind, tuple):
            return (kind.__name__, *[self.of(each) for each in obj])
        if kind is Placement:
            return ("P", obj.number, tuple(sorted(obj.servers)), obj.holders)
        if kind is ModeSpec:
            return str(obj)
        if kind is Layout:
            return "layout"
        if issubclass(kind, Enum):
            return str(obj)
        if callable(obj) and hasattr(obj, "__qualname__"):
            return obj.__qualname__
        if dataclasses.is_dataclass(obj) and kind.__dataclass_params__.frozen:  # a value: no matter which one
            return (kind.__name__, *[self.of(each) for each in _slots_of(obj).values()])
        return self._object(obj)

    def _object(self, obj: Any) -> Any:
        if (number := self._seen.get(id(obj))) is not None:
            return ("=", number)
        self._seen[id(obj)] = len(self._seen)
        values = vars(obj) if hasattr(obj, "__dict__") else _slots_of(obj)
        return (
            type(obj).__name__,
            *[
                (name, self.of(values[name], ordered=name in _ORDERED))
                for name in sorted(values)
                if name not in _UNREAD
            ],
        )


def _slots_of(obj: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(obj):
        return {each.name: getattr(obj, each.name) for each in dataclasses.fields(obj)}
    names = [name for kind in type(obj).__mro__ for name in getattr(kind, "__slots__", ())]
    return {name: getattr(obj, name) for name in names if hasattr(obj, name)}


def _key(value: Any) -> tuple[str, str]:
    return (type(value).__name__, repr(value))
