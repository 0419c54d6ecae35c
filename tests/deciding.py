"""Speaks to a decider in JSON, as events and steps travel."""

import json
from typing import Any

from paceline.core.decider import Decider
from paceline.core.decider_state import decider_state_from_json, decider_state_to_json
from paceline.core.events import Event, Granted, Take, event_from_json
from paceline.core.rulings import CallAnswer, LeaseGrant, Ruling, Verdict
from paceline.core.steps import Steps, steps_to_json

_STEPS = {"push", "join", "leave", "assign", "switch", "load", "answered"}
_AND_STEPS = {"take", "granted"}
_OF_PUSHES = {"applied", "sick", "refused_norm", "fates"}
_OF_GROUPS = {"speaks", "root_of"}


def in_json(steps: Steps) -> Any:
    """Steps as they arrive."""
    return json.loads(json.dumps(steps_to_json(steps), allow_nan=False))


class JsonDecider:
    """A decider whose methods return steps as JSON."""

    decider: Decider

    def __init__(self, *args: Any, **more: Any) -> None:
        object.__setattr__(self, "decider", Decider(*args, **more))

    def __getattr__(self, name: str) -> Any:
        if name in _OF_PUSHES:
            return getattr(self.decider.pushes, name)
        if name in _OF_GROUPS:
            return getattr(self.decider.groups, name)
        value = getattr(self.decider, name)
        if name in _STEPS:
            return lambda *args, **more: in_json(value(*args, **more))
        if name in _AND_STEPS:

            def call(*args: Any, **more: Any) -> Any:
                first, steps = value(*args, **more)
                return first, in_json(steps)

            return call
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.decider, name, value)


def replay(lead: Decider | JsonDecider, event: list[Any]) -> Any:
    """What follows from an event: steps as JSON, or whom to answer what (and steps)."""
    happened = event_from_json(event)
    return said(happened, lead.decide(happened))


def said(happened: Event, ruling: Ruling) -> Any:
    """A ruling as JSON: steps, or whom to answer what (and steps)."""
    steps = in_json(ruling.steps)
    grants = [tuple(each) for each in ruling.replies if isinstance(each, LeaseGrant)]
    if isinstance(happened, Take):
        return (grants[0][1] if grants else None, steps)
    if isinstance(happened, Granted):
        return (grants, steps)
    verdicts = [tuple(each) for each in ruling.replies if isinstance(each, Verdict)]
    return verdicts or [each.worker for each in ruling.replies if isinstance(each, CallAnswer)] or steps


def copied(decider: Decider) -> Decider:
    """A follower's decider that begins here, of the same mode."""
    other = Decider(decider.mode)
    state = json.loads(json.dumps(decider_state_to_json(decider.state()), allow_nan=False))
    other.load_state(decider_state_from_json(state))
    return other
