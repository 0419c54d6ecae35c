"""What a follower keeps so that it can lead: a Lead of its own, which hears all that the lead hears.

The Lead is pure: the same events make the same decisions. The lead sends every event before it acts on it, so
whatever anybody was answered, the followers know. A server that joins later is sent the Lead as it is.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from paceline.core.ballot import Ballot
from paceline.core.collective_calls import CollectiveCalls
from paceline.core.decider import Applied, Lead, Totals
from paceline.core.events import Event, Push
from paceline.core.fates import Fates
from paceline.core.leases import Lease, LeaseBook
from paceline.core.modes import Clocks, ModeSpec, PushId, Rounds, Schedule, parse_mode
from paceline.core.norms import NormBound
from paceline.core.steps import CommitStep, Steps
from paceline.exceptions import FrameError

__all__ = ["Standby", "lead_from_json", "lead_to_json"]

_RECORDS = 1 << 16
"""So many of the last applied pushes are kept: more than the lead has not written down yet."""


class Standby:
    """A follower's readiness.

    Args:
        model: the offer that the run adopted, as the lead told it.
        extras: frozen parameters and initial buffers.
    """

    def __init__(self, lead: Lead, model: dict[str, Any], extras: dict[str, Tensor]) -> None:
        self.lead = lead
        self.model = model
        self.extras = extras
        self.states: dict[str, dict[str, Tensor]] = {}
        """The workers' parts of the next checkpoint, by file."""
        self.held: Steps = []
        """Steps that wait for an update's second half."""
        self.gone: dict[int, tuple[int, bool]] = {}
        """Workers whose link has ended: incarnation, and whether their script had."""

    def hear(self, steps: Steps, events: Sequence[Event], held: Steps) -> None:
        """What the lead sends with an order: steps, what they follow from, and steps that wait."""
        for event in events:
            self.lead.decide(event)
        self.lead.sick.clear()
        self.lead.news.clear()
        del self.lead.applied[:-_RECORDS]
        if any(isinstance(step, CommitStep) for step in steps):
            self.held = []
        self.held += held


_CLASSES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Lead,
        Ballot,
        CollectiveCalls,
        Totals,
        NormBound,
        Fates,
        Push,
        PushId,
        Applied,
        Lease,
        LeaseBook,
        Rounds,
        Clocks,
        Schedule,
    )
}
_MANY: dict[str, Any] = {"tuple": tuple, "set": set}


def lead_to_json(lead: Lead) -> Any:
    """All that a Lead knows. (Its checkpoint leaves out who is there, and what is under way.)"""
    return _dump(lead)


def lead_from_json(data: Any) -> Lead:
    """The inverse of `lead_to_json`; anything odd is a FrameError."""
    try:
        lead = _load(data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FrameError(f"not what a lead knows: {error!r:.200}") from error
    if not isinstance(lead, Lead):
        raise FrameError(f"a {type(lead).__name__}, expected what a lead knows")
    return lead


def _dump(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_dump(each) for each in value]
    if isinstance(value, ModeSpec):
        return {"mode": str(value)}
    if isinstance(value, dict):
        name = "counter" if isinstance(value, collections.Counter) else "dict"
        return {name: [[_dump(k), _dump(v)] for k, v in value.items()]}
    name = type(value).__name__
    if isinstance(value, collections.deque):
        return {name: [value.maxlen, [_dump(each) for each in value]]}
    if name in _MANY:
        ordered = sorted(value) if isinstance(value, set) else value
        return {name: [_dump(each) for each in ordered]}
    if type(value) is not _CLASSES.get(name):
        raise TypeError(f"a {name} in a Lead: standby.py does not know how to send it")
    if isinstance(value, tuple):
        return {name: [_dump(each) for each in value]}
    fields = (
        [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else [*vars(value)]
    )
    return {name: {field: _dump(getattr(value, field)) for field in fields}}


def _load(data: Any) -> Any:
    if isinstance(data, list):
        return [_load(each) for each in data]
    if not isinstance(data, dict):
        return data
    ((name, content),) = data.items()
    if name == "mode":
        return parse_mode(content)
    if name in ("dict", "counter"):
        pairs = {_load(k): _load(v) for k, v in content}
        return collections.Counter(pairs) if name == "counter" else pairs
    if name == "deque":
        limit, items = content
        return collections.deque((_load(each) for each in items), maxlen=limit)
    if name in _MANY:
        return _MANY[name](_load(each) for each in content)
    kind = _CLASSES[name]
    if issubclass(kind, tuple):
        return kind(*(_load(each) for each in content))
    found = object.__new__(kind)
    for field, value in content.items():
        object.__setattr__(found, field, _load(value))
    return found
