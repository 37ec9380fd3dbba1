# SPDX-License-Identifier: Apache-2.0
"""Plots as geometry in SVG units. templates/plot.svg draws them, and the style sheet sets their colors.

matplotlib's SVG has fixed colors and sizes. These plots follow the page: light and dark, wide and narrow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Scale = Callable[[float], float]
COLOURS = 8  # series colors of the style sheet
_LETTER, _TEXT = 8.6, 17  # maximum width of a letter and height of a label, at the font size of narrow screens
_HEAD = 21  # height of the title of the y axis, which labels must not cover
# Shapes of similar area around (0, 0). Pairs of color and shape repeat only after all combinations.
_DISC = "M0-4.6A4.6 4.6 0 1 1 0 4.6A4.6 4.6 0 1 1 0-4.6Z"
_SHAPES = (  # matplotlib's name and the SVG path
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
    """Look of a series.

    Attributes:
        css: Class with the color.
        path: SVG path of the marker.
        tags: Classes that highlight the series in plots, legends and tables.
        dashed: Whether the line is dashed.
        marker: matplotlib's name of the marker.
        colour: matplotlib's name of the color.
    """

    css: str
    path: str
    tags: str = ""
    dashed: bool = False
    marker: str = "o"
    colour: str = "C0"


def get_method_style(index: int, tags: str) -> Style:
    """Return the style of method number `index`."""
    marker, path = _SHAPES[(index + index // COLOURS) % len(_SHAPES)]
    color = index % COLOURS
    return Style(f"c{color}", path, tags, marker=marker, colour=f"C{9 if color == 7 else color}")  # C7 is gray


def get_baseline_style(index: int, tags: str) -> Style:
    """Return the gray, dashed style of baseline number `index`."""
    marker, path = (_CROSS, _PLUS)[index % 2]
    return Style(f"base{index % 2}", path, tags, dashed=True, marker=marker, colour=("0.25", "0.55")[index % 2])


def get_unpatched_style(tags: str) -> Style:
    """Return the style of the unpatched model."""
    return Style("whole", _STAR, tags)


def get_run_color(index: int, tags: str) -> Style:
    """Return the style of run number `index` in a plot of several runs."""
    return Style(f"c{index % COLOURS}", _DISC, tags)


@dataclass(frozen=True)
class Point:
    """A measurement, in units of the axes.

    Attributes:
        x: x value.
        y: y value.
        low: Lower end of the interval of y.
        high: Upper end of the interval of y.
        name: Label on the Pareto front.
        text: Full description.
    """

    x: float
    y: float
    low: float
    high: float
    name: str
    text: str


@dataclass(frozen=True)
class Series:
    """Points of a method, joined by a line in the order of x."""

    style: Style
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Tick:
    offset: float
    text: str


@dataclass(frozen=True)
class Mark:
    """A point in SVG units.

    Attributes:
        x: x coordinate.
        y: y coordinate.
        low: y coordinate of the lower end of the interval.
        high: y coordinate of the upper end of the interval.
        text: Full description.
        front: Whether the point is on the Pareto front.
    """

    x: float
    y: float
    low: float
    high: float
    text: str
    front: bool


@dataclass(frozen=True)
class DrawnPlot:
    """A series in SVG units.

    Attributes:
        style: Look of the series.
        line: Points of the polyline, "" for none.
        marks: The points.
    """

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
    """Arguments of the template. `left`, `right`, `top` and `bottom` are the edges of the data area."""

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
    steps: list[tuple[Style, str]] = field(default_factory=list)  # fronts of `parts`
    guide: float | None = None  # x coordinate of a vertical line
    labels: list[Label] = field(default_factory=list)
    front_in_words: list[tuple[str, Style]] = field(default_factory=list)  # descriptions of the points on the front


def find_front(points: Sequence[Point]) -> list[int]:
    """Return the indices of the points on the Pareto front, from left to right.

    A point is on the front if no other point has a higher or equal y at a smaller or equal x. Of equal points the first
    counts.
    """
    best, front = -math.inf, []
    for index in sorted(range(len(points)), key=lambda index: (points[index].x, -points[index].y, index)):
        if points[index].y > best:
            best = points[index].y
            front.append(index)
    return front


def compute_ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Return about `about` round numbers that cover the range from `low` to `high`."""
    if high <= low:
        high = low + 1
    rough = (high - low) / about
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * count, 10) for count in range(first, last + 1)]


