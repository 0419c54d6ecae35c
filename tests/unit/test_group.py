"""A group of workers without a run: its members are threads here, its links and memory are real."""

import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.collective import ENDS, Group, GroupLinks, part_of, weighted_mean
from paceline.comm import Region
from paceline.exceptions import DeadlineError, LinkError, UsageError
from paceline.params import Layout, TensorInfo, flat_view

# --- parts of a row ---------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    gaps=st.lists(st.integers(1, 4), min_size=5, max_size=5),
    members=st.integers(1, 7),
)
def test_the_parts_of_a_row_are_the_row(sizes: list[int], gaps: list[int], members: int) -> None:
    """Even, in order, nothing twice; and who would have nothing reads one of the row's samples."""
    ranges, at = [], 0
    for size, gap in zip(sizes, gaps, strict=False):
        ranges.append((at, at + size))
        at += size + gap
    positions = [p for a, b in ranges for p in range(a, b)]
    parts = [part_of(ranges, members, place) for place in range(members)]
    read = [[p for a, b in part.ranges for p in range(a, b)] for part in parts]
    own = [each for each, part in zip(read, parts, strict=True) if part.counts]
    assert [p for each in own for p in each] == positions
    assert max(map(len, own)) - min(map(len, own)) <= 1
    assert all(part.counts for part in parts[: min(members, len(positions))])
    for each, part in zip(read, parts, strict=True):
        assert part.counts or (len(each) == 1 and each[0] in positions)


# --- members as threads -----------------------------------------------------------------------------


def layout_of(*shapes: tuple[int, ...], dtypes: Sequence[str] = ("float32",)) -> Layout:
    infos = [
        TensorInfo(
            name=f"t{i}",
            shape=shape,
            stride=tuple(torch.empty(shape).stride()),
            dtype=dtypes[i % len(dtypes)],
            group=0,
        )
        for i, shape in enumerate(shapes)
    ]
    return Layout.build(infos, servers=1)


