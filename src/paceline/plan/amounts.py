"""Durations and sizes as people type them."""

import re
from collections.abc import Callable

from paceline.exceptions import UsageError

__all__ = ["nbytes", "seconds"]

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_BYTES = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def seconds(option: str) -> Callable[[str], float]:
    """Reads a duration given to an option: `90`, `90s`, `30m`, `2h`, `1h30m`, `1.5d`, `2w`."""

    def parse(text: str) -> float:
        found = re.findall(r"(\d+(?:\.\d+)?)([smhdw]?)", str(text))
        if not found or "".join(number + unit for number, unit in found) != str(text):
            raise UsageError(f"{option} {text}: give seconds, or a duration such as 90s, 30m, 2h or 1h30m")
        return sum(float(number) * _SECONDS[unit or "s"] for number, unit in found)

    return parse


def nbytes(option: str) -> Callable[[str], int]:
    """Reads a size given to an option: `500MB`, `1.5G`, `2GiB`, `4096`."""

    def parse(text: str) -> int:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s?([kmgt]i?|)b?", str(text).strip().lower())
        if found is None:
            raise UsageError(f"{option} {text}: give bytes, or a size such as 500MB, 2GB or 1GiB")
        return int(float(found[1]) * _BYTES[found[2]])

    return parse
