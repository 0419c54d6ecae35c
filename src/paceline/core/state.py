"""State as JSON: what a follower that joins a run later is sent of the decider.

A codec is built, once, from the annotations of a dataclass or NamedTuple: a record is an object with the
names of its fields, so that what travels is what is declared. What is decoded is checked: anything that does
not fit is a FrameError. (Steps and events, which travel in every round, have a shorter form: `codec.py`.)
"""

import dataclasses
import types
from collections import Counter
from collections.abc import Callable
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from paceline.core.codec import converter_of
from paceline.exceptions import FrameError

__all__ = ["StateCodec"]

T = TypeVar("T")
_Pair = tuple[Callable[[Any], Any], Callable[[Any], Any]]


class StateCodec(Generic[T]):
    """Writes and reads one kind of record, with all that is in it."""

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind
        self.encode, self._decode = _pair(kind)

    def decode(self, data: Any) -> T:
        """The record that `encode` wrote. Raises FrameError."""
        try:
            return self._decode(data)  # type: ignore[no-any-return]
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise FrameError(f"not the state of a {self._kind.__name__}: {error!r:.200}") from error


def _pair(wanted: Any) -> _Pair:
    """How values of a type are written and read."""
    origin, arguments = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        (write, read), *more = [_pair(each) for each in arguments if each is not type(None)]
        assert not more, wanted
        return (lambda v: None if v is None else write(v)), (lambda v: None if v is None else read(v))
    if origin is list or (origin is tuple and arguments[1:] == (...,)):
        write, read = _pair(arguments[0])
        return (lambda v: [write(each) for each in v]), (lambda v: origin(read(each) for each in _list(v)))
    if origin is set:
        write, read = _pair(arguments[0])
        return (lambda v: [write(each) for each in sorted(v)]), (lambda v: {read(each) for each in _list(v)})
    if origin is tuple:
        return _several(wanted, arguments)
    if origin in (dict, Counter):
        return _mapping(origin, arguments)
    if dataclasses.is_dataclass(wanted) or hasattr(wanted, "_fields"):
        return _record(wanted)
    return (lambda v: v), converter_of(wanted)


def _several(wanted: Any, arguments: tuple[Any, ...]) -> _Pair:
    pairs = [_pair(each) for each in arguments]

    def write(value: Any) -> Any:
        return [pair[0](each) for pair, each in zip(pairs, value, strict=True)]

    def read(value: Any) -> Any:
        return tuple(pair[1](each) for pair, each in zip(pairs, _list(value), strict=True))

    return write, read


def _mapping(origin: Any, arguments: tuple[Any, ...]) -> _Pair:
    """A list of pairs, since keys of JSON are texts; in their order, which may matter."""
    (write_key, read_key) = _pair(arguments[0])
    (write_value, read_value) = _pair(arguments[1] if origin is dict else int)

    def write(value: Any) -> Any:
        return [[write_key(k), write_value(v)] for k, v in value.items()]

    def read(value: Any) -> Any:
        return origin({read_key(k): read_value(v) for k, v in _list(value)})

    return write, read


def _record(kind: Any) -> _Pair:
    if dataclasses.is_dataclass(kind):
        names = [each.name for each in dataclasses.fields(kind)]
    else:
        names = [*kind._fields]
    hints = get_type_hints(kind)
    pairs = {name: _pair(hints[name]) for name in names}

    def write(value: Any) -> Any:
        return {name: pair[0](getattr(value, name)) for name, pair in pairs.items()}

    def read(value: Any) -> Any:
        if not isinstance(value, dict) or value.keys() != pairs.keys():
            raise ValueError(f"{value!r:.80} is not a {kind.__name__} with {', '.join(names)}")
        return kind(**{name: pair[1](value[name]) for name, pair in pairs.items()})

    return write, read


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.80} is not a list")
    return value
