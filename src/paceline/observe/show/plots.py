"""Plots as inline SVG: drawn here, so that a report is one file that needs no network and no script.

Colours are CSS classes (`STYLE` has them for light and dark). Nothing is told by colour alone: lines differ
in their dashes too, neighbouring areas in lightness, and everything has a tooltip. Everything is escaped.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Protocol

import numpy as np

from paceline.observe.analyse.curves import TimelineRow, thinned
from paceline.observe.analyse.facts import Series

__all__ = [
    "STYLE",
    "area_chart",
    "band_chart",
    "bar_chart",
    "line_chart",
    "matrix",
    "number",
    "share_bars",
    "ticks",
    "timeline",
]

WIDTH, HEIGHT = 480, 230
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 10, 38
COLOURS = 8
"""Number of distinct colours; further lines reuse them with other dashes."""
HOVERED = 40
"""Points of a line that have a tooltip of their own."""

Text = Callable[[float], str]

# Okabe and Ito's colours, which colour-blind readers can tell apart; lighter where the page is dark.
_LIGHT = ("#0072b2", "#d55e00", "#00845c", "#b0518f", "#996f00", "#3b8fc2", "#444444", "#8a2be2")
_DARK = ("#56b4e9", "#ff8c42", "#2fc896", "#e08cc2", "#f0c93b", "#9cd3f5", "#c8c8c8", "#b896ff")
# Computing is blue, loading yellow, exchanging orange to red, the rest grey.
_PHASES_LIGHT = {
    "forward": "#0b5c8f",
    "backward": "#4da3d9",
    "update": "#1d8a6b",
    "other": "#a9b4bd",
    "load": "#e3b505",
    "lease": "#7b6a2c",
    "compress": "#cc79a7",
    "push": "#8e3b76",
    "wait": "#e8663c",
    "pull": "#f6b08a",
    "checkpoint": "#5a5a5a",
    "idle": "#e9edf0",
}
_PALE = ("backward", "load", "pull", "other", "wait", "compress", "idle")
"""Phases whose colour needs dark text."""
_PHASES_DARK = {
    **_PHASES_LIGHT,
    "forward": "#2a86c4",
    "backward": "#8accf3",
    "update": "#37b893",
    "other": "#76838d",
    "push": "#b565a0",
    "lease": "#a8955a",
    "checkpoint": "#9a9a9a",
    "idle": "#2b3238",
}


def _variables(colours: Sequence[str], phases: Mapping[str, str]) -> str:
    found = [f"--c{i}:{colour}" for i, colour in enumerate(colours)]
    found += [f"--{phase}:{colour}" for phase, colour in phases.items()]
    return ";".join(found)


_DASHES = ("none", "7 3", "2 3", "9 3 2 3")

STYLE = "\n".join(
    [
        f":root{{{_variables(_LIGHT, _PHASES_LIGHT)}}}",
        f"@media (prefers-color-scheme:dark){{:root{{{_variables(_DARK, _PHASES_DARK)}}}}}",
        *(f".c{i}{{--colour:var(--c{i})}}" for i in range(COLOURS)),
        *(f".{phase}{{--colour:var(--{phase})}}" for phase in _PHASES_LIGHT),
        *(f".d{i} path,.d{i} line{{stroke-dasharray:{dash}}}" for i, dash in enumerate(_DASHES)),
        "figure{margin:0;min-width:0}",
        "figcaption{font-weight:600;margin:0 0 .3rem}",
        "svg{display:block;width:100%;height:auto;font:12px system-ui,sans-serif;overflow:visible}",
        "svg text{fill:var(--quiet)}",
        "svg text.on{fill:#fff}",
        ",".join(f"svg text.on.{name}" for name in _PALE) + "{fill:#10161b}",
        "svg text.cell{fill:var(--ink)}",
        "svg text{pointer-events:none}",
        "svg .axis{stroke:var(--line);stroke-width:1}",
        "svg .line path{fill:none;stroke:var(--colour);stroke-width:1.8;stroke-linejoin:round}",
        "svg .line circle{fill:var(--colour);fill-opacity:0;stroke:none}",
        "svg .line circle:hover,svg .line circle.alone{fill-opacity:1}",
        "svg .band{fill:var(--colour);fill-opacity:.14;stroke:none}",
        "svg .fill{fill:var(--colour);stroke:var(--paper);stroke-width:.6}",
        "svg .fill:hover{fill-opacity:.75}",
        "svg .lane{fill:var(--idle)}",
        ".wide{overflow-x:auto}.wide svg{min-width:560px}",
        ".legend{display:flex;flex-wrap:wrap;gap:.2rem .9rem;margin:.3rem 0 0;padding:0;list-style:none}",
        ".legend{font-size:.82rem;color:var(--quiet)}",
        ".legend svg{display:inline-block;width:22px;height:10px;margin-right:.35rem}",
        ".legend line{stroke:var(--colour);stroke-width:3}",
    ]
)


class Banded(Protocol):
    """A curve and its deviation."""

    @property
    def name(self) -> str: ...
    @property
    def at(self) -> Sequence[float]: ...
    @property
    def mean(self) -> Sequence[float]: ...
    @property
    def deviation(self) -> Sequence[float]: ...


def number(value: float) -> str:
    """A tick's number, short: `0.25`, `1,500`, `20k`, `3M`."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return [0.0, 1.0]
    if high <= low:
        room = abs(low) * 0.5 or 1.0
        low, high = (low, low + room) if low >= 0 else (low - room, low)
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str = "seconds",
    y_label: str = "",
    x_text: Text = number,
    y_text: Text = number,
    from_zero: bool = False,
) -> str:
    """Curves over a shared axis. NaN and infinity are gaps. Empty without a finite point."""
    series = [thinned(each) for each in series]
    xs = np.array([x for each in series for x in each.at])
    ys = np.array([y for each in series for y in each.values])
    ys = ys[np.isfinite(ys)]
    if not len(xs) or not len(ys):
        return ""
    low, high = float(ys.min()), float(ys.max())
    if from_zero or (0 <= low < 0.5 * high):
        low = min(0.0, low)
    chart = _Chart(ticks(float(xs.min()), float(xs.max())), ticks(low, high), trim=True, xs=xs)
    body = chart.axes(x_label, y_label, x_text, y_text)
    for i, each in enumerate(series):
        body += _line(chart, each, _class(i), x_text, y_text)
    alone = len(series) == 1 and series[0].name == title
    legend = "" if alone else _legend([(each.name, _class(i)) for i, each in enumerate(series)])
    return _figure(title, body, chart.height, legend)