class Members:
    """Runs a function on every member of a group, each in a thread, and collects what comes of it."""

    def __init__(self, size: int, layout: Layout, *, link: str = "auto", deadline_s: float = 20.0) -> None:
        self.layout = layout
        self._size = size
        self._link = link
        self._deadline_s = deadline_s

    def run(self, body: Callable[[Group, torch.Tensor], Any]) -> list[Any]:
        secret, ranks = secrets.token_bytes(32), range(self._size)
        links = [
            GroupLinks(ranks=ranks, rank=r, secret=secret, link=self._link, deadline_s=self._deadline_s)
            for r in ranks
        ]
        found: list[Any] = [None] * self._size

        def member(rank: int) -> None:
            with ExitStack() as stack:
                region = Region.create(2 * self.layout.nbytes)
                stack.callback(region.close)
                group = Group(
                    links[rank].ranks,
                    rank,
                    links[rank].meet(links[0].address),
                    region=region,
                    layout=self.layout,
                    deadline_s=self._deadline_s,
                )
                stack.callback(group.close)
                memory = torch.frombuffer(region.buffer, dtype=torch.uint8)
                try:
                    found[rank] = body(group, memory)
                except Exception as error:
                    found[rank] = error
                del memory

        threads = [threading.Thread(target=member, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found


@pytest.mark.parametrize("link", ["shm", "tcp"])
@pytest.mark.parametrize("weights", [[1, 1, 1], [4, 4, 3], [4, 0, 2], [0, 5, 5]])
def test_everybody_gets_the_weighted_mean(link: str, weights: list[float]) -> None:
    """Over blocks and slices, three dtypes; members without weight count for nothing, whatever they have."""
    layout = layout_of(
        (700, 900), (31,), (300, 20), (5,), dtypes=("float32", "float32", "float64", "bfloat16")
    )
    start = [torch.randn(s.nbytes, generator=torch.Generator().manual_seed(9)) for s in layout.slices]

    def body(group: Group, memory: torch.Tensor) -> list[torch.Tensor]:
        for piece, base in zip(layout.slices, start, strict=True):
            flat = flat_view(memory, piece)
            flat.copy_(base[: flat.numel()] * (group.rank + 1))
        if not weights[group.place]:
            flat_view(memory, layout.slices[0]).fill_(float("nan"))
        group.wait()
        assert group.mean(weights)
        return [flat_view(memory, piece).clone() for piece in layout.slices]

    found = Members(3, layout, link=link).run(body)
    scale = sum((r + 1) * w for r, w in enumerate(weights)) / sum(weights)
    for k, base in enumerate(start):
        mine = [each[k] for each in found]
        assert torch.equal(mine[0], mine[1]) and torch.equal(mine[0], mine[2])
        close = {torch.float32: 1e-6, torch.float64: 1e-6, torch.bfloat16: 2e-2}[mine[0].dtype]
        expected = (base[: mine[0].numel()] * scale).double()
        assert torch.allclose(mine[0].double(), expected, rtol=close, atol=close)


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_a_mean_that_is_not_finite_is_told_to_everybody(link: str) -> None:
    layout = layout_of((100_000,), (40,))

    def body(group: Group, memory: torch.Tensor) -> list[bool]:
        flat = flat_view(memory, layout.slices[0])
        flat.fill_(3e38)  # finite, but not their sum
        group.wait()
        first = group.mean([1, 1])
        group.wait()
        flat.fill_(1.0)
        group.wait()
        return [first, group.mean([1, 1])]

    assert Members(2, layout, link=link).run(body) == [[False, True]] * 2


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_everybody_gets_the_roots_parameters_and_news(link: str) -> None:
    layout = layout_of((50, 50))

    def body(group: Group, memory: torch.Tensor) -> tuple[float, int]:
        parameters = memory[layout.nbytes :].view(torch.float32)
        parameters.fill_(group.rank + 1.0)
        news = group.share(**({"version": 7} if group.is_root else {}))
        group.wait()
        return parameters.mean().item(), news["version"]

    assert Members(3, layout, link=link).run(body) == [(1.0, 7)] * 3


def test_members_that_do_different_things_are_told_who_does_what() -> None:
    def body(group: Group, memory: torch.Tensor) -> None:
        group.meet("loads an optimizer state" if group.rank == 2 else "calls optimizer.step()")

    for error in Members(3, layout_of((4,))).run(body):
        assert isinstance(error, UsageError)
        assert "worker:0 calls optimizer.step() while worker:2 loads an optimizer state" in str(error)


@pytest.mark.parametrize("who", [0, 2])
def test_when_a_member_ends_its_script_the_others_end_theirs_in_order(who: int) -> None:
    def body(group: Group, memory: torch.Tensor) -> Any:
        ended = []
        for _ in range(2):  # a script that goes on all the same ends again
            try:
                group.meet(ENDS if group.rank == who else "calls optimizer.step()")
            except SystemExit as error:
                ended.append(error.code)
        return ended, group.ended

    found = Members(3, layout_of((4,))).run(body)
    other = 1 if who == 0 else 0
    for rank, (ended, said) in enumerate(found):
        assert ended == ([0] if rank == who else [0, 0])
        assert f"worker:{who} ended its script while worker:{other} calls optimizer.step(), and the" in said


def test_a_member_that_is_gone_is_named() -> None:
    def body(group: Group, memory: torch.Tensor) -> None:
        group.wait()
        if group.rank == 1:
            return  # closes its links
        group.meet("calls optimizer.step()")

    _, _, third = found = Members(3, layout_of((4,))).run(body)
    assert isinstance(found[0], LinkError) and "lost worker:1" in str(found[0])
    assert isinstance(third, LinkError) and "the group of worker:0, worker:1, worker:2" in str(third)


def test_a_member_that_does_not_come_is_named_when_the_deadline_is_over() -> None:
    rest = threading.Event()

    def body(group: Group, memory: torch.Tensor) -> None:
        if group.rank == 1:
            rest.wait(30)
            return
        try:
            group.meet("calls optimizer.step()")
        finally:
            rest.set()

    found = Members(2, layout_of((4,)), deadline_s=0.5).run(body)
    assert isinstance(found[0], DeadlineError)
    assert "worker:1 did not come" in str(found[0]) and "0.5 s (--deadline)" in str(found[0])


def test_a_group_of_one_needs_nobody() -> None:
    def body(group: Group, memory: torch.Tensor) -> Any:
        memory.fill_(1)
        assert group.mean([3]) and group.share(save=True) == {"save": True}
        return group.meet("calls optimizer.step()", samples=3)

    assert Members(1, layout_of((4,))).run(body) == [[{"call": "calls optimizer.step()", "samples": 3}]]


def test_strangers_do_not_join_a_group() -> None:
    """Who does not know the secret is turned away, and the member that does is waited for."""
    secret = secrets.token_bytes(32)
    root = GroupLinks(ranks=[0, 1], rank=0, secret=secret, link="tcp", deadline_s=20)
    stranger = GroupLinks(ranks=[0, 1], rank=1, secret=bytes(32), link="tcp", deadline_s=20)
    member = GroupLinks(ranks=[0, 1], rank=1, secret=secret, link="tcp", deadline_s=20)
    errors: list[BaseException] = []

    def come() -> None:
        try:
            stranger.meet(root.address)
        except LinkError as error:
            errors.append(error)
        links.update(member.meet(root.address))

    links: dict[int, Any] = {}
    thread = threading.Thread(target=come)
    thread.start()
    mine = root.meet(None)
    thread.join(20)
    assert len(errors) == 1 and mine.keys() == {1} and links.keys() == {0}
    for connection in (*mine.values(), *links.values()):
        connection.close()


# --- the mean ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [[1, 1], [2, 2, 2], [3, 1], [4, 4, 3]])
def test_the_mean_is_the_servers_mean_to_the_bit(weights: list[float]) -> None:
    from types import SimpleNamespace

    from paceline.ps.contributions import Contribution, sum_into

    parts = [torch.randn(5000, generator=torch.Generator().manual_seed(k)) for k in range(len(weights))]
    theirs = torch.empty(5000)
    given_ = [
        Contribution(k, SimpleNamespace(flat=[part]), weight)  # type: ignore[arg-type]
        for k, (part, weight) in enumerate(zip(parts, weights, strict=True))
    ]
    sum_into(theirs, 0, given_)
    weighted_mean(parts[0], parts, weights)
    assert torch.equal(parts[0], theirs)
