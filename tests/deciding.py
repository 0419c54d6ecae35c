"""Speaks to a decider in JSON, as events and steps travel."""

import json
from typing import Any

from paceline.core.decider import CallAnswer, Lead, LeaseGrant, Verdict
from paceline.core.events import Granted, Take, event_from_json
from paceline.core.steps import Steps, steps_to_json

_STEPS = {"push", "join", "leave", "assign", "switch", "load", "answered"}
_AND_STEPS = {"take", "granted"}


def in_json(steps: Steps) -> Any:
    """Steps as they arrive."""
    return json.loads(json.dumps(steps_to_json(steps), allow_nan=False))


class JsonDecider:
    """A decider whose methods return steps as JSON."""

    decider: Lead

    def __init__(self, *args: Any, **more: Any) -> None:
        object.__setattr__(self, "decider", Lead(*args, **more))

    def __getattr__(self, name: str) -> Any:
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


def replay(lead: Lead | JsonDecider, event: list[Any]) -> Any:
    """What follows from an event: steps as JSON, or whom to answer what (and steps)."""
    happened = event_from_json(event)
    ruling = lead.decide(happened)
    steps = in_json(ruling.steps)
    grants = [tuple(each) for each in ruling.replies if isinstance(each, LeaseGrant)]
    if isinstance(happened, Take):
        return (grants[0][1] if grants else None, steps)
    if isinstance(happened, Granted):
        return (grants, steps)
    verdicts = [tuple(each) for each in ruling.replies if isinstance(each, Verdict)]
    return verdicts or [each.worker for each in ruling.replies if isinstance(each, CallAnswer)] or steps