def band_chart(title: str, bands: Sequence["Banded"], *, x_label: str = "seconds") -> str:
    """Curves, each with the deviation around it. Empty without a finite point."""
    edges = []
    for each in bands:
        mean, spread = np.asarray(each.mean, float), np.asarray(each.deviation, float)
        edges.append((mean - spread, mean + spread))
    ys = np.array([y for low, high in edges for y in (*low, *high)])
    xs = np.array([x for each in bands for x in each.at])
    ys = ys[np.isfinite(ys)]
    if not len(xs) or not len(ys):
        return ""
    bottom, top = float(ys.min()), float(ys.max())
    if 0 <= bottom < 0.5 * top:
        bottom = 0.0
    chart = _Chart(ticks(float(xs.min()), float(xs.max())), ticks(bottom, top), trim=True, xs=xs)
    body = chart.axes(x_label, "", number, number)
    for i, (each, (low, high)) in enumerate(zip(bands, edges, strict=True)):
        there = np.isfinite(low) & np.isfinite(high)
        if (high > low).any():
            at = np.asarray(each.at, float)[there]
            edge = [*zip(at, high[there], strict=True), *reversed([*zip(at, low[there], strict=True)])]
            points = " ".join(f"{chart.x(x):.1f},{chart.y(y):.1f}" for x, y in edge)
            body += f'<polygon class="band {_class(i)}" points="{points}"/>'
    for i, each in enumerate(bands):
        body += _line(chart, Series(each.name, each.at, each.mean), _class(i), number, number)
    return _figure(
        title, body, chart.height, _legend([(each.name, _class(i)) for i, each in enumerate(bands)])
    )


