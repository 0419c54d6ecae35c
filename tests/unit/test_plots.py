"""Plots are well-formed, show what they are given, and survive what runs leave behind."""

import math
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from paceline.observe.analyse import curves
from paceline.observe.analyse.curves import Bar, TimelineRow
from paceline.observe.analyse.facts import Series
from paceline.observe.show import plots


def parsed(figure: str) -> ElementTree.Element:
    """The figure, which must be XML too."""
    return ElementTree.fromstring(figure)


def tags(figure: str, name: str) -> list[ElementTree.Element]:
    """Elements of the drawing itself, without its legend."""
    drawing = parsed(figure).find("div/svg")
    assert drawing is not None
    return drawing.findall(f".//{name}")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0, 0.93, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-3, 4, [-4, -2, 0, 2, 4]),
        (5, 5, [5, 5.5, 6, 6.5, 7, 7.5]),
        (0, 0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (math.nan, 1, [0, 1]),
    ],
)
def test_ticks_are_round_and_cover(low: float, high: float, expected: list[float]) -> None:
    assert plots.ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize("size", [1e-9, 0.003, 1, 77, 3.3e12])
def test_ticks_are_few_at_any_size(size: float) -> None:
    found = plots.ticks(0, size)
    assert 3 <= len(found) <= 7 and found[0] <= 0 and found[-1] >= size * (1 - 1e-9)


def test_numbers_are_short() -> None:
    assert [plots.number(n) for n in (0.25, 1500, 20_000, 3e6, 2.5e9)] == [
        "0.25",
        "1,500",
        "20k",
        "3M",
        "2.5G",
    ]


def test_thinned_keeps_the_mean_and_the_ends() -> None:
    at = np.linspace(0, 100, 100_001)
    found = curves.thinned(Series("a", at.tolist(), (2 * at).tolist()), 50)
    assert len(found.at) == 50
    assert np.mean(found.values) == pytest.approx(100, rel=1e-3)
    assert found.at[0] < 2 and found.at[-1] > 98


def test_thinned_shows_nan_only_where_all_is_nan() -> None:
    values = np.ones(1000)
    values[500:600] = math.nan
    values[0] = math.nan
    found = np.array(curves.thinned(Series("a", np.arange(1000).tolist(), values.tolist()), 10).values)
    assert np.isnan(found).tolist() == [i == 5 for i in range(10)]


def test_lines_have_gaps_names_and_tooltips() -> None:
    figure = plots.line_chart(
        "loss",
        [Series("worker:0", [0, 1, 2, 3], [3, math.nan, 2, math.inf]), Series("worker:1", [0, 3], [1, 2])],
    )
    first, second = tags(figure, "path")
    assert first.attrib["d"].count("M") == 2 and second.attrib["d"].count("M") == 1
    assert "worker:0: 2 at 2" in figure
    assert "worker:1</li>" in figure


def test_lines_stay_inside_the_paper() -> None:
    figure = plots.line_chart("x", [Series("a", [10, 20, 30], [-1e6, 5, 1e9])])
    numbers = [float(n) for n in re.findall(r"[-\d.]+", tags(figure, "path")[0].attrib["d"])]
    assert all(0 <= x <= plots.WIDTH for x in numbers[::2])
    assert all(0 <= y <= plots.HEIGHT for y in numbers[1::2])


@pytest.mark.parametrize("series", [[], [Series("a", [], [])], [Series("a", [1], [math.nan])]])
def test_nothing_to_draw_is_nothing(series: list[Series]) -> None:
    assert plots.line_chart("a", series) == ""


def test_one_point_can_be_seen() -> None:
    figure = plots.line_chart("a", [Series("a", [1], [5])])
    assert [dot.attrib.get("class") for dot in tags(figure, "circle")] == ["alone"]


def test_more_lines_than_colours_differ_in_dashes() -> None:
    figure = plots.line_chart("a", [Series(f"s{i}", [0, 1], [i, i]) for i in range(16)])
    classes = [group.attrib["class"] for group in tags(figure, "g")]
    assert len(set(classes)) == 16


