"""Small values that workers give each other: `paceline.gather` and what is made of it.

A worker calls at a place in its script, brings a value, and waits. It is answered, with all others that wait
at the same place, when nobody is left to come: every other member that takes part waits too, here, for
something else (a round, leases, a verdict) or at another place. So a call that all workers make gets all
their values, and one that only some workers make ends all the same.

A worker that joined after training had begun takes part from its first step on. Before that its script may go
through epochs that are over: its calls are answered at once, with the last answer at that place, or else with
its own value.

No sockets, no clock: the decider owns it, and followers replay the same events.
"""

from collections.abc import Set
from dataclasses import dataclass, field

__all__ = ["CollectiveCalls", "Values"]

Values = list[str]
"""What the callers brought, by rank."""

_MOST_PLACES = 16
"""Places whose last answer is kept."""
_MOST_WHOLE = 1_000
"""Places of which it is kept that all members have called there."""


@dataclass
class CollectiveCalls:
    """The calls of a run. One owner."""

    calls: dict[int, tuple[int, str, str]] = field(default_factory=dict)
    """Of each caller that waits: the call's number, the place and the value."""
    answers: dict[int, tuple[int, list[str]]] = field(default_factory=dict)
    """The last answer to each member, and the number of the call."""
    last: dict[str, list[str]] = field(default_factory=dict)
    """The last answer at each place."""
    whole: set[str] = field(default_factory=set)
    """Places at which all members have called."""
    late: set[int] = field(default_factory=set)
    """Members that joined after training had begun, and have not made a step yet."""
    left_out: list[tuple[str, int]] = field(default_factory=list)
    """Members that an answer was given without: the place, and the worker; to be cleared."""

    @property
    def callers(self) -> Set[int]:
        """Workers that wait for an answer."""
        return self.calls.keys()

    def joined(self, worker: int, *, late: bool) -> None:
        """A process joins, perhaps in another one's place."""
        self.forget(worker)
        if late:
            self.late.add(worker)

    def stepped(self, worker: int) -> None:
        """The worker made a step: it takes part from here on."""
        self.late.discard(worker)

    def forget(self, worker: int) -> None:
        """The worker left."""
        self.calls.pop(worker, None)
        self.answers.pop(worker, None)
        self.late.discard(worker)

    def call(self, worker: int, number: int, place: str, value: str) -> None:
        """A worker calls. A call that was heard before (its answer was lost) changes nothing."""
        heard = self.calls.get(worker, (0, "", ""))[0], self.answers.get(worker, (0, []))[0]
        if number > max(heard):
            self.calls[worker] = (number, place, value)

    def answer_to(self, worker: int, number: int) -> Values | None:
        """What was answered to this call; None if it was not answered yet."""
        answered, values = self.answers.get(worker, (0, []))
        return values if answered == number else None

    def last_answer(self, worker: int) -> Values:
        """The last answer to a member."""
        return self.answers[worker][1]

    def awaited(self, members: Set[int], busy: Set[int]) -> set[int]:
        """Members that the callers wait for.

        Args:
            busy: members that wait for something else, which may need those who call here.
        """
        return set(members - self.late - self.calls.keys() - busy) if self.calls else set()

    def settle(self, members: Set[int], busy: Set[int]) -> list[int]:
        """The callers that are answered now, by rank; see `awaited`."""
        answered = [worker for worker in self.calls if worker in self.late]
        for worker in answered:
            _, place, value = self.calls[worker]
            self._answer([worker], self.last.get(place, [value]))
        if not self.calls or self.awaited(members, busy):
            return sorted(answered)
        # Nobody else comes. Of several places one is answered: its callers go on, perhaps to where the others
        # wait. That is the one that fewest call at, since most scripts part ways by `if is_main():`.
        places: dict[str, list[int]] = {}
        for worker, (_, at, _) in sorted(self.calls.items()):
            places.setdefault(at, []).append(worker)
        place, callers = min(places.items(), key=lambda each: (len(each[1]), each[0] in self.whole, each[1]))
        if len(callers) == len(members - self.late) and len(self.whole) < _MOST_WHOLE:
            self.whole.add(place)
        self.left_out += [(place, worker) for worker in sorted(members - self.late - {*callers})]
        values = [self.calls[worker][2] for worker in callers]
        self.last.pop(place, None)
        self.last[place] = values
        if len(self.last) > _MOST_PLACES:
            del self.last[next(iter(self.last))]
        self._answer(callers, values)
        return sorted([*answered, *callers])

    def _answer(self, workers: list[int], values: Values) -> None:
        for worker in workers:
            self.answers[worker] = (self.calls.pop(worker)[0], values)
