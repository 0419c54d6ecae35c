"""What a setting of a job must be by itself. Each check returns the value as the job keeps it."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from paceline.exceptions import UsageError
from paceline.plan.option import Check
from paceline.storage.names import check_name

__all__ = [
    "all_of_form",
    "host_and_port",
    "in_one_form",
    "one_of",
    "path",
    "positive",
    "split_address",
    "strings",
    "true_or_false",
    "whole_number",
]


_TOO_LARGE = 1 << 64


def whole_number(least: int, advice: str, *, below: int | None = None, limit: str = "") -> Check:
    """A whole number of at least `least`, and below `below`, which people read as `limit`."""

    def check(name: str, value: Any) -> int:
        # True is an int to Python, but "workers: yes" in a YAML file is a mistake.
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageError(f"{name}={value!r} is not a whole number; {advice}")
        if value < least:
            raise UsageError(f"{name}={value} is too small: give at least {least} ({advice})")
        if value >= _TOO_LARGE:
            raise UsageError(f"{name} is too large: give a number below 2^64")
        if below is not None and value >= below:
            raise UsageError(f"{name}={value} is too large: give a number below {limit}")
        return value

    return check


def positive(meaning: str, *, least: float = 0, too_small: str = "") -> Check:
    """A finite number above 0.

    Args:
        least: if it is smaller than this, it is refused for the reason `too_small`.
    """

    def check(name: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UsageError(f"{name}={value!r} is not a number ({meaning})")
        if not (value > 0 and math.isfinite(value)):
            raise UsageError(f"{name}={value:g} is not a finite number above 0 ({meaning})")
        if value < least:
            raise UsageError(f"{name}={value:g} is too small: {too_small}")
        return value

    return check


def true_or_false(name: str, value: Any) -> bool:
    """A flag."""
    if not isinstance(value, bool):
        raise UsageError(f"{name}={value!r} is neither True nor False")
    return value


def path(name: str, value: Any) -> str:
    """A path, or a module's name."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise UsageError(f"{name}={value!r} is not a path")
    check_name(name, value)
    return value


def strings(name: str, value: Any) -> tuple[str, ...]:
    """Several texts. Lists come from JSON, YAML and typer."""
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise UsageError(f"{name}={value!r} is not a list of strings")
    for text in value:
        check_name(name, text)
    return tuple(value)


def all_of_form(pattern: str, form: str) -> Check:
    """Several texts of one form, which people read as `form`."""

    def check(name: str, value: Any) -> tuple[str, ...]:
        texts = strings(name, value)
        for text in texts:
            if not re.fullmatch(pattern, text):
                raise UsageError(f"{name}: {text!r} is not of the form {form}")
        return texts

    return check


def host_and_port(name: str, value: Any) -> str:
    """An address and a port, as `10.0.0.1:7711` or `[fd00::1]:7711`."""
    split_address(name, value)
    return str(value)


def split_address(name: str, value: Any) -> tuple[str, int]:
    """Host and port of such an address."""
    match = (
        re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})", value)
        if isinstance(value, str)
        else None
    )
    if match is None or not 0 <= int(match[2]) < 65536:
        raise UsageError(f"{name}={value!r} is not of the form HOST:PORT, as in 10.0.0.1:7711")
    return match[1].strip("[]"), int(match[2])


def one_of(values: Sequence[str]) -> Check:
    """One of these texts."""

    def check(name: str, value: Any) -> Any:
        if value not in values:
            raise UsageError(f"{name}={value!r}: there is no such {name}. Valid: {', '.join(values)}")
        return value

    return check


def in_one_form(parse: Callable[[Any], Any]) -> Check:
    """A text that `parse` reads, and whose value has one text form: `3` is the mode `ssp:3`."""

    def check(name: str, value: Any) -> str:
        return str(parse(value))

    return check
