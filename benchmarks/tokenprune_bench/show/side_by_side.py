# SPDX-License-Identifier: Apache-2.0
"""Compare methods side by side on one prompt, each with its answer: an image to share, and a figure."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from PIL import Image

from tokenprune.errors import OptionError, TokenPruneError
from tokenprune.methods import DEFAULT_METHOD
from tokenprune.settings import Setting
from tokenprune.settings.keys import LIMIT
from tokenprune.settings.one_line import split_methods
from tokenprune_bench.profiling.kept_tokens import format_keep
from tokenprune_bench.profiling.model import Model
from tokenprune_bench.profiling.photo import Photo, get_preview
from tokenprune_bench.show import contact_sheet, draw, layout
from tokenprune_bench.show.contact_sheet import PromptView
from tokenprune_bench.show.layout import Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LARGEST, SMALLEST = 1280, 384  # limits of the longer side of a drawing, in pixels
_At = Callable[[Sequence[tuple[int, int]]], list[Image.Image]]


@dataclass(frozen=True)
class Shown:
    """Output of `tokenprune show`.

    Attributes:
        caption: Model and question.
        panels: The unpatched panel, then the kept tokens of each method, followed by its scores if requested.
        seen: View of each method.
        before: Answer of the unpatched model.
        tokens: Visual tokens of the unpatched model.
        notes: Notes about the drawings.
        cropped: The image with a box around the visible part, if the processor crops.
    """

    caption: tuple[str, ...]
    panels: list[Panel]
    seen: list[PromptView]
    before: str
    tokens: int
    notes: tuple[str, ...] = ()
    cropped: Image.Image | None = None

    @property
    def kept_panels(self) -> list[Panel]:
        """Panels of the kept tokens, one per method."""
        return [panel for panel in self.panels[1:] if not panel.scores]

    @property
    def across(self) -> int:
        """Number of drawings side by side: one for several frames, or for a wide image cut into rows."""
        if max(panel.frames for panel in self.panels) > 1 or self.panels[0].rows(layout.WIDTH) > 1:
            return 1
        maps = any(panel.scores for panel in self.panels)  # each is below the drawing of its method
        return layout.columns(len(self.columns), self.panels[0].shape * (1 + maps))

    @property
    def columns(self) -> list[list[Panel]]:
        """Each drawing, and the map of scores below it."""
        columns: list[list[Panel]] = []
        for panel in self.panels:
            if panel.scores:
                columns[-1].append(panel)
            else:
                columns.append([panel])
        return columns

    def lines(self, across: int) -> list[list[Panel | None]]:
        """Return the panels line by line, with maps of scores below their drawings. None: an empty cell."""
        lines: list[list[Panel | None]] = []
        for start in range(0, len(self.columns), across):
            part = self.columns[start : start + across]
            lines.append([column[0] for column in part])
            if any(column[1:] for column in part):
                lines.append([column[1] if column[1:] else None for column in part])
        return lines

    def image(self, width: int = layout.WIDTH, least: int = 0) -> Image.Image:
        """Return all panels with their text as one image.

        Args:
            width: Maximum width in pixels.
            least: Minimum height of a caption in pixels.
        """
        return layout.sheet(self.caption, self.lines(self.across), width, self.cropped, least)

    def select_settings(self, start: int, stop: int) -> Shown:
        """Return the output with only the settings from `start` to `stop`."""
        panels = [panel for column in self.columns[1 + start : 1 + stop] for panel in column]
        return replace(self, panels=[self.panels[0], *panels], seen=self.seen[start:stop])

    def select_frame(self, index: int) -> Shown:
        """Return the output with only one frame of a video."""
        num_frames = max(panel.frames for panel in self.panels)
        panels = [panel.select_frame(index) for panel in self.panels]
        return replace(self, caption=(*self.caption, f"frame {index + 1} of {num_frames}"), panels=panels)

    def pair(self, index: int) -> Image.Image:
        """Return the unpatched image and the kept tokens of one method, without text."""
        pair = self.panels[0].image, self.kept_panels[index].image
        return contact_sheet.row(pair) if len(self.seen[index].frames) == 1 else layout.column(pair)


def show(
    subject: Model,
    images: Sequence[Image.Image | Photo],
    question: str,
    settings: Sequence[Setting | Mapping[str, Any]],
    scores: bool = False,
    step: Callable[[str, int, int], None] = lambda label, done, total: None,
) -> Shown:
    """Ask once unpatched and once with each method, and draw the kept tokens.

    Args:
        subject: The model.
        images: One image, the frames of a video, or several images of one prompt. Models with video input get several
            images as a video, unless the method runs on pixels. A `Photo` is decoded at the scale that each setting
            needs.
        question: The question.
        settings: Settings as for `patch(config=...)`, each with one keep for all methods.
        scores: Also draw maps of scores, for methods that rank tokens.
        step: Progress callback with a label, the number of answers and their total.

    Raises:
        UnsupportedSetupError: If the tokens of an image do not form a grid.
        OptionError: If a method selects between images.
    """
    if not settings:
        raise OptionError("Pass at least one method.")
    parsed = [Setting.from_json(setting) for setting in settings]
    for setting in parsed:
        draw.check_drawable(setting)
    videos = [len(images) > 1 and contact_sheet.is_video_input(subject, setting) for setting in parsed]
    step("unpatched", 0, 1 + len(parsed))
    full = contact_sheet.build_inputs(subject, images, question, any(videos))
    (before,) = subject.generate(full)
    tokens = subject.visual_tokens(full)
    single, several = len(images) == 1, len(parsed) > 1 or scores
    views = [get_preview(image).convert("RGB") for image in images]
    notes: list[str] = []
    cropped = None
    if not any(videos):
        boxes = [draw.seen_box(subject, image) for image in views]
        crops = [
            draw.describe_crop(image, draw.scale_box(box, view.size, image.size))
            for image, view, box in zip(images, views, boxes, strict=True)
        ]
        notes += list(dict.fromkeys(filter(None, crops)))
        triples = zip(views, boxes, crops, strict=True)
        cropped = next((draw.boxed(image, box) for image, box, crop in triples if box and crop), None)
        views = [image.crop(box) if box else image for image, box in zip(views, boxes, strict=True)]
    panels: list[Panel] = []
    shown: list[PromptView] = []
    for index, (setting, video) in enumerate(zip(parsed, videos, strict=True)):
        name = setting.to_text()
        step(name, 1 + index, 1 + len(parsed))
        view = contact_sheet.view_prompt(subject, images, question, setting, video)
        if not video:  # draw images at their own resolution; a model may merge frames of a video in time
            view = PromptView(views, view.grids, view.kept, view.groups, view.answer, view.stats, view.scores)
        shown.append(view)
        sizes = [
            _compute_size(frame, grid, single, several) for frame, grid in zip(view.frames, view.grids, strict=True)
        ]
        if not panels:
            unpatched = [frame.resize(size) for frame, size in zip(view.frames, sizes, strict=True)]
            about = f"{tokens} visual tokens", _format_answer(before)
            panels.append(
                _build_panel(_strip(unpatched), "unpatched", about, view.frames, _make_plain_drawer(view.frames))
            )
        keep_text = format_keep(setting.keep, len(setting.names), int(view.kept.sum()) / max(1, tokens))
        image, title = _strip(view.drawings(0, sizes)), f"{name}, keep {keep_text}"
        panels.append(_build_panel(image, title, _describe_view(view, tokens), view.frames, _make_kept_drawer(view)))
        if scores and view.scores is None:
            notes.append(f"{name} does not rank tokens by a score, so it has no map")
        elif scores and view.scores is not None:
            heated, scale = _make_heat_drawer(view), ("ranks, from dark (low) to yellow (high)",)
            panels.append(
                _build_panel(_strip(heated(sizes)), f"{name}: scores", scale, view.frames, heated, scores=True)
            )
    limits = {setting.max_visual_tokens for setting in parsed if setting.max_visual_tokens is not None}
    notes += [f"{LIMIT}={limit}: the methods get at most {limit} tokens of an image" for limit in limits]
    shown_notes = (note for note in notes if note.startswith((draw.CROPS, LIMIT)))
    caption = subject.name, f"Q: {question}", *shown_notes
    return Shown(caption, panels, shown, before, tokens, tuple(notes), cropped)


def plot(
    model: Any,
    processor: Any,
    images: Any,
    question: str,
    methods: str | Sequence[str] = DEFAULT_METHOD,
    *,
    keep: float | int = 0.25,
    scores: bool = False,
) -> Figure:
    """Return a matplotlib figure of the tokens that methods keep, with their answers.

    Args:
        model: The model, unpatched. It is left unpatched.
        processor: Its processor.
        images: A PIL image, or a list of images or video frames.
        question: The question.
        methods: Names, options and stacks as on the command line, for example "divprune,fastv:layer=3".
        keep: Keep of each method.
        scores: Also draw maps of scores, for methods that rank tokens.

    Raises:
        OptionError: If a method cannot be drawn.
        UnsupportedSetupError: If the tokens of an image do not form a grid.
        TokenPruneError: If matplotlib is not installed. The errors of `patch` are raised too.

    Examples:
        >>> figure = tokenprune.plot(model, processor, image, "what is shown?", "divprune", keep=0.25)
        >>> len(figure.axes)
        2
    """
    from tokenprune.api import is_patched
    from tokenprune.errors import AlreadyPatchedError

    try:
        import matplotlib.pyplot  # noqa: F401  (notebooks need it to display figures)
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TokenPruneError("Figures need matplotlib: pip install tokenprune-bench") from error
    if is_patched(model):
        raise AlreadyPatchedError("plot needs an unpatched model. Call tokenprune.unpatch(model) first.")
    frames = list(images) if isinstance(images, (list, tuple)) else [images]
    specs = split_methods(methods) if isinstance(methods, str) else tuple(methods)
    settings = [Setting.from_text(spec, keep).validate() for spec in specs]
    name = getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
    subject = Model(model, processor, name, max_new_tokens=16)
    shown = show(subject, frames, question, settings, scores)
    across, lines = shown.across, shown.lines(shown.across)
    down = len(lines)
    ratio = shown.panels[0].image.height / shown.panels[0].image.width
    width = 4.0 * across if across > 1 else 8.0
    figure = Figure(figsize=(width, down * (width / across * ratio + 0.9) + 0.6), layout="constrained")
    figure.suptitle("\n".join(shown.caption), fontsize=10)
    for row, column, panel in (
        (row, column, panel) for row, line in enumerate(lines) for column, panel in enumerate(line)
    ):
        if panel is None:
            continue
        axes = figure.add_subplot(down, across, row * across + column + 1)
        axes.imshow(panel.image)
        axes.set_axis_off()
        axes.set_title("\n".join((panel.title, *(textwrap.shorten(line, 80) for line in panel.lines))), fontsize=8)
    return figure


def _describe_view(view: PromptView, tokens: int) -> tuple[str, ...]:
    average = f", {view.stats.visual_tokens_average:.0f} on average over the layers" if view.stats else ""
    return f"{tokens} to {int(view.kept.sum())} visual tokens{average}", _format_answer(view.answer)


def _compute_size(frame: Image.Image, grid: tuple[int, int], single: bool, several: bool) -> tuple[int, int]:
    """Return the size of a drawing: the image's size within limits, with a minimum size per patch."""
    longest = max(frame.size)
    largest = LARGEST if single and not several else LARGEST // 2 if single else LARGEST // 6
    target = min(max(longest, SMALLEST if single else 0), largest)
    scale = max(target, 8 * max(grid)) / longest
    return max(1, round(frame.width * scale)), max(1, round(frame.height * scale))


