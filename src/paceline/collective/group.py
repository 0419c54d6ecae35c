"""A group of workers that act as one: they meet, average their gradients, and share parameters.

Members meet at their root, the lowest rank, over authenticated links of our own: each says what it is about
to do, and hears what all of them do. So when two scripts diverge, both get a message that names the two
calls, and no member waits for one that will never come. What is large travels elsewhere: where all members
are on one host, through memory that all of them map; otherwise through gloo's ring.

    member ──"step", samples, finite──► root        every member averages a part of the gradient
    member ◄──weights, void, save────── root        in everybody's memory (or all together, by gloo)

Why not DistributedDataParallel: it wraps the model (other state_dict keys), weighs ranks instead of samples,
and hangs when a rank has fewer batches (docs/decisions.md).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.collective.group_messages import Body, GroupMessages, names_of
from paceline.collective.reducer import Reducer
from paceline.collective.ring import RingReducer
from paceline.collective.shared_memory import SharedMemoryReducer
from paceline.comm import Connection, Region
from paceline.exceptions import UsageError
from paceline.observe.record.spans import NO_SPANS, Lane
from paceline.params import Layout

__all__ = ["ENDS", "Group"]

ENDS = "ends its script"
"""What a member says it does, see `Group.meet`, when its script has ended."""


class Group:
    """The members, from one member's side. Every method is called by all of them, in the same order.

    Args:
        links: see `GroupLinks.meet`.
        region: this member's memory: its gradient, and behind it its parameters, each as the layout has them.
        lane: of the member's main thread.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        links: Mapping[int, Connection],
        *,
        region: Region,
        layout: Layout,
        deadline_s: float,
        lane: Lane = NO_SPANS.main,
    ) -> None:
        self._messages = GroupMessages(ranks, rank, links, deadline_s=deadline_s, lane=lane)
        self.ranks = self._messages.ranks
        self.rank = rank
        self.root = self._messages.root
        self.place = self._messages.place
        self.is_root = self._messages.is_root
        """Whether this member speaks for the group."""
        self.size = len(self.ranks)
        self.ended: str | None = None
        """What happened, once a member ended its script before the others."""
        self.on_wire = not self._messages.agree(all(c.local for c in links.values()))
        """Whether what is large travels over sockets."""
        reducer = RingReducer if self.on_wire else SharedMemoryReducer
        self._reducer: Reducer = reducer(self._messages, region, layout)

    @property
    def waited_s(self) -> float:
        """Seconds in which this member waited for the others."""
        return self._messages.waited_s

    def meet(self, call: str, **facts: Any) -> list[Body]:
        """Say what this member is about to do, and hear everybody's facts, in rank order.

        Args:
            call: what the script asked for, in words that finish the sentence "worker:1 …".

        Raises:
            SystemExit: another member's script has ended. A group cannot go on without it, so all of its
                scripts end here, in order; `ended` says why.
            UsageError: others are about to do something else.
        """
        if self.ended is not None:
            raise SystemExit(0)
        everybody = self._messages.exchange({"call": call, **facts}, self._compare)
        if "differ" in everybody:
            raise UsageError(everybody["differ"])
        if "ended" in everybody:
            self.ended = everybody["ended"]
            if call == ENDS:
                return []
            raise SystemExit(0)
        found: list[Body] = everybody["all"]
        return found

    def _compare(self, bodies: list[Body]) -> Body:
        first = bodies[0]["call"]
        ended = [rank for rank, body in zip(self.ranks, bodies, strict=True) if body["call"] == ENDS]
        if ended and len(ended) < self.size:
            rank, call = next(
                (r, b["call"]) for r, b in zip(self.ranks, bodies, strict=True) if r not in ended
            )
            return {
                "ended": f"{names_of(ended)} ended its script while worker:{rank} {call}, and "
                f"{self._messages.name} cannot go on without it: all of it ended here, in order. If all "
                "workers are to end together, call paceline.should_stop(condition) on every worker."
            }
        for rank, body in zip(self.ranks, bodies, strict=True):
            if body["call"] != first:
                return {
                    "differ": f"worker:{self.root} {first} while worker:{rank} {body['call']}: workers of a "
                    "group must do the same, in the same order. Check what in the script depends on the rank."
                }
        return {"all": bodies}

    def mean(self, weights: Sequence[float]) -> bool:
        """Make everybody's gradient the weighted mean of all; False if that is not finite.

        To be called after they met, so that everybody's gradient is there.

        Args:
            weights: of the members, in rank order; one without weight is left out.
        """
        if self.size == 1:
            return True
        with torch.no_grad():
            return self._reducer.mean(weights)

    def share(self, **news: Any) -> Body:
        """Give everybody the root's parameters, and its news. In the members' region afterwards."""
        news = self._messages.tell(news)
        with torch.no_grad():
            self._reducer.share()
        return news

    def tell(self, **news: Any) -> Body:
        """Give everybody the root's news."""
        return self._messages.tell(news)

    def wait(self) -> None:
        """Block until every member has called this."""
        self._messages.agree(True)

    def close(self) -> None:
        """Leave."""
        self._reducer.close()
        self._messages.close()