def test_shares_are_stacked_to_the_top() -> None:
    at = [0.0, 1.0, 2.0]
    figure = plots.area_chart("shares", [Series("wait", at, [0.2] * 3), Series("forward", at, [0.8] * 3)])
    below, above = tags(figure, "polygon")
    assert "20 % on average" in figure
    tops = {float(p.split(",")[1]) for p in above.attrib["points"].split()[:3]}
    assert tops == {plots.TOP}
    assert above.attrib["points"].split()[3:] == below.attrib["points"].split()[:3][::-1]
    assert plots.area_chart("shares", []) == ""
    assert "polygon" in plots.area_chart("shares", [Series("wait", [1.0], [1.0])])


def test_bars_are_as_high_as_their_values() -> None:
    figure = plots.bar_chart("s", ["0", "1", "2"], {"pushes": [4, 2, 0]}, x_label="staleness")
    heights = [float(bar.attrib["height"]) for bar in tags(figure, "rect")]
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.2) and len(heights) == 2
    assert "0: 4" in figure
    assert plots.bar_chart("s", [], {}) == "" and plots.bar_chart("s", ["0"], {"a": [0]}) == ""


def test_lying_bars_add_up() -> None:
    figure = plots.share_bars("s", [("worker:0", {"wait": 1, "forward": 3, "push": 0}), ("worker:1", {})])
    wait, forward = tags(figure, "rect")
    assert float(forward.attrib["width"]) == pytest.approx(3 * float(wait.attrib["width"]), abs=0.3)
    assert float(forward.attrib["x"]) == pytest.approx(
        float(wait.attrib["x"]) + float(wait.attrib["width"]), abs=0.2
    )
    assert "forward: 3 (75 %)" in figure
    assert plots.share_bars("s", [("worker:0", {})]) == ""


def test_timeline_cuts_at_its_edges() -> None:
    lanes = [
        TimelineRow("worker:0", [Bar(-1, 0.5, "wait", "a"), Bar(0.5, 9, "push", "b"), Bar(7, 9, "pull", "c")])
    ]
    figure = plots.timeline("t", lanes, 1.0)
    lane, wait, push = tags(figure, "rect")
    assert float(wait.attrib["width"]) + float(push.attrib["width"]) == pytest.approx(
        float(lane.attrib["width"]), abs=0.2
    )
    assert "milliseconds" in figure
    assert plots.timeline("t", [], 1.0) == ""


@pytest.mark.parametrize("size", [2, 64])
def test_matrix(size: int) -> None:
    names = [str(i) for i in range(size)]
    figure = plots.matrix("m", names, names, {(0, 1): 2.0, (1, 0): math.nan}, says="{row}>{column}={value}")
    assert "0&gt;1=2" in figure and "1&gt;0" not in figure
    assert float(parsed(figure).find("div/svg").attrib["viewBox"].split()[3]) < 600  # type: ignore[union-attr]
    assert plots.matrix("m", names, names, {}) == ""


def test_everything_is_escaped() -> None:
    evil = '"><script>alert(1)</script>'
    figures = [
        plots.line_chart(evil, [Series(evil, [0, 1], [0, 1])], x_label=evil, y_label=evil),
        plots.area_chart(evil, [Series(evil, [0, 1], [1, 1])], x_label=evil),
        plots.bar_chart(evil, [evil], {evil: [1]}, x_label=evil, y_label=evil),
        plots.share_bars(evil, [(evil, {evil: 1})], x_label=evil),
        plots.timeline(evil, [TimelineRow(evil, [Bar(0, 1, evil, evil)])], 1),
        plots.matrix(evil, [evil], [evil], {(0, 0): 1}),
    ]
    for figure in figures:
        assert "<script" not in figure
        parsed(figure)


def test_colours_have_both_schemes() -> None:
    light, dark = plots.STYLE.split("@media (prefers-color-scheme:dark)", 1)
    for name in ("--c0", "--c7", "--wait", "--forward"):
        assert f"{name}:#" in light and f"{name}:#" in dark
