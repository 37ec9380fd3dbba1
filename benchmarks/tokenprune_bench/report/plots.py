# SPDX-License-Identifier: Apache-2.0
"""Plots as plain geometry, in the units of an SVG's viewBox; templates/plot.svg draws it, the style sheet colours it.

Not matplotlib's SVG: that has its colours and sizes inside, and these follow the page, in light and dark, wide and
narrow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Scale = Callable[[float], float]
COLOURS = 8  # that the style sheet has for series
_LETTER, _TEXT = 8.6, 17  # width and height that a label may need, at the larger size of narrow screens
_HEAD = 21  # below which is room for labels: above stands the title of the y axis
# Shapes of about one area around (0, 0); each colour meets each shape before a pair comes again.
_DISC = "M0-4.6A4.6 4.6 0 1 1 0 4.6A4.6 4.6 0 1 1 0-4.6Z"
_SHAPES = (  # with matplotlib's name for each
    ("o", _DISC),
    ("s", "M-4.2-4.2H4.2V4.2H-4.2Z"),
    ("D", "M0-5.8L5.8 0L0 5.8L-5.8 0Z"),
    ("^", "M0-5.2L5.2 4.4H-5.2Z"),
    ("v", "M0 5.2L5.2-4.4H-5.2Z"),
    ("p", "M0-5.4L5.1-1.7L3.2 4.4H-3.2L-5.1-1.7Z"),
    ("<", "M-5.2 0L4.4-5.2V5.2Z"),
    (">", "M5.2 0L-4.4-5.2V5.2Z"),
)
_CROSS, _PLUS = ("x", "M-4-4L4 4M-4 4L4-4"), ("+", "M-5 0H5M0-5V5")
_STAR = "M0-7.5L2-2.4L7.1-2.3L3.1.9L4.4 6L0 3.1L-4.4 6L-3.1.9L-7.1-2.3L-2-2.4Z"


@dataclass(frozen=True)
class Style:
    """The look of a series.

    css: the class with its colour. path: of its marker. tags: by which it is highlighted, in plots, legends and tables.
    dashed: whether its line is. marker, colour: what matplotlib calls them.
    """

    css: str
    path: str
    tags: str = ""
    dashed: bool = False
    marker: str = "o"
    colour: str = "C0"


def method_style(index: int, tags: str) -> Style:
    """Return the look of the method `index`."""
    marker, path = _SHAPES[(index + index // COLOURS) % len(_SHAPES)]
    number = index % COLOURS
    return Style(f"c{number}", path, tags, marker=marker, colour=f"C{9 if number == 7 else number}")  # C7 is grey


def baseline_style(index: int, tags: str) -> Style:
    """Return the look of the baseline `index`: grey and dashed."""
    marker, path = (_CROSS, _PLUS)[index % 2]
    return Style(f"base{index % 2}", path, tags, dashed=True, marker=marker, colour=("0.25", "0.55")[index % 2])


def whole_style(tags: str) -> Style:
    """Return the look of the unpatched model."""
    return Style("whole", _STAR, tags)


def run_style(index: int, tags: str) -> Style:
    """Return the look of the run `index` in a plot of several."""
    return Style(f"c{index % COLOURS}", _DISC, tags)


@dataclass(frozen=True)
class Point:
    """One measurement. x, y, low, high: in the units of the axes, the last two of y's interval. name: for the label on
    the front. text: all about it."""

    x: float
    y: float
    low: float
    high: float
    name: str
    text: str


@dataclass(frozen=True)
class Series:
    """Points that belong together; a line joins them in the order of x."""

    style: Style
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Tick:
    place: float
    text: str


@dataclass(frozen=True)
class Mark:
    """A point, drawn. x, y, low, high: places. front: whether it lies on the Pareto front."""

    x: float
    y: float
    low: float
    high: float
    text: str
    front: bool


@dataclass(frozen=True)
class DrawnPlot:
    """A series, drawn. line: points of a polyline, "" for none."""

    style: Style
    line: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Label:
    x: float
    y: float
    anchor: str
    text: str
    tags: str


@dataclass
class Plot:
    """The arguments of the template. left, right, top, bottom: edges of the area of the data."""

    title: str
    x_title: str
    y_title: str
    width: int = 560
    height: int = 408
    left: int = 48
    right: int = 544
    top: int = 48
    bottom: int = 348
    css: str = ""
    x_ticks: list[Tick] = field(default_factory=list)
    y_ticks: list[Tick] = field(default_factory=list)
    series: list[DrawnPlot] = field(default_factory=list)
    front: str = ""  # the path of the Pareto front
    steps: list[tuple[Style, str]] = field(default_factory=list)  # further fronts, of parts of the series
    guide: float | None = None  # the place of a vertical line
    labels: list[Label] = field(default_factory=list)
    front_in_words: list[tuple[str, Style]] = field(default_factory=list)  # the front in words


def front_of(points: Sequence[Point]) -> list[int]:
    """Return the indices of the points with which no other one competes: as good or better at less, from left to right.

    Of equal points the first one counts.
    """
    best, front = -math.inf, []
    for index in sorted(range(len(points)), key=lambda index: (points[index].x, -points[index].y, index)):
        if points[index].y > best:
            best = points[index].y
            front.append(index)
    return front


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Return round numbers from `low` or below to `high` or above, about so many."""
    if high <= low:
        high = low + 1
    rough = (high - low) / about
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * one for one in (1, 2, 2.5, 5, 10) if power * one >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * number, 10) for number in range(first, last + 1)]