def _format_answer(answer: str) -> str:
    return f"answer: {answer.strip() or '(nothing)'}"


def _build_panel(
    image: Image.Image, title: str, lines: tuple[str, ...], frames: Sequence[Image.Image], draw_at: _At, **more: bool
) -> Panel:
    """Return a panel that can be drawn at any width. `draw_at` draws the frames at given sizes."""

    def wide(width: int) -> list[Image.Image]:
        return draw_at([(width, max(1, round(width * frame.height / frame.width))) for frame in frames])

    ratio = max(frame.height / frame.width for frame in frames)
    return Panel(image, title, lines, frames=len(frames), ratio=ratio, draw=wide, **more)


def _make_plain_drawer(frames: Sequence[Image.Image]) -> _At:
    """Return a function that resizes frames."""
    return lambda sizes: [
        frame.resize(size, Image.Resampling.LANCZOS) for frame, size in zip(frames, sizes, strict=True)
    ]


def _make_kept_drawer(view: PromptView) -> _At:
    """Return a function that draws the kept tokens of each frame."""
    return lambda sizes: view.drawings(0, sizes)


def _make_heat_drawer(view: PromptView) -> _At:
    """Return a function that draws the scores of each frame."""
    scores = view.split(view.scores) if view.scores is not None else []
    return lambda sizes: [draw.heat(*arguments) for arguments in zip(view.frames, scores, sizes, strict=True)]


def _strip(frames: Sequence[Image.Image]) -> Image.Image:
    """Return frames side by side, at most eight per line."""
    return layout.strip(frames, 8)


__all__ = ["Panel", "Shown", "plot", "show"]