def area_chart(title: str, series: Sequence[Series], *, x_label: str = "seconds") -> str:
    """Shares of a whole over time, stacked; a series' name is its colour (a phase)."""
    if not series or len(series[0].at) == 0:
        return ""
    at = list(series[0].at)
    if len(at) == 1:
        at = [at[0] - 0.5, at[0] + 0.5]
        series = [Series(each.name, at, [*each.values, *each.values]) for each in series]
    chart = _Chart(ticks(at[0], at[-1]), [0, 0.25, 0.5, 0.75, 1.0], trim=True, xs=np.array(at))
    body = chart.axes(x_label, "", number, _percent)
    below = np.zeros(len(at))
    for each in series:
        above = below + np.nan_to_num(np.asarray(each.values, float))
        edge = [(x, y) for x, y in zip(at, above, strict=True)]
        edge += [(x, y) for x, y in zip(reversed(at), reversed(below.tolist()), strict=True)]
        points = " ".join(f"{chart.x(x):.1f},{chart.y(y):.1f}" for x, y in edge)
        mean = float(np.mean(above - below))
        body += (
            f'<polygon class="fill {escape(each.name)}" points="{points}">'
            f"<title>{escape(each.name)}: {_percent(mean)} on average</title></polygon>"
        )
        below = above
    return _figure(title, body, chart.height, _legend([(each.name, each.name) for each in series]))


def bar_chart(
    title: str,
    categories: Sequence[str],
    groups: Mapping[str, Sequence[float]],
    *,
    x_label: str = "",
    y_label: str = "",
    y_text: Text = number,
) -> str:
    """Upright bars, for each category one of every group."""
    highest = max((v for values in groups.values() for v in values if math.isfinite(v)), default=0.0)
    if not categories or highest <= 0:
        return ""
    chart = _Chart([0.0, float(len(categories))], ticks(0.0, highest))
    body = chart.axes("", y_label, lambda _: "", y_text)
    width = 1.0 / (len(groups) + 0.35)
    for i, (name, values) in enumerate(groups.items()):
        for at, value in enumerate(values):
            if value and math.isfinite(value):
                left, right = at + (i + 0.175) * width, at + (i + 1.175) * width
                top = chart.y(value)
                said = f"{name}, {categories[at]}" if len(groups) > 1 else categories[at]
                body += (
                    f'<rect class="fill {_class(i)}" x="{chart.x(left):.1f}" y="{top:.1f}" '
                    f'width="{max(0.5, chart.x(right) - chart.x(left)):.1f}" '
                    f'height="{chart.y(0) - top:.1f}">'
                    f"<title>{escape(said)}: {escape(y_text(value))}</title></rect>"
                )
    every = max(1, math.ceil(max(map(len, categories)) * 7.5 * len(categories) / (WIDTH - LEFT - RIGHT)))
    for at, label in enumerate(categories):
        if at % every == 0:
            body += _text(chart.x(at + 0.5), chart.y(0) + 15, label, "middle")
    body += _text((LEFT + WIDTH - RIGHT) / 2, chart.height - 3, x_label, "middle")
    legend = _legend([(name, _class(i)) for i, name in enumerate(groups)]) if len(groups) > 1 else ""
    return _figure(title, body, chart.height, legend)


def share_bars(
    title: str, rows: Sequence[tuple[str, Mapping[str, float]]], *, text: Text = number, x_label: str = ""
) -> str:
    """One lying bar a row, its parts side by side; a part's name is its colour (a phase)."""
    rows = [(name, {part: v for part, v in parts.items() if v > 0}) for name, parts in rows]
    longest = max((sum(parts.values()) for _, parts in rows), default=0.0)
    if longest <= 0:
        return ""
    left, tall = 8 + 7 * max(len(name) for name, _ in rows), 24 if len(rows) <= 16 else 14
    bottom = tall * len(rows) + 4
    scale = (WIDTH - left - 34) / (marks := ticks(0.0, longest))[-1]
    body = ""
    for mark in marks:
        x = left + mark * scale
        body += f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}"/>'
        body += _text(x, bottom + 15, text(mark), "middle")
    for i, (name, parts) in enumerate(rows):
        whole, x, y = sum(parts.values()), float(left), i * tall
        body += _text(left - 6, y + tall / 2 + 4, name, "end")
        for part, value in parts.items():
            wide = value * scale
            body += (
                f'<rect class="fill {escape(part)}" x="{x:.1f}" y="{y + 2}" width="{wide:.1f}" '
                f'height="{tall - 4}"><title>{escape(name)}, {escape(part)}: {escape(text(value))} '
                f"({_percent(value / whole)})</title></rect>"
            )
            if wide > 7 * len(part) + 8 and tall > 20:
                body += _text(x + wide / 2, y + tall / 2 + 4, part, "middle", f"on {part}")
            x += wide
    body += _text((left + WIDTH) / 2, bottom + 30, x_label, "middle")
    names = dict.fromkeys(part for _, parts in rows for part in parts)
    return _figure(title, body, bottom + 34, _legend([(name, name) for name in names]))


