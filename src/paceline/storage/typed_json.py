"""Plain data checked against the types of a class: what a reader gets has the types that it is written for.

`checked(RunStatus, data)` makes a dataclass from an object: unknown keys are left out, missing ones have
their defaults, and a value of another type is a ValueError that names its place (`workers.0.clock`). A
TypedDict stays a dict, and keeps what it does not name. A number is finite and has at most 64 bits, so
arithmetic with it does not fail; where NaN is meant to be possible, the type is `AnyFloat`.
"""

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = ["AnyFloat", "checked"]

T = TypeVar("T")
Check = Callable[[Any], Any]

_MAY_BE_NAN = "may be NaN or infinite"
AnyFloat = Annotated[float, _MAY_BE_NAN]
"""A number that a script computed."""

_LIMIT = 1 << 63
_WHOLE = re.compile(r"-?[0-9]{1,18}")


def checked(wanted: type[T], value: Any) -> T:
    """The value as `wanted`.

    Raises:
        ValueError: it is of another type, with its place.
    """
    kind: Any = wanted
    found: T = _check_of(kind)(value)
    return found


class _Misplaced(ValueError):
    """A value of another type, and its place, from the innermost key outwards."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.keys: list[str] = []

    def inside(self, key: object) -> "_Misplaced":
        self.keys.append(f"{key!s:.40}")
        return self

    def __str__(self) -> str:
        return f"{'.'.join(reversed(self.keys))}: {self.what}" if self.keys else self.what


@functools.cache
def _check_of(wanted: Any) -> Check:
    """What checks a value of this type."""
    if wanted in _SCALARS:
        return _SCALARS[wanted]
    origin, arguments = get_origin(wanted), get_args(wanted)
    if origin is Annotated:
        return _any_float if _MAY_BE_NAN in arguments[1:] else _check_of(arguments[0])
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is Literal:
        return lambda value: value if value in arguments else _refuse(value, f"one of {arguments}")
    if origin is list:
        return _list(_check_of(arguments[0]))
    if origin is dict:
        return _dict(_number_key if arguments[0] is int else _str, _check_of(arguments[1]))
    if origin is tuple:
        return _tuple(arguments)
    if dataclasses.is_dataclass(wanted):
        return _dataclass(wanted)
    if typing.is_typeddict(wanted):
        return _typed_dict(wanted)
    raise TypeError(f"typed_json does not know how to check {wanted}")


def _union(arguments: tuple[Any, ...]) -> Check:
    others = [_check_of(each) for each in arguments if each is not types.NoneType]
    (one,) = others
    if types.NoneType not in arguments:
        return one
    return lambda value: None if value is None else one(value)


def _list(one: Check) -> Check:
    def check(value: Any) -> list[Any]:
        if not isinstance(value, list):
            _refuse(value, "a list")
        return [_at(i, one, each) for i, each in enumerate(value)]

    return check


def _tuple(arguments: tuple[Any, ...]) -> Check:
    if arguments[1:] == (...,):
        every = _list(_check_of(arguments[0]))
        return lambda value: tuple(every(value))
    checks = [_check_of(each) for each in arguments]

    def check(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or len(value) != len(checks):
            _refuse(value, f"a list of {len(checks)}")
        return tuple(_at(i, one, each) for i, (one, each) in enumerate(zip(checks, value, strict=True)))

    return check


def _dict(key: Check, one: Check) -> Check:
    def check(value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            _refuse(value, "an object")
        return {key(name): _at(name, one, each) for name, each in value.items()}

    return check


def _dataclass(wanted: Any) -> Check:
    hints = get_type_hints(wanted, include_extras=True)
    fields = [(field.name, _check_of(hints[field.name])) for field in dataclasses.fields(wanted)]
    needed = [
        field.name
        for field in dataclasses.fields(wanted)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]

    def check(value: Any) -> Any:
        _check_object(value, needed)
        return wanted(**{name: _at(name, one, value[name]) for name, one in fields if name in value})

    return check


def _typed_dict(wanted: Any) -> Check:
    hints = {name: _check_of(hint) for name, hint in get_type_hints(wanted, include_extras=True).items()}
    needed = sorted(wanted.__required_keys__)

    def check(value: Any) -> dict[str, Any]:
        _check_object(value, needed)
        found = {name: _at(name, one, value[name]) for name, one in hints.items() if name in value}
        return {**value, **found}

    return check


def _check_object(value: Any, needed: list[str]) -> None:
    if not isinstance(value, dict):
        _refuse(value, "an object")
    for name in needed:
        if name not in value:
            raise _Misplaced("is missing").inside(name)


def _at(key: object, check: Check, value: Any) -> Any:
    try:
        return check(value)
    except _Misplaced as error:
        raise error.inside(key) from None


def _refuse(value: Any, expected: str) -> Any:
    raise _Misplaced(f"{_shown(value)} is not {expected}")


def _shown(value: Any) -> str:
    """A value of any size and depth, briefly."""
    if isinstance(value, str | int | float | None):
        text = (
            repr(value)
            if not isinstance(value, int) or abs(value) < _LIMIT
            else "a number of too many digits"
        )
        return text if len(text) <= 40 else f"{text[:40]}…"
    return (
        "an object"
        if isinstance(value, dict)
        else "a list"
        if isinstance(value, list)
        else type(value).__name__
    )


def _int(value: Any) -> int:
    good = type(value) is int and -_LIMIT <= value < _LIMIT
    return value if good else int(_refuse(value, "a whole number of at most 64 bits"))


def _float(value: Any) -> float:
    kind = type(value)
    good = (kind is float and math.isfinite(value)) or (kind is int and -_LIMIT <= value < _LIMIT)
    return value if good else float(_refuse(value, "a finite number"))


def _any_float(value: Any) -> float:
    return value if type(value) is float else _float(value)


def _bool(value: Any) -> bool:
    return value if type(value) is bool else bool(_refuse(value, "true or false"))


def _str(value: Any) -> str:
    return value if type(value) is str else str(_refuse(value, "text"))


def _number_key(value: Any) -> int:
    if type(value) is int:
        return _int(value)
    good = type(value) is str and _WHOLE.fullmatch(value)
    return int(value) if good else int(_refuse(value, "a whole number"))


def _any(value: Any) -> Any:
    return value


_SCALARS: dict[Any, Check] = {int: _int, float: _float, bool: _bool, str: _str, Any: _any}
