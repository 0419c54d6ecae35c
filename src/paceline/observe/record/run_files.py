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
from typing import TypedDict

from paceline.core.json_types import JsonObject
from paceline.storage.json_files import parse_json, read_object
from paceline.storage.plain_files import read_bytes
from paceline.storage.typed_json import checked

__all__ = [
    "AskedFor",
    "EarlierStart",
    "read_events",
    "read_record",
    "read_status",
    "read_summary",
    "unix_time",
]

_MOST_RECORD = 16 << 20
_MOST_STATUS = 32 << 20
_MOST_EVENTS = 128 << 20
_LONGEST_EVENT = 4 << 20


class _AskedJob(TypedDict, total=False):
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
    job: _AskedJob
    directory: str


class EarlierStart(TypedDict, total=False):
    """What was asked for until the run was resumed, and when that was."""

    at: str
    job: JsonObject | None
    command: list[str] | None
    versions: dict[str, str | None] | None


class AskedFor(TypedDict, total=False):
    """What is in run.json; `id`, `job` and `directory` in each that can be read."""

    id: str
    job: JsonObject
    """`Job.to_json()`; `Job.from_json` checks it."""
    directory: str
    created: str
    made: bool
    mode_defaults: int
    plan: JsonObject | None
    """`Plan.to_json()`; `Plan.from_json` checks it."""
    command: list[str]
    versions: dict[str, str | None]
    resumes: list[EarlierStart]
    task: JsonObject


def read_record(run: Path) -> AskedFor:
    """run.json.

    Raises:
        OSError, ValueError: it cannot be read, or is not a run's record.
    """
    data = read_object(run / "run.json", most=_MOST_RECORD)
    needed = checked(_Needed, data)
    for name, text in (("id", needed["id"]), ("directory", needed["directory"])):
        if "\0" in text:
            raise ValueError(f"{name}: {text!r:.40} is not a name")
    return checked(AskedFor, data)


def read_status(run: Path) -> JsonObject:
    """status.json as it is: `RunStatus.from_json` checks the types.

    Raises:
        OSError, ValueError: it cannot be read, or is not a JSON object.
    """
    return read_object(run / "status.json", most=_MOST_STATUS)


def read_events(run: Path, say: Callable[[str], None] = lambda _: None) -> list[JsonObject]:
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


def unix_time(text: object) -> float | None:
    """Of a time as these files have it; None if it is none."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return None


class SummaryDiagnosis(TypedDict):
    """What limited the run, in its summary."""

    limit: str
    sentence: str
    advice: str


class RunSummary(TypedDict):
    """What the command that ran it reads of summary.json."""

    diagnosis: SummaryDiagnosis


def read_summary(run: Path) -> RunSummary:
    """summary.json.

    Raises:
        OSError, ValueError: it cannot be read, or is not a run's summary.
    """
    return checked(RunSummary, read_object(run / "summary.json", most=_MOST_STATUS))
