"""A group of workers that act as one: they meet, average their gradients, and share parameters.

Members meet at their root, the lowest rank, over authenticated links of our own: each says what it is
about to do, and hears what all of them do. So two scripts that part ways get a message that names both,
and nobody waits for somebody who will never come. What is large travels elsewhere: where all members are on
one host, through memory that all of them map; otherwise through gloo's ring.

    member ──"step", samples, finite──► root        every member averages a part of the gradient
    member ◄──weights, void, save────── root        in everybody's memory (or all together, by gloo)

Why not DistributedDataParallel: it wraps the model (other state_dict keys), weighs ranks instead of samples,
and hangs when a rank has fewer batches (docs/decisions.md).
"""

import contextlib
import math
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from paceline.comm import Address, Connection, Frame, Kind, Listener, Region, connect
from paceline.comm.meeting import accept
from paceline.exceptions import DeadlineError, LinkError, UsageError
from paceline.observe.phases import Phase
from paceline.observe.spans import NO_SPANS, Lane
from paceline.params import Layout, dtype_named, flat_view

__all__ = ["ENDS", "Group", "GroupLinks", "Part", "part_of", "weighted_mean"]

Ranges = list[tuple[int, int]]

ENDS = "ends its script"
"""What a member says it does, see `Group.meet`, when its script has ended."""

_AT_ONCE_S = 1e-4
"""Who answers within this was not waited for."""
_BLOCK = 1 << 18
"""Elements that are averaged at a time: they stay in the cache from the sum to the last copy. A multiple of
1,024, so that every element is computed as in the whole tensor (docs/decisions.md)."""


# --- rows -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A member's part of a row."""

    ranges: Ranges
    counts: bool
    """False: the row has fewer samples than the group has members, and this one reads another's along, so
    that it makes the step with the others. What it computes has no weight."""


def part_of(ranges: Ranges, members: int, place: int) -> Part:
    """The part of a row that the member at `place` of its group reads: even, lower ranks first."""
    samples = sum(stop - start for start, stop in ranges)
    each, extra = divmod(samples, members)
    first = place * each + min(place, extra)
    size = each + (place < extra)
    if not size:
        return Part(_cut(ranges, place % samples, 1), False)
    return Part(_cut(ranges, first, size), True)


def _cut(ranges: Ranges, first: int, size: int) -> Ranges:
    found: Ranges = []
    for start, stop in ranges:
        begin = start + first
        end = min(stop, begin + size)
        if begin < end:
            found.append((begin, end))
            size -= end - begin
        first = max(0, first - (stop - start))
    return found


