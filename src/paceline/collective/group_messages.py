"""Small messages between the members of a group. They all go through its root, the lowest rank."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.comm import Connection, Frame, Kind
from paceline.comm.frames import field
from paceline.exceptions import DeadlineError, LinkError
from paceline.observe.record.phase import Phase
from paceline.observe.record.spans import Lane

__all__ = ["Body", "GroupMessages", "names_of"]

Body = dict[str, Any]
"""The body of a MEET frame: what each call brings and hears is known where it is made."""

_AT_ONCE_S = 1e-4
"""The root did not wait for a member that answers within this time."""


class GroupMessages:
    """One member's links to its group, and what is said over them.

    All members call the same methods in the same order. Each call blocks until the others have called it, or
    until the deadline.

    Args:
        ranks: of all members; the first one is the root.
        links: see `GroupLinks.meet`.
        lane: of the member's main thread.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        links: Mapping[int, Connection],
        *,
        deadline_s: float,
        lane: Lane,
    ) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.root = self.ranks[0]
        self.links = links
        self.deadline_s = deadline_s
        self.lane = lane
        self.waited_s = 0.0
        """Seconds in which this member waited for the others."""
        self.name = f"the group of {names_of(self.ranks)}"
        for connection in links.values():
            # The root notices first that a member is missing, and names it.
            connection.sock.settimeout(deadline_s if self.is_root else deadline_s + 10)

    @property
    def is_root(self) -> bool:
        """Whether this member speaks for the group."""
        return self.rank == self.root

    @property
    def place(self) -> int:
        """This member's position among the ranks."""
        return self.ranks.index(self.rank)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def agree(self, ok: bool) -> bool:
        """Whether all members say yes."""
        return bool(self.exchange({"ok": ok}, lambda all_: {"ok": all(b["ok"] for b in all_)})["ok"])

    def gather(self, body: Body) -> list[Body]:
        """The bodies of all members, in rank order."""
        found: list[Body] = self.exchange(body, lambda all_: {"all": all_})["all"]
        return found

    def exchange(self, body: Body, combine: Callable[[list[Body]], Body]) -> Body:
        """The root receives all bodies, combines them, and sends the result to every member."""
        if not self.is_root:
            self.send(self.root, body)
            return self.receive(self.root).body
        bodies, waits = [], {}
        for rank in self.ranks:
            before = self.waited_s
            bodies.append(body if rank == self.rank else self.receive(rank).body)
            waits[rank] = self.waited_s - before
        # The straggler: the member that the root waited for, or the root itself.
        last = max(waits, key=lambda rank: waits[rank])
        return self.tell({**combine(bodies), "last": last if waits[last] > _AT_ONCE_S else self.root})

    def tell(self, body: Body) -> Body:
        """Send the root's body to every member; returns it on all of them."""
        if not self.is_root:
            return self.receive(self.root).body
        for rank in self.links:
            self.send(rank, body)
        return body

    def send(self, rank: int, body: Body, descriptors: Sequence[int] = ()) -> None:
        """Send a message to one member."""
        connection = self.links[rank]
        try:
            connection.send(Kind.MEET, body, descriptors=descriptors)
        except LinkError as error:
            raise self._lost(connection.peer, error) from None

    def receive(self, rank: int) -> Frame:
        """The next message of one member.

        Raises:
            DeadlineError: it did not come in time.
        """
        began = time.perf_counter()
        connection = self.links[rank]
        phase = self.lane.enter(Phase.WAIT, rank)
        try:
            frame = connection.receive()
        except TimeoutError:
            raise DeadlineError(
                f"worker:{rank} did not come to {self.name}, where worker:{self.rank} has waited for "
                f"{self.deadline_s:g} s (--deadline). Look at its log, or raise the deadline if a step may "
                "take this long."
            ) from None
        except LinkError as error:
            raise self._lost(connection.peer, error) from None
        finally:
            waited = time.perf_counter() - began
            self.waited_s += waited
        last = field(frame.body, "last", int, rank)
        if last not in (rank, self.rank):  # the root itself waited
            self.lane.blame(last, waited)
        self.lane.enter(phase)
        if frame.kind is not Kind.MEET:
            raise LinkError(f"{connection.peer} sent {frame.kind.name} to its group, expected MEET")
        return frame

    def close(self) -> None:
        """Close all links."""
        for connection in self.links.values():
            connection.close()

    def _lost(self, peer: str, error: object) -> LinkError:
        return LinkError(f"{self.name} lost {peer}: {error}")


def names_of(ranks: Sequence[int]) -> str:
    """Workers by name, for messages."""
    return ", ".join(f"worker:{rank}" for rank in ranks)
