"""Breadth first through a world, so that the first trace to a fault is a shortest one."""

import collections
import time
from dataclasses import dataclass, field

from tests.explorer.model import Broken, World
from tests.explorer.world import Event, Explored, State

__all__ = ["Result", "explore"]


@dataclass
class Result:
    """What was seen of a world."""

    world: World
    states: int = 0
    transitions: int = 0
    exhausted: bool = False
    """Whether every state was seen; else the cap was hit, or a fault."""
    seconds: float = 0.0
    fault: str | None = None
    trace: list[Event] = field(default_factory=list)
    depth: int = 0


def explore(world: World, cap: int) -> Result:
    """See all states of a world, or as many as the cap allows, or up to the first fault."""
    began = time.perf_counter()
    explored, result = Explored(world), Result(world)
    first = explored.first()
    before: dict[State, tuple[State, Event] | None] = {first: None}
    queue = collections.deque([(first, 0)])
    try:
        while queue:
            state, depth = queue.popleft()
            result.depth = depth
            events = explored.events(state)
            if not events:
                at, last = state, None
                explored.check_stuck(state)
            for event in events:
                at, last = state, event
                following = explored.next(state, event)
                if following not in before:
                    before[following] = (state, event)
                    queue.append((following, depth + 1))
            if len(before) >= cap:
                break
        result.exhausted = not queue
    except Broken as broken:
        result.fault = str(broken)
        trace = [] if last is None else [last]
        while (step := before[at]) is not None:
            at = step[0]
            trace.append(step[1])
        result.trace = trace[::-1]
    result.states, result.transitions = len(before), explored.transitions
    result.seconds = time.perf_counter() - began
    return result
