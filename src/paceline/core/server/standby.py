"""Standby: what a follower keeps so that it can lead: a decider that hears every event of the leader's.

The decider is pure: the same events make the same decisions. The leader sends every event before it acts on
it, so the followers know every answer that a worker may have got. A server that joins later is sent the
decider's state as it is.
"""

from collections import deque
from collections.abc import Sequence

from paceline.core.decider import Decider
from paceline.core.decider_state import decider_state_from_json
from paceline.core.events import Event, Push, event_from_json, event_to_json
from paceline.core.json_types import Json
from paceline.core.steps import CommitStep, Steps
from paceline.core.totals import Applied
from paceline.exceptions import FrameError

__all__ = ["Standby", "records_from_json", "records_to_json"]

_RECORDS = 1 << 16
"""Number of records that are kept: more than the leader has not written down yet."""


class Standby:
    """One owner: a follower.

    Args:
        decider: of the run as it begins.
    """

    def __init__(self, decider: Decider) -> None:
        self.decider = decider
        self.records: deque[Applied] = deque(maxlen=_RECORDS)
        """Records of the last applied pushes."""
        self.held: Steps = []
        """Steps that wait for an update's second half."""
        self.gone: dict[int, tuple[int, bool]] = {}
        """Workers whose links have ended: the incarnation, and whether its script had ended."""

    def begin_here(self, state: Json, records: Json) -> None:
        """Know what the leader knows now, from JSON. Raises FrameError."""
        self.decider.load_state(decider_state_from_json(state))
        self.held = []
        self.records.clear()
        self.records.extend(records_from_json(records))

    def hear(self, steps: Steps, events: Sequence[Event], held: Steps) -> None:
        """The leader sent steps, the events that they follow from, and steps that it holds."""
        for event in events:
            self.records.extend(self.decider.decide(event).applied)
        if any(isinstance(step, CommitStep) for step in steps):
            self.held = []
        self.held += held


def records_to_json(records: Sequence[Applied]) -> Json:
    """Records of applied pushes that the leader has not written yet."""
    return [[record.version, event_to_json(record.push), record.staleness] for record in records]


def records_from_json(data: Json) -> list[Applied]:
    """The inverse of `records_to_json`. Raises FrameError."""
    found = []
    for each in data if isinstance(data, list) else [data]:
        version, push, staleness = each if isinstance(each, list) and len(each) == 3 else (None, None, None)
        decoded = event_from_json(push)
        if type(version) is not int or type(staleness) is not int or not isinstance(decoded, Push):
            raise FrameError(f"{each!r:.80} is not the record of a push")
        found.append(Applied(version, decoded, staleness))
    return found
