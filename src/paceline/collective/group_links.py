"""How the members of a group find each other."""

import time
from collections.abc import Sequence

from paceline.collective.entrance import Entrance
from paceline.collective.group_messages import names_of
from paceline.comm import Address, Connection, Kind, Listener, connect
from paceline.core.json_types import JsonObject
from paceline.exceptions import DeadlineError

__all__ = ["GroupLinks"]


class GroupLinks:
    """How a worker finds its group: the root listens, the others connect to where the lead says it does.

    Args:
        ranks: of all members.
        link: "auto", "shm" or "tcp".
    """

    def __init__(
        self, *, ranks: Sequence[int], rank: int, secret: bytes, link: str, deadline_s: float
    ) -> None:
        self.ranks = tuple(sorted(ranks))
        self.rank = rank
        self.root = self.ranks[0]
        self.link = link
        self.deadline_s = deadline_s
        self._secret = secret
        self._listener = Listener() if rank == self.root and len(self.ranks) > 1 else None

    @property
    def address(self) -> JsonObject | None:
        """Where the root listens; None on the others."""
        return None if self._listener is None else self._listener.address.to_json()

    def meet(self, root: JsonObject | None) -> dict[int, Connection]:
        """The links of this member: the root's to all others, or the one to the root.

        Raises:
            DeadlineError: somebody did not come.
        """
        try:
            if self.rank != self.root:
                assert root is not None
                peer = f"worker:{self.root}"
                connection = connect(
                    Address.from_json(root), self._secret, peer=peer, link=self.link, redial_s=self.deadline_s
                )
                connection.send(Kind.HELLO, {"role": "worker", "rank": self.rank})
                return {self.root: connection}
            return self._accept_all() if self._listener is not None else {}
        finally:
            if self._listener is not None:
                self._listener.close()

    def _accept_all(self) -> dict[int, Connection]:
        assert self._listener is not None
        found: dict[int, Connection] = {}
        missing = set(self.ranks) - {self.root}
        until = time.monotonic() + self.deadline_s
        entrance = Entrance(self._listener, self._secret)
        try:
            while missing:
                if (met := entrance.next(until)) is None:
                    raise DeadlineError(
                        f"{names_of(sorted(missing))} did not come to the group of {names_of(self.ranks)} "
                        f"within {self.deadline_s:g} s (--deadline)"
                    )
                rank, connection = met
                if rank not in missing:
                    connection.close()
                    continue
                connection.sock.settimeout(self.deadline_s)
                connection.peer = f"worker:{rank}"
                found[rank] = connection
                missing.discard(rank)
        finally:
            entrance.close()
        return found
