"""A worker's side of ending early: what its script is told, and where a script ends that does not ask.

The lead decides that the run ends early (`ps/ballot.py`) and says so with its next reply. Then

- a loop over the prepared loader ends before its next batch, and the script goes on behind it;
- `paceline.should_stop` returns True;
- a script that begins another loop all the same ends there, as by `sys.exit(0)`; so does one without a
  prepared loader that has never called should_stop, behind its next step.

Members of a group hear it from their root, at a point that all of them pass: so they end at the same step.
"""

from typing import Any

from paceline.collective import Group
from paceline.exceptions import UsageError
from paceline.worker.exchange.client import Client

__all__ = ["WHO", "EarlyEnd", "check_who"]

WHO = ("any", "all", "main")


def check_who(who: str) -> None:
    """Refuse what `should_stop` does not know."""
    if who not in WHO:
        raise UsageError(
            f"should_stop(who={who!r}): whose condition is to count? Give 'any' (one worker's is enough), "
            "'all' (every worker's) or 'main' (worker 0's)."
        )


class EarlyEnd:
    """Of one worker.

    Args:
        group: the workers that it acts together with, if the mode has groups.
        has_loader: whether the script prepared a loader.
    """

    def __init__(self, client: Client, group: Group | None, *, has_loader: bool) -> None:
        self._client = client
        self._group = group
        self._has_loader = has_loader
        self._agreed = False
        self._asked = False
        self._epoch = -1

    @property
    def told(self) -> bool:
        """Whether this worker ends early."""
        return self._client.news.stop_due if self._group is None else self._agreed

    @property
    def known(self) -> bool:
        """Whether the lead has said so, to this member of a group alone."""
        return self._client.news.stop_due

    def agree(self) -> None:
        """All members of the group have heard it from their root."""
        self._agreed = True

    def asks(self) -> None:
        """The script calls should_stop."""
        self._asked = True

    def vote(self, who: str, wants: bool) -> bool:
        """Whether the run ends early, with this worker's vote."""
        if self._group is None:
            return self._client.vote(who, wants)
        facts = self._group.meet(f"calls paceline.should_stop(who={who!r})", wants=wants)
        news: dict[str, Any] = {}
        if self._group.is_root:
            conditions = [bool(fact["wants"]) for fact in facts]
            wants = conditions[0] if who == "main" else (any if who == "any" else all)(conditions)
            news = {"stop": self._client.vote(who, wants)}
        if self._group.tell(**news)["stop"]:
            self.agree()
        return self.told

    def enter(self, epoch: int) -> None:
        """The script begins, or goes on with, a loop over its loader. Its end, if it was told before.

        The first loop of all is empty then, and the script goes on behind it.
        """
        if self.told and epoch > self._epoch >= 0:
            raise SystemExit(0)
        self._epoch = max(epoch, self._epoch)

    def stepped(self) -> None:
        """The script made a step. Its end, if nothing else would end it."""
        if self.told and not self._has_loader and not self._asked:
            raise SystemExit(0)
