"""The JSON files of a run directory, each read at one place: size, depth and types are checked.

run.json       what was asked for
status.json    where it stands
events.jsonl   what happened
summary.json   what the report says
"""

import io
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, TypedDict

from paceline.storage.json_files import parse_json, read_object
from paceline.storage.plain_files import read_bytes
from paceline.storage.typed_json import checked

__all__ = ["read_events", "read_record", "read_status", "read_summary", "unix_time"]

_MOST_RECORD = 16 << 20
_MOST_STATUS = 32 << 20
_MOST_EVENTS = 128 << 20
_LONGEST_EVENT = 4 << 20


class AskedJob(TypedDict, total=False):
    """What is shown of `Job.to_json()`. `Job.from_json` checks all of it."""

    script: str | None
    module: bool
    args: list[str]
    mode: str
    workers: int
    servers: int


class _Needed(TypedDict):
    """What every run.json has."""

    id: str
    job: AskedJob
    directory: str


class AskedFor(_Needed, total=False):
    """What is in run.json."""

    created: str
    made: bool
    mode_defaults: int
    plan: dict[str, Any] | None
    """`Plan.to_json()`; `Plan.from_json` checks it."""
    command: list[str]
    versions: dict[str, str | None]
    resumes: list[dict[str, Any]]
    task: dict[str, Any]


def read_record(run: Path) -> dict[str, Any]:
    """run.json.

    Raises:
        OSError, ValueError: it cannot be read, or is not a run's record.
    """
    record = checked(AskedFor, read_object(run / "run.json", most=_MOST_RECORD))
    for name in ("id", "directory"):
        if "\0" in (text := str(record[name])):
            raise ValueError(f"{name}: {text!r:.40} is not a name")
    return dict(record)


def read_status(run: Path) -> dict[str, Any]:
    """status.json as it is: `RunStatus.from_json` checks the types.

    Raises:
        OSError, ValueError: it cannot be read, or is not a JSON object.
    """
    return read_object(run / "status.json", most=_MOST_STATUS)


def read_events(run: Path, say: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """events.jsonl: every event that has a time. A line that cannot be one is left out.

    Args:
        say: told of a file that cannot be read.
    """
    try:
        data = read_bytes(run / "events.jsonl", most=_MOST_EVENTS)
    except FileNotFoundError:
        return []
    except OSError as error:
        say(f"events.jsonl cannot be read ({error.strerror or error})")
        return []
    found = []
    for line in io.BytesIO(data):
        if len(line) > _LONGEST_EVENT:
            continue
        try:
            event = parse_json(line.decode(errors="replace"))
        except ValueError:
            continue  # a crash cut it short
        if isinstance(event, dict) and isinstance(event.get("at"), str):
            found.append(event)
    return found


def unix_time(text: Any) -> float | None:
    """Of a time as these files have it; None if it is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def read_summary(run: Path) -> dict[str, Any]:
    """summary.json.

    Raises:
        OSError, ValueError: it cannot be read, or is not a JSON object.
    """
    return read_object(run / "summary.json", most=_MOST_STATUS)
