"""Codec for message classes: a NamedTuple becomes the JSON body of a frame, and the other way round.

The functions that read and write each field are built once, at import, from the field's annotation. Reading
validates: a body with a missing, unknown or mistyped field is a FrameError that names the field. Fields with
their default value are left out of the body.

Annotations may be `int`, `float`, `bool`, `str`, `X | None`, `tuple[X, ...]`, `tuple[X, Y]`, `dict[str, X]`,
`dict[int, X]` and `Json`. JSON has no NaN and no infinity: floats that are not finite travel as text.
"""

import math
import types
from collections.abc import Callable
from typing import (
    Any,
    Generic,
    NamedTuple,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from paceline.comm.frames import Body, Kind
from paceline.exceptions import FrameError

__all__ = ["Catalogue", "Json", "body_of", "message"]

Json: TypeAlias = Body
"""A field that holds a JSON object which its reader validates."""
M = TypeVar("M")
C = TypeVar("C", bound=type)
_Convert = Callable[[Any], Any]

_INFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class _Field(NamedTuple):
    name: str
    read: _Convert
    write: _Convert
    default: Any


_REQUIRED = object()


class _Codec(NamedTuple):
    kind: Kind
    make: Callable[..., Any]
    fields: tuple[_Field, ...]
    names: frozenset[str]


_CODECS: dict[type, _Codec] = {}


def message(kind: Kind) -> Callable[[C], C]:
    """Class decorator: frames of this kind carry this NamedTuple, and no other class has the kind."""

    def register(cls: C) -> C:
        assert all(known.kind is not kind for known in _CODECS.values()), f"{kind.name} has a class already"
        hints, make = get_type_hints(cls), cast(Any, cls)
        defaults = make._field_defaults
        fields = tuple(
            _Field(name, _reader(hints[name]), _writer(hints[name]), defaults.get(name, _REQUIRED))
            for name in make._fields
        )
        _CODECS[cls] = _Codec(kind, make, fields, frozenset(make._fields))
        return cls

    return register


def body_of(said: tuple[Any, ...]) -> tuple[Kind, Body]:
    """Kind and body of the frame that carries a message."""
    codec = _CODECS[type(said)]
    values = zip(codec.fields, said, strict=True)
    return codec.kind, {
        each.name: each.write(value)
        for each, value in values
        if each.default is _REQUIRED or value != each.default
    }


class Catalogue(Generic[M]):
    """The messages that one side of a link accepts.

    Args:
        union: of message classes, as `A | B`, or one class.
        receiver: name of that side, for error messages.
    """

    def __init__(self, union: Any, receiver: str) -> None:
        self._codecs = {_CODECS[cls].kind: _CODECS[cls] for cls in get_args(union) or (union,)}
        self._receiver = receiver

    def read(self, kind: Kind, body: Body) -> M:
        """The message that a frame carries. Raises FrameError if it is no valid one."""
        codec = self._codecs.get(kind)
        if codec is None:
            raise FrameError(f"{kind.name} is no message to {self._receiver}")
        if unknown := body.keys() - codec.names:
            raise FrameError(f"a {kind.name} with an unknown field {min(unknown)!r:.80}")
        values = []
        for each in codec.fields:
            value = body.get(each.name, _REQUIRED)
            if value is _REQUIRED:
                if each.default is _REQUIRED:
                    raise FrameError(f"a {kind.name} without the field {each.name!r}")
                values.append(each.default)
                continue
            try:
                values.append(each.read(value))
            except (TypeError, ValueError, OverflowError):
                raise FrameError(f"field {each.name!r} of a {kind.name} is {_shown(value)}") from None
        found: M = codec.make(*values)
        return found


# --- fields: readers raise TypeError or ValueError ------------------------------------------------------


def _exactly(kind: type) -> _Convert:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise TypeError
        return value

    return read


def _read_int(value: Any) -> int:
    if type(value) is not int:
        raise TypeError
    if not -(1 << 63) <= value < 1 << 63:  # JSON's have no bound
        raise OverflowError
    return value


def _read_float(value: Any) -> float:
    if type(value) is str:
        if value not in _INFINITE:
            raise ValueError
        return _INFINITE[value]
    if type(value) not in (int, float) or not math.isfinite(value):
        raise TypeError
    return float(value)


def _write_float(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _read_number_key(key: str) -> int:
    number = _read_int(int(key))
    if str(number) != key:
        raise ValueError
    return number


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _of_optional(annotation: Any) -> Any:
    (inner,) = (each for each in get_args(annotation) if each is not type(None))
    return inner


def _reader(annotation: Any) -> _Convert:
    if annotation is float:
        return _read_float
    if annotation is int:
        return _read_int
    if annotation in (bool, str):
        return _exactly(annotation)
    if _is_union(annotation):
        inner = _reader(_of_optional(annotation))
        return lambda value: None if value is None else inner(value)
    arguments = get_args(annotation)
    if get_origin(annotation) is tuple:
        if arguments[1:] == (...,):
            item, as_list = _reader(arguments[0]), _exactly(list)
            return lambda value: tuple(map(item, as_list(value)))
        return _fixed_tuple_reader(tuple(map(_reader, arguments)))
    if annotation == Json:
        return _exactly(dict)
    key, item = _read_number_key if arguments[0] is int else str, _reader(arguments[1])
    as_dict = _exactly(dict)
    return lambda value: {key(name): item(each) for name, each in as_dict(value).items()}


def _fixed_tuple_reader(items: tuple[_Convert, ...]) -> _Convert:
    def read(value: Any) -> Any:
        if type(value) is not list or len(value) != len(items):
            raise TypeError
        return tuple(item(each) for item, each in zip(items, value, strict=True))

    return read


def _writer(annotation: Any) -> _Convert:
    if annotation is float:
        return _write_float
    if annotation in (int, bool, str) or annotation == Json:
        return _as_it_is
    if _is_union(annotation):
        inner = _writer(_of_optional(annotation))
        return lambda value: None if value is None else inner(value)
    arguments = get_args(annotation)
    if get_origin(annotation) is tuple:
        if arguments[1:] == (...,):
            item = _writer(arguments[0])
            return lambda value: [item(each) for each in value]
        items = tuple(map(_writer, arguments))
        return lambda value: [item(each) for item, each in zip(items, value, strict=True)]
    item = _writer(arguments[1])
    return lambda value: {str(name): item(each) for name, each in value.items()}


def _as_it_is(value: Any) -> Any:
    return value


def _shown(value: Any) -> str:
    """For messages. Huge integers have no decimal form."""
    try:
        return f"{value!r:.80}"
    except ValueError:
        return "a huge number"
