"""JSON that another program may have written or damaged: bounded in size and depth, and Unicode throughout.

`json.loads` alone follows any nesting until the stack ends, and keeps half characters (`"\\ud800"`) that no
file and no terminal takes. What it returns here can be walked by recursion and written again.
"""

import json
import re
from pathlib import Path

from paceline.core.json_types import Json, JsonObject
from paceline.storage.plain_files import read_bytes

__all__ = ["MOST_DEPTH", "parse_json", "read_json", "read_object"]

MOST_DEPTH = 48
"""Of lists and objects in each other. The deepest that Paceline writes is a manifest: about 10."""

_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_HALF = re.compile("[\ud800-\udfff]")


def parse_json(data: bytes | str) -> Json:
    """The value of a JSON text. NaN and Infinity are numbers, as Python writes them.

    Raises:
        ValueError: it is not JSON, not UTF-8, or nested too deep.
    """
    text = data.decode() if isinstance(data, bytes) else data
    try:
        value: Json = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    level: list[Json] = [value]
    for _ in range(MOST_DEPTH + 1):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            break
    else:
        raise _too_deep()
    return _whole(value) if _ESCAPED_HALF.search(text) else value


def read_json(path: Path, *, most: int) -> Json:
    """The value in a file.

    Args:
        most: its largest size in bytes. The value may take twenty times as much memory.

    Raises:
        OSError: it cannot be read, is not a plain file, or is larger.
        ValueError: see `parse_json`.
    """
    return parse_json(read_bytes(path, most=most))


def read_object(path: Path, *, most: int) -> JsonObject:
    """As `read_json`; ValueError if it is not an object."""
    value = read_json(path, most=most)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _whole(value: Json) -> Json:
    """Without half characters."""
    match value:
        case str():
            return _HALF.sub("\ufffd", value)
        case list():
            return [_whole(each) for each in value]
        case dict():
            return {_HALF.sub("\ufffd", name): _whole(each) for name, each in value.items()}
        case _:
            return value


def _too_deep() -> ValueError:
    return ValueError(f"it is nested deeper than {MOST_DEPTH} levels")
