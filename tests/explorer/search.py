"""Sees the states of a world: breadth first up to a cap, and beyond it along random walks to the end.

Breadth first, the first trace to a fault is a shortest one. A fault that a walk finds has its trace
shortened.
"""

import collections
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

from paceline.worker.exchange import server_links
from tests.explorer.links import reach
from tests.explorer.model import Broken, World
from tests.explorer.world import Event, Explored, State

__all__ = ["Result", "explore", "replay"]

_LONGEST = 1_000
"""Events of a walk after which a run that does not end is a fault."""
_SHORTENED = 250
"""Longer traces are not shortened: it takes as many walks as a trace has events, and more."""


@dataclass
class Result:
    """What was seen of a world."""

    world: World
    states: int = 0
    transitions: int = 0
    exhausted: bool = False
    """Whether every state was seen; else the cap was hit, or a fault."""
    walks: int = 0
    """Random walks to the end, beyond the cap."""
    ends: int = 0
    """Ends that were reached."""
    seconds: float = 0.0
    fault: str | None = None
    trace: list[int] = field(default_factory=list)
    """The events to the fault, by their place in the list of those that may come next."""

    def __str__(self) -> str:
        if self.fault is not None:
            seen = f"FAULT after {self.states:,} states: {self.fault}"
        elif self.exhausted:
            seen = "exhausted"
        else:
            seen = f"cap hit; {self.walks} walks to the end"
        return (
            f"{self.world}: {self.states:,} states, {self.transitions:,} transitions, {self.ends:,} ends, "
            f"{seen} ({self.seconds:.1f} s)"
        )


@contextmanager
def explored_links() -> Iterator[None]:
    """Workers' links lead into the world instead of to sockets."""
    with patch.object(server_links, "connect", reach):
        yield


def explore(world: World, cap: int, *, walks: int = 0) -> Result:
    """See all states of a world, or as many as the cap allows; then walk, if that was not all.

    Stops at the first fault.
    """
    began = time.perf_counter()
    explored, result = Explored(world), Result(world)
    with explored_links():
        try:
            seen = _breadth_first(explored, result, cap)
            if not result.exhausted and result.fault is None:
                _walk(explored, result, walks, len(seen))
        finally:
            result.transitions = explored.transitions
    result.seconds = time.perf_counter() - began
    return result


Before = dict[State, tuple[State, int] | None]


def _breadth_first(explored: Explored, result: Result, cap: int) -> Before:
    first = explored.first()
    before: Before = {first: None}
    queue = collections.deque([first])
    while queue and len(before) < cap:
        state = queue.popleft()
        last: int | None = None
        try:
            events = explored.events(state)
            if not events:
                explored.check_stuck(state)
                result.ends += 1
            for last, event in enumerate(events):
                following = explored.next(state, event)
                if following not in before:
                    before[following] = (state, last)
                    queue.append(following)
        except Broken as broken:
            result.fault = str(broken)
            result.trace = [*_way_to(state, before), *([] if last is None else [last])]
            break
    result.states = len(before)
    result.exhausted = not queue and result.fault is None
    return before


def _way_to(state: State, before: Before) -> list[int]:
    trace = []
    while (step := before[state]) is not None:
        state = step[0]
        trace.append(step[1])
    return trace[::-1]


def _walk(explored: Explored, result: Result, walks: int, seed: int) -> None:
    rng = random.Random(seed)
    first = explored.first()
    for _ in range(walks):
        state, trace = first, []
        try:
            while events := explored.events(state):
                living = len(explored.living(state))
                # Mostly something that lives: else all deaths come within the first steps.
                at = rng.randrange(len(events)) if rng.random() < 0.1 else rng.randrange(living)
                trace.append(at)
                state = explored.next(state, events[at])
                if len(trace) > _LONGEST:
                    raise Broken("the run does not end")
            explored.check_stuck(state)
        except Broken as broken:
            result.fault = str(broken)
            result.trace = _shortened(explored, first, trace) if len(trace) < _SHORTENED else trace
            return
        result.walks += 1
        result.ends += 1


def _shortened(explored: Explored, first: State, trace: list[int]) -> list[int]:
    """A trace without events that the fault does not need."""
    named = [*_named(explored, first, trace)]
    at = len(named)
    while at > 0:
        at -= 1
        shorter = named[:at] + named[at + 1 :]
        if (found := _fault_of(explored, first, shorter)) is not None:
            named = shorter[:found]
            at = min(at, len(named))
    return [*_numbered(explored, first, named)]


def _named(explored: Explored, state: State, trace: list[int]) -> Iterator[Event]:
    for at in trace:
        event = explored.events(state)[at]
        yield event
        try:
            state = explored.next(state, event)
        except Broken:
            return


def _numbered(explored: Explored, state: State, events: list[Event]) -> Iterator[int]:
    for event in events:
        yield explored.events(state).index(event)
        try:
            state = explored.next(state, event)
        except Broken:
            return


def _fault_of(explored: Explored, state: State, events: list[Event]) -> int | None:
    """How many of these events lead to a fault; None: they do not, or one of them cannot come."""
    for at, event in enumerate(events):
        if event not in explored.events(state):
            return None
        try:
            state = explored.next(state, event)
        except Broken:
            return at + 1
    try:
        if not explored.events(state):
            explored.check_stuck(state)
    except Broken:
        return len(events)
    return None


def replay(world: World, trace: list[int]) -> Iterator[tuple[Event, list[str]]]:
    """Run a trace again: each event, and the messages on their way after it. Raises Broken where the fault
    is."""
    explored = Explored(world)
    with explored_links():
        state = explored.first()
        for at in trace:
            event = explored.events(state)[at]
            try:
                state = explored.next(state, event)
            except Broken:
                yield event, []
                raise
            yield (
                event,
                [
                    f"{source} → {to}: {' '.join(each.kind for each in messages)}"
                    for source, to, messages in state.channels
                ],
            )
        if not explored.events(state):
            explored.check_stuck(state)