def pareto(
    title: str,
    x_title: str,
    y_title: str,
    series: Sequence[Series],
    guide: float | None = None,
    parts: Sequence[tuple[Style, Sequence[Point]]] = (),
) -> Plot | None:
    """Return a plot of y against x with the Pareto front (small x, large y); None without points.

    guide: x of a vertical line. parts: points that have a front of their own too, in this look.
    """
    flat = [(one, point) for one in series for point in one.points]
    if not flat:
        return None
    points = [point for _, point in flat]
    plot = Plot(title, x_title, y_title, css="joint" if parts else "")
    # x from zero: half the tokens are half the way.
    end = max([point.x for point in points] + ([] if guide is None else [guide])) or 1.0
    up = ticks(max(0, min(point.low for point in points)), max(point.high for point in points))
    x, y = _scales(plot, 1.03 * end, up)
    plot.x_ticks = [Tick(x(value), f"{value:g}") for value in ticks(0, end) if value <= 1.03 * end]
    plot.guide = None if guide is None else x(guide)
    front = front_of(points)
    on_front = {id(points[index]) for index in front}
    for one in series:
        ordered = sorted(one.points, key=lambda point: point.x)
        line = " ".join(f"{x(point.x)},{y(point.y)}" for point in ordered) if len(ordered) > 1 else ""
        marks = tuple(
            Mark(x(point.x), y(point.y), y(point.low), y(point.high), point.text, id(point) in on_front)
            for point in ordered
        )
        plot.series.append(DrawnPlot(one.style, line, marks))
    plot.front = _stairs(plot, [(x(points[index].x), y(points[index].y)) for index in front])
    for style, own in parts:
        plot.steps.append((style, _stairs(plot, [(x(own[index].x), y(own[index].y)) for index in front_of(own)])))
    plot.front_in_words = [(points[index].text, flat[index][0].style) for index in front]
    spots = [(mark.x, mark.y) for drawn in plot.series for mark in drawn.marks]
    wanted = [(x(points[i].x), y(points[i].y), points[i].name, flat[i][0].style.tags) for i in front]
    plot.labels = _labels(plot, wanted, spots)
    return plot


def curves(title: str, y_title: str, series: Sequence[tuple[Style, Sequence[float]]], top: float) -> Plot:
    """Return a small plot of values per layer, as steps: layer 1 is the first. top: the largest value of the axis."""
    plot = Plot(title, "decoder layer", y_title, 380, 260, 44, 368, 36, 206, "small")
    layers = max(len(values) for _, values in series)
    x, y = _scales(plot, layers, ticks(0, top, 4))
    every = max(1, math.ceil(layers / 8))
    plot.x_ticks = [Tick(x(layer - 0.5), f"{layer}") for layer in range(1, layers + 1) if (layer - 1) % every == 0]
    for style, values in series:
        line = " ".join(f"{x(n)},{y(value)} {x(n + 1)},{y(value)}" for n, value in enumerate(values))
        plot.series.append(DrawnPlot(style, line, ()))
    return plot


def _scales(plot: Plot, end: float, up: Sequence[float]) -> tuple[Scale, Scale]:
    """Return the functions from values to places, x from 0 to `end` and y over its ticks, which are set."""

    def x(value: float) -> float:
        return round(plot.left + value / end * (plot.right - plot.left), 1)

    def y(value: float) -> float:
        share = (value - up[0]) / (up[-1] - up[0])
        return round(plot.bottom - share * (plot.bottom - plot.top), 1)

    plot.y_ticks = [Tick(y(value), f"{value:g}") for value in up]
    return x, y


def _stairs(plot: Plot, places: Sequence[tuple[float, float]]) -> str:
    """Return the path of a front. Between two points nothing was measured: it goes on at the height of the left one."""
    path = f"M{places[0][0]} {plot.bottom}"
    for place, after in zip(places, [*places[1:], (plot.right, 0)], strict=True):
        path += f"V{place[1]}H{after[0]}"
    return path


def _labels(
    plot: Plot, wanted: Sequence[tuple[float, float, str, str]], spots: Sequence[tuple[float, float]]
) -> list[Label]:
    """Place labels beside their points, where they cover neither points nor each other; without room there is none."""
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in spots]
    labels = []
    for x, y, text, tags in wanted:
        width = _LETTER * len(text)
        for anchor, across, down in (
            ("end", -9, -7), ("middle", 0, -12), ("start", 9, -7), ("start", 10, 6), ("end", -10, 6), ("start", 9, 20),
            ("middle", 0, 24), ("end", -9, 20),
        ):  # fmt: skip
            left = x + across - {"start": 0, "middle": width / 2, "end": width}[anchor]
            box = (left, y + down - _TEXT * 0.8, left + width, y + down + _TEXT * 0.25)
            inside = plot.left <= box[0] and box[2] <= plot.right and box[1] >= _HEAD and box[3] <= plot.bottom
            if inside and not any(_overlap(box, other) for other in taken):
                labels.append(Label(round(x + across, 1), round(y + down, 1), anchor, text, tags))
                taken.append(box)
                break
    return labels


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
