"""Codec for message classes: a NamedTuple or dataclass becomes the JSON body of a frame, and back.

The functions that read and write each field are built once, at import, from the field's annotation. Reading
validates: a body with a missing, unknown or mistyped field is a FrameError that names the field. Fields with
their default value are left out of the body.

Annotations may be `int`, `float`, `bool`, `str`, `X | None`, `tuple[X, ...]`, `tuple[X, Y]`, `dict[str, X]`,
`dict[int, X]`, `Json`, `JsonObject`, a class with `to_json` and `from_json`, and any type with a JsonForm
(`Annotated[…]`). JSON has no NaN and no infinity: floats that are not finite travel as text.
"""

import dataclasses
import math
import types
from collections.abc import Callable
from typing import (
    Annotated,
    Any,
    Generic,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from paceline.comm.frames import Body, Kind
from paceline.core.json_types import Json, JsonObject
from paceline.exceptions import FrameError

__all__ = ["Catalogue", "JsonForm", "body_of", "message"]

M = TypeVar("M")
C = TypeVar("C", bound=type)
_Convert = Callable[[Any], Any]

_INFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class JsonForm(NamedTuple):
    """How values of an annotated type are written as JSON and read."""

    write: _Convert
    read: _Convert
    """It may raise FrameError."""


_REQUIRED = object()


class _Codec(NamedTuple):
    kind: Kind
    make: Callable[..., Any]
    write: Callable[[Any], Body]
    readers: dict[str, _Convert]
    required: frozenset[str]


_CODECS: dict[type, _Codec] = {}


def message(kind: Kind) -> Callable[[C], C]:
    """Class decorator: frames of this kind carry this class, and no other class has the kind."""

    def register(cls: C) -> C:
        assert all(known.kind is not kind for known in _CODECS.values()), f"{kind.name} has a class already"
        hints, defaults = get_type_hints(cls, include_extras=True), _defaults(cls)
        _CODECS[cls] = _Codec(
            kind,
            cls,
            _body_writer(hints, defaults),
            {name: _reader(hints[name]) for name in defaults},
            frozenset(name for name, default in defaults.items() if default is _REQUIRED),
        )
        return cls

    return register


def _defaults(cls: Any) -> dict[str, object]:
    """The fields of a message class, each with its default."""
    if not dataclasses.is_dataclass(cls):
        return {name: cls._field_defaults.get(name, _REQUIRED) for name in cls._fields}
    return {
        each.name: _REQUIRED if each.default is dataclasses.MISSING else each.default
        for each in dataclasses.fields(cls)
    }


def body_of(said: object) -> tuple[Kind, Body]:
    """Kind and body of the frame that carries a message."""
    codec = _CODECS[type(said)]
    return codec.kind, codec.write(said)


def _body_writer(hints: dict[str, Any], defaults: dict[str, object]) -> Callable[[Any], Body]:
    """What makes the body of a message, as straight-line code: it runs in every round, and most fields of a
    push have their defaults. (dataclasses and namedtuple make their methods in the same way.)"""
    known: dict[str, object] = {}
    lines = ["def write(said):", " body = {}"]
    for i, (name, default) in enumerate(defaults.items()):
        known[f"default_{i}"], known[f"write_{i}"] = default, (convert := _writer(hints[name]))
        lines.append(f" value = said.{name}")
        if default is not _REQUIRED:
            lines.append(f" if value is not default_{i} and value != default_{i}:")
        lines.append(f"  body[{name!r}] = {'value' if convert is None else f'write_{i}(value)'}")
        if default is _REQUIRED:
            lines[-1] = lines[-1][1:]
    exec("\n".join([*lines, " return body"]), known)
    return cast(Callable[[Any], Body], known["write"])


class Catalogue(Generic[M]):
    """The messages that one side of a link accepts.

    Args:
        union: of message classes, as `A | B`, or one class.
        receiver: name of that side, for error messages.
    """

    def __init__(self, union: Any, receiver: str) -> None:
        self._codecs = {_CODECS[cls].kind: _CODECS[cls] for cls in get_args(union) or (union,)}
        self._receiver = receiver

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of frames that carry them."""
        return tuple(self._codecs)

    def read(self, kind: Kind, body: Body) -> M:
        """The message that a frame carries. Raises FrameError if it is no valid one."""
        codec = self._codecs.get(kind)
        if codec is None:
            raise FrameError(f"{kind.name} is no message to {self._receiver}")
        readers, values = codec.readers, {}
        for name, value in body.items():
            read = readers.get(name)
            if read is None:
                raise FrameError(f"a {kind.name} with an unknown field {name!r:.80}")
            try:
                values[name] = read(value)
            except (TypeError, ValueError, OverflowError):
                raise FrameError(f"field {name!r} of a {kind.name} is {_shown(value)}") from None
        if not codec.required <= values.keys():
            missing = min(codec.required - values.keys())
            raise FrameError(f"a {kind.name} without the field {missing!r}")
        found: M = codec.make(**values)
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
    if annotation == Json:
        return _as_it_is
    if annotation == JsonObject:
        return _exactly(dict)
    if get_origin(annotation) is Annotated:
        return _form_of(annotation).read
    if _is_union(annotation):
        inner = _reader(_of_optional(annotation))
        return lambda value: None if value is None else inner(value)
    if hasattr(annotation, "from_json"):
        return cast(_Convert, annotation.from_json)
    arguments = get_args(annotation)
    if get_origin(annotation) is tuple:
        if arguments[1:] == (...,):
            return _tuple_reader(_reader(arguments[0]))
        return _fixed_tuple_reader(tuple(map(_reader, arguments)))
    key, item = _read_number_key if arguments[0] is int else str, _reader(arguments[1])
    as_dict = _exactly(dict)
    return lambda value: {key(name): item(each) for name, each in as_dict(value).items()}


def _tuple_reader(item: _Convert) -> _Convert:
    def read(value: Any) -> Any:
        if type(value) is not list:
            raise TypeError
        return tuple(map(item, value))

    return read


def _fixed_tuple_reader(items: tuple[_Convert, ...]) -> _Convert:
    def read(value: Any) -> Any:
        if type(value) is not list or len(value) != len(items):
            raise TypeError
        return tuple(item(each) for item, each in zip(items, value, strict=True))

    return read


def _writer(annotation: Any) -> _Convert | None:
    """What makes JSON of a value; None: the value is JSON as it is."""
    if annotation is float:
        return _write_float
    if annotation in (int, bool, str) or annotation in (Json, JsonObject):
        return None
    if get_origin(annotation) is Annotated:
        return _form_of(annotation).write
    if _is_union(annotation):
        return _unless_none(_writer(_of_optional(annotation)))
    if hasattr(annotation, "to_json"):
        return cast(_Convert, annotation.to_json)
    arguments = get_args(annotation)
    if get_origin(annotation) is not tuple:
        item = _writer(arguments[1]) or _as_it_is
        return lambda value: {str(name): item(each) for name, each in value.items()}
    if arguments[1:] == (...,):
        return _list_writer(_writer(arguments[0]))
    items = tuple(map(_writer, arguments))
    if not any(items):
        return list
    writers = tuple(each or _as_it_is for each in items)
    return lambda value: [write(each) for write, each in zip(writers, value, strict=True)]


def _unless_none(write: _Convert | None) -> _Convert | None:
    return None if write is None else lambda value: None if value is None else write(value)


def _list_writer(item: _Convert | None) -> _Convert:
    return list if item is None else lambda value: [item(each) for each in value]


def _form_of(annotation: Any) -> JsonForm:
    (form,) = (each for each in get_args(annotation) if isinstance(each, JsonForm))
    return form


def _as_it_is(value: Any) -> Any:
    return value


def _shown(value: Any) -> str:
    """For messages. Huge integers have no decimal form."""
    try:
        return f"{value!r:.80}"
    except ValueError:
        return "a huge number"