# --- links ------------------------------------------------------------------------------------------


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
    def address(self) -> dict[str, Any] | None:
        """Where the root listens; None on the others."""
        return None if self._listener is None else self._listener.address.to_json()

    def meet(self, root: dict[str, Any] | None) -> dict[int, Connection]:
        """The links of this member: the root's to all others, or the one to the root.

        Raises:
            DeadlineError: somebody did not come.
        """
        try:
            if self.rank != self.root:
                assert root is not None
                peer = f"worker:{self.root}"
                connection = connect(Address.from_json(root), self._secret, peer=peer, link=self.link)
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
        while missing:
            ready, _, _ = select.select(self._listener.sockets, [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise DeadlineError(
                    f"{_names(sorted(missing))} did not come to the group of {_names(self.ranks)} within "
                    f"{self.deadline_s:g} s (--deadline)"
                )
            for sock in ready:
                with contextlib.suppress(LinkError, OSError):  # a stranger
                    connection = accept(sock.accept()[0], self._secret)
                    connection.sock.settimeout(self.deadline_s)
                    rank = connection.receive().body.get("rank")
                    connection.check_role("worker")
                    if rank in missing:
                        connection.peer = f"worker:{rank}"
                        found[rank] = connection
                        missing.discard(rank)
                    else:
                        connection.close()
        return found


# --- the group --------------------------------------------------------------------------------------


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
        links: dict[int, Connection],
        *,
        region: Region,
        layout: Layout,
        deadline_s: float,
        lane: Lane = NO_SPANS.main,
    ) -> None:
        self.ranks = tuple(ranks)
        self.lane = lane
        self.rank = rank
        self.root = self.ranks[0]
        self.place = self.ranks.index(rank)
        self.waited_s = 0.0
        """Seconds in which this member waited for the others."""
        self.ended: str | None = None
        """What happened, once a member ended its script before the others."""
        self._links = links
        self._deadline_s = deadline_s
        self._name = f"the group of {_names(self.ranks)}"
        for connection in links.values():
            # The root notices first who is missing, and names it.
            connection.sock.settimeout(deadline_s if self.is_root else deadline_s + 10)
        self._carrier: _Carrier
        shares = self._agree(all(c.local for c in links.values()))
        if shares:
            self._carrier = _Memory(self, region, layout)
        else:
            self._carrier = _Ring(self, region, layout)

    @property
    def is_root(self) -> bool:
        """Whether this member speaks for the group."""
        return self.rank == self.root

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def on_wire(self) -> bool:
        """Whether what is large travels over sockets."""
        return isinstance(self._carrier, _Ring)

    def meet(self, call: str, **facts: Any) -> list[dict[str, Any]]:
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
        everybody = self._exchange({"call": call, **facts}, self._compare)
        if "differ" in everybody:
            raise UsageError(everybody["differ"])
        if "ended" in everybody:
            self.ended = everybody["ended"]
            if call == ENDS:
                return []
            raise SystemExit(0)
        found: list[dict[str, Any]] = everybody["all"]
        return found

    def _compare(self, bodies: list[dict[str, Any]]) -> dict[str, Any]:
        first = bodies[0]["call"]
        ended = [rank for rank, body in zip(self.ranks, bodies, strict=True) if body["call"] == ENDS]
        if ended and len(ended) < self.size:
            rank, call = next(
                (r, b["call"]) for r, b in zip(self.ranks, bodies, strict=True) if r not in ended
            )
            return {
                "ended": f"{_names(ended)} ended its script while worker:{rank} {call}, and {self._name} "
                "cannot go on without it: all of it ended here, in order. If all workers are to end "
                "together, call paceline.should_stop(condition) on every worker."
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
            return self._carrier.mean(weights)

    def share(self, **news: Any) -> dict[str, Any]:
        """Give everybody the root's parameters, and its news. In the members' region afterwards."""
        news = self._tell(news)
        with torch.no_grad():
            self._carrier.share()
        return news

    def tell(self, **news: Any) -> dict[str, Any]:
        """Give everybody the root's news."""
        return self._tell(news)

    def wait(self) -> None:
        """Until everybody is here."""
        self._agree(True)

    def close(self) -> None:
        """Leave."""
        self._carrier.close()
        for connection in self._links.values():
            connection.close()

    # --- small messages -------------------------------------------------------------------------------

    def _agree(self, ok: bool) -> bool:
        """Whether all of them say so."""
        return bool(self._exchange({"ok": ok}, lambda all_: {"ok": all(b["ok"] for b in all_)})["ok"])

    def _gather(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._exchange(body, lambda all_: {"all": all_})["all"]
        return found

    def _exchange(
        self, body: dict[str, Any], combine: Callable[[list[dict[str, Any]]], dict[str, Any]]
    ) -> dict[str, Any]:
        """The root hears all, combines what they said, and tells everybody."""
        if not self.is_root:
            self._send(self._links[self.root], body)
            return self._receive(self.root).body
        bodies, waits = [], {}
        for rank in self.ranks:
            before = self.waited_s
            bodies.append(body if rank == self.rank else self._receive(rank).body)
            waits[rank] = self.waited_s - before
        # Who was last: the one that the root waited for, or the root.
        last = max(waits, key=lambda rank: waits[rank])
        return self._tell({**combine(bodies), "last": last if waits[last] > _AT_ONCE_S else self.root})

    def _tell(self, body: dict[str, Any]) -> dict[str, Any]:
        """The root's words, to everybody."""
        if not self.is_root:
            return self._receive(self.root).body
        for connection in self._links.values():
            self._send(connection, body)
        return body

    def _send(self, connection: Connection, body: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        try:
            connection.send(Kind.MEET, body, descriptors=descriptors)
        except LinkError as error:
            raise self._lost(connection.peer, error) from None

    def _receive(self, rank: int) -> Frame:
        began = time.perf_counter()
        connection = self._links[rank]
        phase = self.lane.enter(Phase.WAIT, rank)
        try:
            frame = connection.receive()
        except TimeoutError:
            raise DeadlineError(
                f"worker:{rank} did not come to {self._name}, where worker:{self.rank} has waited for "
                f"{self._deadline_s:g} s (--deadline). Look at its log, or raise the deadline if a step may "
                "take this long."
            ) from None
        except LinkError as error:
            raise self._lost(connection.peer, error) from None
        finally:
            waited = time.perf_counter() - began
            self.waited_s += waited
        last = frame.body.get("last", rank)
        if last not in (rank, self.rank):  # the root itself waited
            self.lane.blame(last, waited)
        self.lane.enter(phase)
        if frame.kind is not Kind.MEET:
            raise LinkError(f"{connection.peer} sent {frame.kind.name} to its group, expected MEET")
        return frame

    def _lost(self, peer: str, error: object) -> LinkError:
        return LinkError(f"{self._name} lost {peer}: {error}")


# --- what is large ----------------------------------------------------------------------------------


class _Carrier(ABC):
    """How gradients and parameters get to the other members."""

    def __init__(self, group: Group, region: Region, layout: Layout) -> None:
        self._group = group
        self._layout = layout

    @abstractmethod
    def mean(self, weights: Sequence[float]) -> bool: ...

    @abstractmethod
    def share(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class _Memory(_Carrier):
    """All members map each other's memory: each averages a part of the gradient, for everybody."""

    def __init__(self, group: Group, region: Region, layout: Layout) -> None:
        super().__init__(group, region, layout)
        self._others: dict[int, Region] = {}
        for rank in group.ranks:
            if rank == group.rank:
                self._show(region)
            else:
                self._others[rank] = self._see(rank, region.size)
        regions = [region if rank == group.rank else self._others[rank] for rank in group.ranks]
        half = layout.nbytes
        memories = [torch.frombuffer(r.buffer, dtype=torch.uint8) for r in regions]
        blocks = [
            block
            for piece in layout.slices
            for block in zip(
                *(flat_view(memory[:half], piece).split(_BLOCK) for memory in memories), strict=True
            )
        ]
        self._mine = blocks[group.place :: group.size]
        self._parameters, self._roots = memories[group.place][half:], memories[0][half:]

    def _show(self, region: Region) -> None:
        """Everybody's memory goes through the root, which alone has a link to all."""
        for connection in self._group._links.values():
            self._group._send(connection, {"of": self._group.rank}, [region.fd])

    def _see(self, rank: int, size: int) -> Region:
        group = self._group
        frame = group._receive(rank if group.is_root else group.root)
        if frame.body.get("of") != rank or len(frame.descriptors) != 1:
            raise LinkError(f"{group._name}: expected the memory of worker:{rank}")
        region = Region.attach(frame.descriptors[0], size)
        if group.is_root:
            for other, connection in group._links.items():
                if other != rank:
                    group._send(connection, {"of": rank}, [region.fd])
        return region

    def mean(self, weights: Sequence[float]) -> bool:
        heavy = [i for i, weight in enumerate(weights) if weight]
        finite = True
        for block in self._mine:
            out = block[heavy[0]]
            weighted_mean(out, [block[i] for i in heavy], [weights[i] for i in heavy])
            finite = finite and _finite(out)
            for i, other in enumerate(block):
                if i != heavy[0]:
                    other.copy_(out)
        return self._group._agree(finite)

    def share(self) -> None:
        group = self._group
        if not group.is_root:
            self._parameters.copy_(self._roots)
            group._send(group._links[group.root], {})
            return
        # The script may write to the root's parameters next (load_state_dict), when all have copied them.
        for rank in group.ranks[1:]:
            group._receive(rank)

    def close(self) -> None:
        self._mine.clear()
        del self._parameters, self._roots
        for region in self._others.values():
            region.close()


class _Ring(_Carrier):
    """Members on several hosts, or with --link tcp: torch's own collectives (gloo)."""

    def __init__(self, group: Group, region: Region, layout: Layout) -> None:
        super().__init__(group, region, layout)
        memory = torch.frombuffer(region.buffer, dtype=torch.uint8)
        self._gradients = list(_runs(memory[: layout.nbytes], layout))
        self._parameters = memory[layout.nbytes :]
        hosts = [c.sock.getsockname()[0] for c in group._links.values() if not c.local]
        host = hosts[0] if hosts else "127.0.0.1"
        # Without torch's default process group, which is one for a process and the script's to use.
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=group._deadline_s)
        self._ring: Any = gloo(_addresses(group), group.place, group.size, options)

    def mean(self, weights: Sequence[float]) -> bool:
        mine, total = weights[self._group.place], math.fsum(weights)
        equal = len(set(weights)) == 1
        if not mine:
            torch._foreach_zero_(self._gradients)
        elif not equal:
            torch._foreach_mul_(self._gradients, mine / total)
        self._wait(self._ring.allreduce([flat]) for flat in self._gradients)
        if equal:
            torch._foreach_div_(self._gradients, len(weights))
        return all(map(_finite, self._gradients))

    def share(self) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._wait([self._ring.broadcast([self._parameters], options)])

    def close(self) -> None:
        """gloo's threads end with it."""
        del self._ring

    def _wait(self, works: Any) -> None:
        began = time.perf_counter()
        phase = self._group.lane.enter(Phase.WAIT)
        try:
            for work in list(works):
                work.wait()
        except RuntimeError as error:
            text = str(error).partition("]")[2].strip() or str(error)
            if "timed out" in text.lower():
                raise DeadlineError(
                    f"{self._group._name} did not finish its all-reduce within {self._group._deadline_s:g} s "
                    "(--deadline)"
                ) from None
            raise LinkError(f"{self._group._name} lost a member in its all-reduce: {text[:200]}") from None
        finally:
            self._group.waited_s += time.perf_counter() - began
            self._group.lane.enter(phase)


def _addresses(group: Group) -> Any:
    """A store in which gloo's members find where the others listen. Each sets its own address before it asks
    for another's, so one meeting at the first question does."""

    store: Any = distributed.Store  # type: ignore[attr-defined]

    class Addresses(store):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._mine: dict[str, str] = {}
            self._all: dict[str, str] = {}

        def set(self, key: str, value: bytes | str) -> None:
            raw = value.encode() if isinstance(value, str) else bytes(value)
            self._mine[key] = raw.hex()

        def get(self, key: str) -> bytes:
            if not self._all:
                for each in group._gather({"addresses": self._mine}):
                    self._all |= each["addresses"]
            return bytes.fromhex(self._all[key])

        def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
            pass  # `get` does

    return Addresses()


def _runs(base: Tensor, layout: Layout) -> Iterator[Tensor]:
    """The space as few flat tensors: neighbours of one dtype together (what lies between them is zero)."""
    start = 0
    for piece, after in zip(layout.slices, [*layout.slices[1:], None], strict=True):
        if after is None or after.dtype != piece.dtype:
            yield base[start : piece.stop].view(dtype_named(piece.dtype))
            start = after.start if after is not None else 0


def weighted_mean(out: Tensor, parts: Sequence[Tensor], weights: Sequence[float]) -> None:
    """The mean of `parts` into `out`, which may be the first of them: as servers compute it, to the bit."""
    first, *rest = parts
    if len(set(weights)) == 1:
        if not rest:
            out.copy_(first)
            return
        torch.add(first, rest[0], out=out)
        for part in rest[1:]:
            out.add_(part)
        out.div_(len(parts))
        return
    total = math.fsum(weights)
    torch.mul(first, weights[0] / total, out=out)
    for part, weight in zip(rest, weights[1:], strict=True):
        out.add_(part, alpha=weight / total)


def _finite(flat: Tensor) -> bool:
    """One reduction in the common case: a NaN or an infinity makes any sum non-finite."""
    total = flat.sum(dtype=torch.float32 if flat.element_size() == 2 else None)
    return math.isfinite(total.item()) or bool(torch.isfinite(flat).all())


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(f"worker:{rank}" for rank in ranks)
