"""Whether the run ends early: what the workers said in `paceline.should_stop`, and the decision.

A worker votes each time its script calls should_stop, and waits for the answer. The run ends early when

- "any": one of the workers that ask now says so;
- "main": worker 0 says so (without it, the lowest rank that is there);
- "all": the last vote of every member said so.

Where workers go on together (rounds), they ask together: nobody is answered before every member has asked or
waits for something else (for the next round, for leases), so all that ask get the same answer at the same
step. Without rounds a worker is answered at once. A decision is final, and every later call is told of it.

No sockets, no clock: the decider owns it, and followers replay the same events.
"""

from collections.abc import Set
from dataclasses import dataclass, field

__all__ = ["WHO", "Ballot"]

WHO = ("any", "all", "main")
"""Whose condition counts."""


@dataclass
class Ballot:
    """The votes of a run. One owner."""

    reason: str | None = None
    """Why the run ends early; None while it goes on."""
    votes: dict[int, tuple[int, str, bool]] = field(default_factory=dict)
    """The last vote of each member: its number, whose condition counts, and the condition."""
    voters: set[int] = field(default_factory=set)
    """Workers that wait for an answer."""
    answers: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """The last answer to each member, and the number of the vote that it answered."""

    @property
    def waiting(self) -> bool:
        """Whether a worker waits for an answer."""
        return bool(self.voters)

    def forget(self, worker: int) -> None:
        """The worker left, or another process joins in its place."""
        self.votes.pop(worker, None)
        self.answers.pop(worker, None)
        self.voters.discard(worker)

    def vote(self, worker: int, number: int, who: str, wants: bool) -> None:
        """A worker asks. A vote that was counted before (its answer was lost) changes nothing."""
        if worker in self.votes and number <= self.votes[worker][0]:
            return
        self.votes[worker] = (number, who, wants)
        self.voters.add(worker)

    def answer_to(self, worker: int, number: int) -> bool | None:
        """What was answered to this vote; None if it was not answered yet."""
        answered, stop = self.answers.get(worker, (0, False))
        return stop if answered == number else None

    def stop(self, reason: str) -> None:
        """End the run early, whatever the votes. The first reason counts."""
        self.reason = self.reason or reason

    def awaited(self, members: Set[int], busy: Set[int]) -> set[int]:
        """Members that those who wait for an answer wait for.

        Args:
            busy: members that wait for something else, which may need those who ask here.
        """
        return set(members - self.voters - busy) if self.voters and self.reason is None else set()

    def settle(self, members: Set[int], busy: Set[int], *, together: bool) -> list[tuple[int, bool]]:
        """The answers that are possible now: (worker, whether the run ends), by rank.

        Args:
            together: nobody is answered before all members have asked, but for the `busy` ones.
        """
        if not self.voters or (together and self.awaited(members, busy)):
            return []
        if self.reason is None:
            self.reason = self._decision(members)
        answers = [(worker, self.reason is not None) for worker in sorted(self.voters)]
        self.voters.clear()
        for worker, stop in answers:
            self.answers[worker] = (self.votes[worker][0], stop)
        return answers

    def _decision(self, members: Set[int]) -> str | None:
        asked = "condition in paceline.should_stop() was true"
        main = min(members, default=0)
        for worker in sorted(self.voters):
            _, who, wants = self.votes[worker]
            if wants and (who == "any" or (who == "main" and worker == main)):
                return f"worker:{worker}'s {asked}"
        votes = [self.votes.get(worker, (0, "", False)) for worker in members]
        if votes and all(who == "all" and wants for _, who, wants in votes):
            return f"every worker's {asked}"
        return None