def timeline(title: str, lanes: Sequence[TimelineRow], seconds: float) -> str:
    """What several roles did at the same time, one below the other."""
    lanes = list(lanes)
    if not lanes or seconds <= 0:
        return ""
    width, left, tall = 760, 8 + 7 * max(len(lane.name) for lane in lanes), 26 if len(lanes) <= 16 else 16
    bottom = tall * len(lanes) + 2
    scale = (width - left - 20) / seconds
    unit, name = (1e3, "milliseconds") if seconds < 2 else (1.0, "seconds")
    body = ""
    for i, lane in enumerate(lanes):
        y = i * tall + 2
        body += _text(left - 6, y + tall / 2 + 3, lane.name, "end")
        body += f'<rect class="lane" x="{left}" y="{y}" width="{seconds * scale:.1f}" height="{tall - 4}"/>'
        for bar in lane.bars:
            start, end = max(0.0, bar.start), min(seconds, bar.end)
            wide = (end - start) * scale
            if wide <= 0:
                continue
            x = left + start * scale
            body += (
                f'<rect class="fill {escape(bar.name)}" x="{x:.2f}" y="{y}" width="{max(0.3, wide):.2f}" '
                f'height="{tall - 4}"><title>{escape(bar.title)}</title></rect>'
            )
            if wide > 7 * len(bar.name) + 8 and tall > 20:
                body += _text(x + wide / 2, y + tall / 2 + 3, bar.name, "middle", f"on {bar.name}")
    for mark in ticks(0.0, seconds * unit, 8):
        if mark <= seconds * unit * 1.0001:
            x = left + mark / unit * scale
            body += f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 5}"/>'
            body += _text(x, bottom + 18, number(mark), "middle")
    body += _text((left + width) / 2, bottom + 33, name, "middle")
    names = dict.fromkeys(bar.name for lane in lanes for bar in lane.bars)
    return _figure(title, body, bottom + 38, _legend([(each, each) for each in names]), width, "wide")


def matrix(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Mapping[tuple[int, int], float],
    *,
    text: Text = number,
    says: str = "{row}, {column}: {value}",
) -> str:
    """A grid of squares, the darker the more. `values` by position of row and column; none is nothing."""
    highest = max((v for v in values.values() if math.isfinite(v)), default=0.0)
    if highest <= 0 or not rows or not columns:
        return ""
    left = 8 + 7 * max(map(len, rows))
    cell = min(64.0, (WIDTH - left - 10) / len(columns))
    tall = min(cell, 30.0) if cell > 30 else cell
    top, every = 20, max(1, math.ceil((7 * max(map(len, columns)) + 4) / cell))
    every_row = max(1, math.ceil(14 / tall))
    body = ""
    for j, name in enumerate(columns):
        if j % every == 0:
            body += _text(left + (j + 0.5) * cell, 13, name, "middle")
    for i, name in enumerate(rows):
        if i % every_row == 0:
            body += _text(left - 6, top + (i + 0.5) * tall + 4, name, "end")
        body += (
            f'<rect class="lane" x="{left}" y="{top + i * tall:.1f}" width="{cell * len(columns):.1f}" '
            f'height="{max(0.5, tall - 1):.1f}"/>'
        )
    for (i, j), value in values.items():
        if not (value > 0 and math.isfinite(value)):
            continue
        said = says.format(row=rows[i], column=columns[j], value=text(value))
        body += (
            f'<rect class="fill wait" fill-opacity="{0.12 + 0.63 * value / highest:.2f}" '
            f'x="{left + j * cell:.1f}" y="{top + i * tall:.1f}" width="{cell:.1f}" '
            f'height="{tall:.1f}"><title>{escape(said)}</title></rect>'
        )
        if cell > 7 * len(text(value)) and tall > 15:
            body += _text(left + (j + 0.5) * cell, top + (i + 0.5) * tall + 4, text(value), "middle", "cell")
    return _figure(title, body, math.ceil(top + tall * len(rows) + 4))


