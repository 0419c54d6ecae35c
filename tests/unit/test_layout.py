"""What lies where: cut, dealt, fingerprinted, and never believed when it comes from outside."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.layout import SLICE_BYTES, is_dense
from paceline.exceptions import FrameError
from paceline.params import Layout, TensorInfo, partition

ITEM = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def info(name: str, *shape: int, dtype: str = "float32", group: int = 0) -> TensorInfo:
    stride: list[int] = []
    step = 1
    for n in reversed(shape):
        stride.insert(0, step)
        step *= n
    return TensorInfo(name=name, shape=shape, stride=tuple(stride), dtype=dtype, group=group)


@st.composite
def tensors(draw: st.DrawFn) -> list[TensorInfo]:
    shapes = draw(
        st.lists(
            st.one_of(
                st.just(()),
                st.tuples(st.integers(1, 70_000)),
                st.tuples(st.integers(1, 300), st.integers(1, 300)),
            ),
            min_size=1,
            max_size=12,
        )
    )
    dtypes, groups = st.sampled_from(sorted(ITEM)), st.integers(0, 2)
    return [info(f"t{i}", *shape, dtype=draw(dtypes), group=draw(groups)) for i, shape in enumerate(shapes)]


def check_covers(layout: Layout) -> None:
    """Every element is in exactly one slice; slices do not overlap; every view is aligned."""
    ends = [0] * len(layout.tensors)
    end = 0
    for position, piece in enumerate(layout.slices):
        assert piece.index == position
        assert piece.start >= end and piece.stop > piece.start
        end = piece.stop
        for g in piece.segments:
            t = layout.tensors[g.tensor]
            assert (t.dtype, t.group) == (piece.dtype, piece.group)
            assert g.start == ends[g.tensor]
            ends[g.tensor] = g.stop
            first, last = layout.byte_of(g)
            assert piece.start <= first < last <= piece.stop
            if g.stop < t.numel:
                assert g.stop % 1024 == 0 and not layout.whole_tensors
    assert ends == [t.numel for t in layout.tensors]
    assert all(t.offset % 64 == 0 for t in layout.tensors)
    assert end <= layout.nbytes and layout.nbytes % 64 == 0


@settings(max_examples=150)
@given(tensors(), st.integers(1, 6), st.booleans())
def test_slices_cover_every_element_once_and_are_dealt_evenly(
    given_: list[TensorInfo], servers: int, whole: bool
) -> None:
    layout = Layout.build(given_, servers=servers, whole_tensors=whole)
    check_covers(layout)
    shards = partition(layout, servers)
    assert len(shards) == servers
    assert sorted(s.index for shard in shards for s in shard) == list(range(len(layout.slices)))
    assert all([s.index for s in shard] == sorted(s.index for s in shard) for shard in shards)
    loads = [sum(s.nbytes for s in shard) for shard in shards]
    assert max(loads) - min(loads) <= max(s.nbytes for s in layout.slices)
    if not whole:
        assert all(s.nbytes <= SLICE_BYTES for s in layout.slices)
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_tensors_are_ordered_by_dtype_group_and_forward_order() -> None:
    layout = Layout.build(
        [
            info("a", 3, group=1),
            info("b", 3),
            info("c", 3, dtype="bfloat16"),
            info("d", 3, group=1),
            info("e", 3),
        ]
    )
    assert [t.name for t in layout.tensors] == ["c", "b", "e", "a", "d"]
    assert [len(s.segments) for s in layout.slices] == [1, 2, 2]
    assert layout.numel == 15 and layout.index == {"c": 0, "b": 1, "e": 2, "a": 3, "d": 4}


def test_a_tensor_larger_than_a_slice_is_cut_and_small_ones_share() -> None:
    layout = Layout.build([info("big", 3_000_001), info("x", 10), info("y", 10)])
    assert [len(s.segments) for s in layout.slices] == [1, 1, 3]
    assert [s.nbytes for s in layout.slices[:2]] == [SLICE_BYTES, SLICE_BYTES]
    whole = Layout.build([info("big", 3_000_001), info("x", 10)], whole_tensors=True)
    assert [s.nbytes for s in whole.slices] == [12_000_004, 40]
    check_covers(whole)


def test_more_servers_than_tensors_cut_finer_but_not_into_crumbs() -> None:
    layout = Layout.build([info("only", 300_000)], servers=4)
    loads = [sum(s.nbytes for s in shard) for shard in partition(layout, 4)]
    assert min(loads) > 0 and max(loads) - min(loads) < 16_384
    crumb = Layout.build([info("only", 10)], servers=4)
    assert [len(shard) for shard in partition(crumb, 4)] == [1, 0, 0, 0]


def test_a_scalar_has_its_place() -> None:
    layout = Layout.build([info("scale"), info("bias", 5)])
    assert (layout.tensors[0].numel, layout.tensors[0].nbytes, layout.nbytes) == (1, 4, 128)
    check_covers(layout)


# --- fingerprint ----------------------------------------------------------------------------------


def test_the_fingerprint_does_not_change_between_releases() -> None:
    layout = Layout.build(
        [info("w", 3, 4), info("b", 4), info("h", 2, dtype="bfloat16", group=1)],
        servers=2,
        aliases=[("tied.w", "w")],
    )
    assert layout.fingerprint == "30e184b4dd1f3a92"
    assert Layout.from_json(layout.to_json()).fingerprint == layout.fingerprint


BASE = [info("w", 30, 40), info("b", 40)]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ([info("w", 30, 40)], "parameter 'b' [40] is missing"),
        ([*BASE, info("c", 2)], "parameter 'c' [2] is not in the model of the run"),
        ([info("w", 40, 30), info("b", 40)], "parameter 'w' has shape (40, 30), expected (30, 40)"),
        ([info("w", 30, 40), info("b", 40, dtype="float64")], "'b' has dtype float64, expected float32"),
        ([info("w", 30, 40), info("b", 40, group=1)], "parameter 'b' has group 1, expected 0"),
        (
            [
                TensorInfo(name="w", shape=(30, 40), stride=(1, 30), dtype="float32", group=0),
                info("b", 40),
            ],
            "parameter 'w' has stride (1, 30), expected (40, 1)",
        ),
    ],
)
def test_the_first_difference_is_named(other: list[TensorInfo], words: str) -> None:
    mine, theirs = Layout.build(BASE), Layout.build(other)
    assert words in (mine.first_difference(theirs) or "")
    assert mine.fingerprint != theirs.fingerprint


def test_layouts_may_differ_in_cut_and_ties_only() -> None:
    big = [info("w", 300_000)]
    mine = Layout.build(big)
    assert mine.first_difference(Layout.build(big)) is None
    assert mine.first_difference(Layout.build(big, servers=3)) == "the slices are cut differently"
    tied = Layout.build(big, aliases=[("v", "w")])
    assert mine.first_difference(tied) == "tied weights are {'v': 'w'}, expected {}"


# --- from outside ---------------------------------------------------------------------------------


def plain() -> dict[str, Any]:
    given_ = [info("big", 1100, 1000), info("w", 30, 40), info("b", 40), info("h", 9, dtype="float64")]
    return Layout.build(given_, servers=2, aliases=[("t", "w")]).to_json()


def change(path: list[Any], value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(data: Any) -> None:
        for step in path[:-1]:
            data = data[step]
        data[path[-1]] = value

    return apply


def swap_slices(data: dict[str, Any]) -> None:
    data["slices"][0], data["slices"][1] = data["slices"][1], data["slices"][0]


def swallow_the_middle(data: dict[str, Any]) -> None:
    """Slice 2 names w and b but not what lies between them; another slice names that again."""
    last = data["slices"][-2]
    middle = last[4].pop(1)
    t = data["tensors"][middle[0]]
    data["slices"].append([t[3], t[4], t[5], t[5] + 4800, [middle]])


def negative_tensor(data: dict[str, Any]) -> None:
    for piece in data["slices"]:
        for segment in piece[4]:
            segment[0] -= len(data["tensors"])


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no tensors": lambda d: d.update(tensors=[], slices=[], nbytes=0, aliases=[]),
    "no slices": lambda d: d.update(slices=[]),
    "missing key": lambda d: d.pop("aliases"),
    "slice left out": lambda d: d["slices"].pop(),
    "slice twice": lambda d: d["slices"].append(d["slices"][-1]),
    "slice without segments": lambda d: d["slices"].append(["float32", 0, 0, 64, []]),
    "slices out of order": swap_slices,
    "slice over another": swallow_the_middle,
    "slice from below": change(["slices", 0, 2], -64),
    "slice beyond": change(["slices", -1, 3], 1 << 40),
    "slice of another dtype": change(["slices", 0, 0], "bfloat16"),
    "slice of another group": change(["slices", 0, 1], 1),
    "negative tensors": negative_tensor,
    "segment of no tensor": change(["slices", -1, 4, 0, 0], 99),
    "segment beyond": change(["slices", 0, 4, 0, 2], 1 << 40),
    "segment backwards": change(["slices", 0, 4, 0, 2], 0),
    "tensor over another": change(["tensors", 1, 5], 0),
    "tensor beyond": change(["tensors", -1, 5], 1 << 40),
    "tensor below": change(["tensors", 0, 5], -64),
    "huge tensor": change(["tensors", 0, 1], [1 << 40, 1 << 40]),
    "empty tensor": change(["tensors", 0, 1], [0, 1000]),
    "negative tensor": change(["tensors", 0, 1], [-1100, -1000]),
    "million dimensions": change(["tensors", 0, 1], [1] * 1_000_000),
    "overlapping strides": change(["tensors", 1, 2], [0, 1]),
    "far strides": change(["tensors", 1, 2], [41, 1]),
    "negative strides": change(["tensors", 1, 2], [-40, 1]),
    "too few strides": change(["tensors", 1, 2], [1]),
    "shape as text": change(["tensors", 2, 1], "40"),
    "number as text": change(["tensors", 2, 5], "0"),
    "number as float": change(["nbytes"], 1e6),
    "number as infinity": change(["nbytes"], float("inf")),
    "number as bool": change(["slices", 0, 1], False),
    "unknown dtype": change(["tensors", 0, 3], "int64"),
    "name as number": change(["tensors", 0, 0], 5),
    "one name twice": change(["tensors", 1, 0], "big"),
    "alias of nothing": change(["aliases"], [["t", "nothing"]]),
    "alias of three": change(["aliases"], [["t", "w", "b"]]),
    "larger space": lambda d: d.update(nbytes=d["nbytes"] + 64),
    "enormous space": lambda d: d.update(nbytes=1 << 60),
    "cut whole tensors": change(["whole_tensors"], True),
    "flag as number": change(["whole_tensors"], 0),
    "not an object": lambda d: None,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_layout_is_refused(what: str) -> None:
    data = plain()
    Layout.from_json(copy.deepcopy(data))
    HOSTILE[what](data)
    with pytest.raises(FrameError, match="not a parameter layout") as caught:
        Layout.from_json(None if what == "not an object" else data)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("odd", [None, 1, "x", [], {}, [1, 2], {"tensors": {}}, {"tensors": "abcdef"}])
def test_what_is_no_layout_at_all_is_refused(odd: Any) -> None:
    with pytest.raises(FrameError, match="not a parameter layout"):
        Layout.from_json(odd)


ODD: list[Any] = [None, True, -1, 0, 1, 2.5, 1 << 50, -(1 << 70), float("nan"), "x", "", [], {}, [[]]]


def mutate(random_: random.Random, value: Any) -> Any:
    """Change one place somewhere in a JSON value."""
    if isinstance(value, dict | list) and value and random_.random() < 0.93:
        key = random_.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if random_.random() < 0.05:
            del value[key]
        elif isinstance(value, list) and random_.random() < 0.05:
            value.insert(key, copy.deepcopy(value[key]))
        else:
            value[key] = mutate(random_, value[key])
        return value
    if type(value) is int and random_.random() < 0.5:
        return value + random_.choice([-1024, -64, -1, 1, 64, 1024])
    return copy.deepcopy(random_.choice(ODD))


@settings(max_examples=400)
@given(st.integers(0, 2**32))
def test_a_mutated_layout_is_refused_or_sound(seed: int) -> None:
    random_ = random.Random(seed)
    data = plain()
    for _ in range(random_.randrange(1, 4)):
        data = mutate(random_, data)
    try:
        layout = Layout.from_json(data)
    except FrameError:
        return
    check_covers(layout)
    assert layout.nbytes < 10_000_000


def test_dense_means_every_place_once() -> None:
    assert is_dense((), ()) and is_dense((5,), (1,)) and is_dense((1, 5, 1), (77, 1, 0))
    assert is_dense((2, 3, 4, 5), (60, 1, 15, 3))
    assert not is_dense((5,), (2,)) and not is_dense((5,), (0,)) and not is_dense((2, 2), (1, 1))
