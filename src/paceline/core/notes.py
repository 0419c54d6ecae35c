"""Notes: what a reply tells a worker beside its answer, by the names of the message's fields."""

from typing import Required, TypedDict

from paceline.core.json_types import Json, JsonObject

__all__ = ["AdmitNotes", "GrantNotes", "Notes", "WelcomeNotes"]


class Notes(TypedDict, total=False):
    """What a reply tells a worker beside its answer. What they mean: `LeadNews`, and the other fields of
    replies, in `comm/worker_messages.py`."""

    on: int
    held: float
    leave: bool
    stop: bool
    mode: str
    next: Json
    placement: Json
    save: int


class GrantNotes(Notes):
    """With leases."""

    version: int


class AdmitNotes(Notes, total=False):
    """With the answer to a push, pull or assign."""

    version: Required[int]
    samples: int
    done: int
    others: bool
    cut: bool
    settled: int
    unapplied: tuple[int, ...]


class WelcomeNotes(TypedDict, total=False):
    """With the answer to a worker that attached."""

    version: Required[int]
    mode: str
    samples: int
    done: int
    others: bool
    group: JsonObject | None
    cut: bool
    next: Json
    stop: bool
    placement: Json