class _Chart:
    """Where a point of the data is on the paper."""

    def __init__(
        self,
        x_ticks: Sequence[float],
        y_ticks: Sequence[float],
        *,
        trim: bool = False,
        xs: "np.ndarray[tuple[int], np.dtype[np.float64]] | None" = None,
    ) -> None:
        self.height = HEIGHT
        self._x_low, self._x_high = x_ticks[0], x_ticks[-1]
        if trim and xs is not None and len(xs) and float(xs.max()) > float(xs.min()):
            # A curve fills the width; its ticks are those inside.
            self._x_low, self._x_high = float(xs.min()), float(xs.max())
            if 0 < self._x_low < 0.1 * self._x_high:
                self._x_low = 0.0
        slack = (self._x_high - self._x_low) * 1e-6
        self._x_ticks = [t for t in x_ticks if self._x_low - slack <= t <= self._x_high + slack]
        self._y_ticks = y_ticks

    def x(self, value: float) -> float:
        return LEFT + (value - self._x_low) / ((self._x_high - self._x_low) or 1.0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self._y_ticks[0], self._y_ticks[-1]
        return HEIGHT - BOTTOM - (value - low) / ((high - low) or 1.0) * (HEIGHT - TOP - BOTTOM)

    def axes(self, x_label: str, y_label: str, x_text: Text, y_text: Text) -> str:
        body = ""
        for tick in self._y_ticks:
            y = self.y(tick)
            body += f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            body += _text(LEFT - 6, y + 4, y_text(tick), "end")
        for tick in self._x_ticks:
            if label := x_text(tick):
                body += _text(self.x(tick), HEIGHT - BOTTOM + 15, label, "middle")
        body += _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, x_label, "middle")
        if y_label:
            middle = (TOP + HEIGHT - BOTTOM) / 2
            body += (
                f'<text x="11" y="{middle:.0f}" text-anchor="middle" '
                f'transform="rotate(-90 11 {middle:.0f})">{escape(y_label)}</text>'
            )
        return body


def _line(chart: _Chart, series: Series, classes: str, x_text: Text, y_text: Text) -> str:
    path, pen_up, finite = "", True, []
    for x, y in zip(series.at, series.values, strict=True):
        if not math.isfinite(y):
            pen_up = True
            continue
        path += f"{'M' if pen_up else 'L'}{chart.x(x):.1f} {chart.y(y):.1f}"
        pen_up = False
        finite.append((x, y))
    if not finite:
        return ""
    body = f'<path d="{path}"><title>{escape(series.name)}</title></path>'
    alone = ' class="alone"' if len(finite) == 1 else ""
    for x, y in finite[:: math.ceil(len(finite) / HOVERED)]:
        body += (
            f'<circle{alone} cx="{chart.x(x):.1f}" cy="{chart.y(y):.1f}" r="4"><title>'
            f"{escape(series.name)}: {escape(y_text(y))} at {escape(x_text(x))}</title></circle>"
        )
    return f'<g class="line {classes}">{body}</g>'


def _class(i: int) -> str:
    return f"c{i % COLOURS} d{(i + i // COLOURS) % len(_DASHES)}"


def _text(x: float, y: float, text: str, anchor: str, name: str = "") -> str:
    if not text:
        return ""
    kind = f' class="{escape(name)}"' if name else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    """`entries`: name and classes."""
    items = "".join(
        f'<li><svg class="{escape(classes)}" viewBox="0 0 22 10" aria-hidden="true">'
        f'<line x1="0" x2="22" y1="6" y2="6"/></svg>{escape(name)}</li>'
        for name, classes in entries
    )
    return f'<ul class="legend">{items}</ul>'


def _figure(
    title: str, body: str, height: float, legend: str = "", width: int = WIDTH, classes: str = ""
) -> str:
    kind = f' class="{classes}"' if classes else ""
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><div{kind}><svg viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(title)}">{body}</svg></div>{legend}</figure>'
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
