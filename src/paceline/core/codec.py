"""Records as JSON: a codec that is built, once, from the annotations of named tuples.

A record is a list: the name of its kind, then its fields. Fields that are records of a fixed width themselves
(PushId, Placement) stand in the list one by one. What is decoded is checked: anything that does not fit is a
FrameError.
"""

import math
import types
from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from paceline.core.modes.lbfgs import Ops
from paceline.core.modes.machine import PushId
from paceline.core.placement import Placement
from paceline.exceptions import FrameError

__all__ = ["Codec", "converter_of"]

T = TypeVar("T")
Convert = Callable[[Any], Any]

_WIDTHS: dict[Any, int] = {PushId: 3, Placement: 3}
"""Types of fields that stand one by one in their record's list: number of elements."""


class _Shape(NamedTuple):
    """How the fields of one kind of record are read."""

    kind: Any
    fields: tuple[tuple[int, Convert], ...]
    """Width and converter of each."""
    least: int
    """Number of elements without those that may be left out."""
    most: int


class Codec(Generic[T]):
    """Writes and reads the records of several kinds.

    Args:
        kinds: their classes (NamedTuple), by the names that they have in JSON.
        optional: number of fields at the end of a kind that are left out where all of them are the defaults.
    """

    def __init__(self, kinds: Mapping[str, type[T]], optional: Mapping[type[T], int] | None = None) -> None:
        extras = optional or {}
        self._names = {kind: name for name, kind in kinds.items()}
        self._shapes = {name: _shape(kind, extras.get(kind, 0)) for name, kind in kinds.items()}
        self._optional = {kind: _defaults(kind, count) for kind, count in extras.items()}
        self._spliced = {kind for kind in self._names if any(t in _WIDTHS for t in _types(kind).values())}

    def encode(self, record: T) -> list[Any]:
        """A record as JSON."""
        kind = type(record)
        fields: Any = record
        if kind in self._optional:
            defaults = self._optional[kind]
            if fields[-len(defaults) :] == defaults:
                fields = fields[: -len(defaults)]
        if kind not in self._spliced:
            return [self._names[kind], *fields]
        found: list[Any] = [self._names[kind]]
        for value in fields:
            if isinstance(value, PushId):
                found += value
            elif isinstance(value, Placement):
                found += value.to_json()
            else:
                found.append(value)
        return found

    def decode(self, data: Any) -> T:
        """The record that `encode` wrote. Raises FrameError."""
        if not isinstance(data, list) or not data or not isinstance(data[0], str):
            raise FrameError(f"{data!r:.80} is not a list that begins with a name")
        shape = self._shapes.get(data[0])
        if shape is None:
            raise FrameError(f"{data[0]!r:.40} is none of {', '.join(self._shapes)}")
        if not shape.least <= len(data) - 1 <= shape.most:
            raise FrameError(f"{data!r:.80} has {len(data) - 1} fields, expected {shape.most}")
        return shape_read(shape, data, 1)  # type: ignore[no-any-return]


def shape_read(shape: _Shape, data: list[Any], at: int) -> Any:
    """The record whose fields stand in a list from this element on. Raises FrameError."""
    values = []
    try:
        for width, convert in shape.fields:
            if at >= len(data):
                break  # what is left out is the default
            values.append(convert(data[at]) if width == 1 else convert(data[at : at + width]))
            at += width
        return shape.kind(*values)
    except (TypeError, ValueError, OverflowError) as error:
        raise FrameError(f"{data!r:.80} is not a {shape.kind.__name__}: {error}") from None


def _types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _defaults(kind: Any, count: int) -> tuple[Any, ...]:
    return tuple(kind._field_defaults[name] for name in kind._fields[-count:])


def _shape(kind: Any, optional: int) -> _Shape:
    found = _types(kind)
    fields = tuple((_WIDTHS.get(found[name], 1), converter_of(found[name])) for name in kind._fields)
    most = sum(width for width, _ in fields)
    return _Shape(kind, fields, most - optional, most)


def converter_of(wanted: Any) -> Convert:
    """What checks a value of this type, and makes it of what JSON has for it. It raises ValueError."""
    if wanted in _SCALARS:
        return _SCALARS[wanted]
    if wanted == Ops:
        return _ops
    if wanted is PushId:
        return lambda data: PushId(*map(_int, data)) if len(data) == 3 else _refuse(data, "three numbers")
    if wanted is Placement:
        return Placement.from_json
    origin, arguments = get_origin(wanted), get_args(wanted)
    if origin is tuple and arguments[1:] == (...,):
        return _tuple_of(converter_of(arguments[0]))
    if origin is Literal:
        return lambda value: value if value in arguments else _refuse(value, f"one of {arguments}")
    if origin in (Union, types.UnionType):
        (one,) = [converter_of(each) for each in arguments if each is not type(None)]
        return lambda value: None if value is None else one(value)
    if isinstance(wanted, type) and issubclass(wanted, tuple):
        shape = _shape(wanted, 0)
        return lambda data: _nested(shape, data)
    raise TypeError(f"a codec does not know how to read {wanted}")


def _nested(shape: _Shape, data: Any) -> Any:
    if not isinstance(data, list | tuple) or len(data) != shape.most:
        _refuse(data, f"the {shape.most} fields of a {shape.kind.__name__}")
    return shape_read(shape, [*data], 0)


def _tuple_of(one: Convert) -> Convert:
    def convert(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            _refuse(value, "a list")
        return tuple(map(one, value))

    return convert


def _refuse(value: Any, expected: str) -> Any:
    raise ValueError(f"{value!r:.40}, expected {expected}")


def _int(value: Any) -> int:
    return value if type(value) is int else int(_refuse(value, "an integer"))


def _float(value: Any) -> float:
    number = type(value) in (int, float) and math.isfinite(value)
    return value if number else float(_refuse(value, "a finite number"))


def _bool(value: Any) -> bool:
    return value if type(value) is bool else bool(_refuse(value, "true or false"))


def _str(value: Any) -> str:
    return value if type(value) is str else str(_refuse(value, "text"))


def _ops(value: Any) -> Ops:
    if not isinstance(value, list):
        _refuse(value, "a list of operations")
    for op in value:
        if not isinstance(op, list) or not op or not isinstance(op[0], str):
            _refuse(op, "an operation on vectors")
    return value  # type: ignore[no-any-return]


_SCALARS: dict[Any, Convert] = {int: _int, float: _float, bool: _bool, str: _str}