def build_pareto_plot(
    title: str,
    x_title: str,
    y_title: str,
    series: Sequence[Series],
    guide: float | None = None,
    parts: Sequence[tuple[Style, Sequence[Point]]] = (),
) -> Plot | None:
    """Return a plot of y against x with the Pareto front (small x, large y), or None without points.

    Args:
        title: Title of the plot.
        x_title: Title of the x axis.
        y_title: Title of the y axis.
        series: The points.
        guide: x of a vertical line.
        parts: Subsets of the points with a separate front, and its style.
    """
    flat = [(line, point) for line in series for point in line.points]
    if not flat:
        return None
    points = [point for _, point in flat]
    plot = Plot(title, x_title, y_title, css="joint" if parts else "")
    # The x axis starts at zero, so that half of the tokens is half of the width.
    end = max([point.x for point in points] + ([] if guide is None else [guide])) or 1.0
    up = compute_ticks(max(0, min(point.low for point in points)), max(point.high for point in points))
    x, y = _build_scales(plot, 1.03 * end, up)
    plot.x_ticks = [Tick(x(value), f"{value:g}") for value in compute_ticks(0, end) if value <= 1.03 * end]
    plot.guide = None if guide is None else x(guide)
    front = find_front(points)
    on_front = {id(points[index]) for index in front}
    for line_series in series:
        ordered = sorted(line_series.points, key=lambda point: point.x)
        line = " ".join(f"{x(point.x)},{y(point.y)}" for point in ordered) if len(ordered) > 1 else ""
        marks = tuple(
            Mark(x(point.x), y(point.y), y(point.low), y(point.high), point.text, id(point) in on_front)
            for point in ordered
        )
        plot.series.append(DrawnPlot(line_series.style, line, marks))
    plot.front = _build_front_path(plot, [(x(points[index].x), y(points[index].y)) for index in front])
    for style, part in parts:
        plot.steps.append(
            (style, _build_front_path(plot, [(x(part[index].x), y(part[index].y)) for index in find_front(part)]))
        )
    plot.front_in_words = [(points[index].text, flat[index][0].style) for index in front]
    spots = [(mark.x, mark.y) for drawn in plot.series for mark in drawn.marks]
    front_labels = [(x(points[i].x), y(points[i].y), points[i].name, flat[i][0].style.tags) for i in front]
    plot.labels = _place_labels(plot, front_labels, spots)
    return plot


def build_layer_curves(title: str, y_title: str, series: Sequence[tuple[Style, Sequence[float]]], top: float) -> Plot:
    """Return a small step plot of values per decoder layer.

    Args:
        title: Title of the plot.
        y_title: Title of the y axis.
        series: Styles and values per layer.
        top: Largest value of the y axis.
    """
    plot = Plot(title, "decoder layer", y_title, 380, 260, 44, 368, 36, 206, "small")
    layers = max(len(values) for _, values in series)
    x, y = _build_scales(plot, layers, compute_ticks(0, top, 4))
    every = max(1, math.ceil(layers / 8))
    plot.x_ticks = [Tick(x(layer - 0.5), f"{layer}") for layer in range(1, layers + 1) if (layer - 1) % every == 0]
    for style, values in series:
        line = " ".join(f"{x(n)},{y(value)} {x(n + 1)},{y(value)}" for n, value in enumerate(values))
        plot.series.append(DrawnPlot(style, line, ()))
    return plot


def _build_scales(plot: Plot, end: float, up: Sequence[float]) -> tuple[Scale, Scale]:
    """Return the functions from values to SVG coordinates, and set the y ticks. x goes from 0 to `end`."""

    def x(value: float) -> float:
        return round(plot.left + value / end * (plot.right - plot.left), 1)

    def y(value: float) -> float:
        share = (value - up[0]) / (up[-1] - up[0])
        return round(plot.bottom - share * (plot.bottom - plot.top), 1)

    plot.y_ticks = [Tick(y(value), f"{value:g}") for value in up]
    return x, y


def _build_front_path(plot: Plot, corners: Sequence[tuple[float, float]]) -> str:
    """Return the path of a front. Between two points it stays at the height of the left point."""
    path = f"M{corners[0][0]} {plot.bottom}"
    for corner, following in zip(corners, [*corners[1:], (plot.right, 0)], strict=True):
        path += f"V{corner[1]}H{following[0]}"
    return path


def _place_labels(
    plot: Plot, points: Sequence[tuple[float, float, str, str]], spots: Sequence[tuple[float, float]]
) -> list[Label]:
    """Position labels beside their points without overlap. Labels without free space are left out."""
    occupied = [(x - 6, y - 6, x + 6, y + 6) for x, y in spots]
    labels = []
    for x, y, text, tags in points:
        width = _LETTER * len(text)
        for anchor, across, down in (
            ("end", -9, -7), ("middle", 0, -12), ("start", 9, -7), ("start", 10, 6), ("end", -10, 6), ("start", 9, 20),
            ("middle", 0, 24), ("end", -9, 20),
        ):  # fmt: skip
            left = x + across - {"start": 0, "middle": width / 2, "end": width}[anchor]
            box = (left, y + down - _TEXT * 0.8, left + width, y + down + _TEXT * 0.25)
            inside = plot.left <= box[0] and box[2] <= plot.right and box[1] >= _HEAD and box[3] <= plot.bottom
            if inside and not any(_overlap(box, other) for other in occupied):
                labels.append(Label(round(x + across, 1), round(y + down, 1), anchor, text, tags))
                occupied.append(box)
                break
    return labels


def _overlap(box: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
