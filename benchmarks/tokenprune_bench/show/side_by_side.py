# SPDX-License-Identifier: Apache-2.0
"""Several methods side by side on one prompt, each with its answer below: an image to show around, and a figure."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from PIL import Image

from tokenprune.errors import OptionError, TokenPruneError
from tokenprune.methods import DEFAULT_METHOD
from tokenprune.settings import Setting
from tokenprune.settings.one_line import split_methods
from tokenprune_bench.profiling.kept_tokens import format_keep
from tokenprune_bench.profiling.model import Model
from tokenprune_bench.show import contact_sheet, draw, layout
from tokenprune_bench.show.contact_sheet import PromptView
from tokenprune_bench.show.layout import Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LARGEST, SMALLEST = 1280, 384  # pixels of a drawing's longer side, at most and at least
_At = Callable[[Sequence[tuple[int, int]]], list[Image.Image]]


@dataclass(frozen=True)
class Shown:
    """The output of `tokenprune show`. caption: model and question. panels: unpatched first, then the kept tokens of
    each method, and its scores if they were asked for. seen: the view of each method. tokens: visual tokens before.
    cropped: the image with a box around what the model sees of it, where its processor crops."""

    caption: tuple[str, ...]
    panels: list[Panel]
    seen: list[PromptView]
    before: str
    tokens: int
    notes: tuple[str, ...] = ()
    cropped: Image.Image | None = None

    @property
    def kept_panels(self) -> list[Panel]:
        """Of each method the panel of what it keeps."""
        return [panel for panel in self.panels[1:] if not panel.scores]

    @property
    def across(self) -> int:
        """Return the number of drawings side by side: one for several frames, or for a wide image cut into rows."""
        if max(panel.frames for panel in self.panels) > 1 or self.panels[0].rows(layout.WIDTH) > 1:
            return 1
        maps = any(panel.scores for panel in self.panels)  # each stands under the drawing of its method
        return layout.columns(len(self.columns), self.panels[0].shape * (1 + maps))

    @property
    def columns(self) -> list[list[Panel]]:
        """Each drawing, with the map of scores that stands under it."""
        columns: list[list[Panel]] = []
        for panel in self.panels:
            if panel.scores:
                columns[-1].append(panel)
            else:
                columns.append([panel])
        return columns

    def lines(self, across: int) -> list[list[Panel | None]]:
        """Return the panels line by line, a map of scores under the drawing of its own method; None: an empty place."""
        lines: list[list[Panel | None]] = []
        for start in range(0, len(self.columns), across):
            part = self.columns[start : start + across]
            lines.append([column[0] for column in part])
            if any(column[1:] for column in part):
                lines.append([column[1] if column[1:] else None for column in part])
        return lines

    def image(self, width: int = layout.WIDTH, least: int = 0) -> Image.Image:
        """Return all panels with their text as one image, `width` pixels wide; narrower where images are tall. least:
        pixels of a caption, at least."""
        return layout.sheet(self.caption, self.lines(self.across), width, self.cropped, least)

    def of_settings(self, start: int, stop: int) -> Shown:
        """Return what is shown of these settings alone."""
        panels = [panel for column in self.columns[1 + start : 1 + stop] for panel in column]
        return replace(self, panels=[self.panels[0], *panels], seen=self.seen[start:stop])

    def of_frame(self, number: int) -> Shown:
        """Return what is shown of one frame of a video, as the model has it."""
        most = max(panel.frames for panel in self.panels)
        panels = [panel.of_frame(number) for panel in self.panels]
        return replace(self, caption=(*self.caption, f"frame {number + 1} of {most}"), panels=panels)

    def pair(self, number: int) -> Image.Image:
        """Return the unpatched panel and what the method `number` keeps, without text: side by side, of several frames
        one below the other."""
        pair = self.panels[0].image, self.kept_panels[number].image
        return contact_sheet.row(pair) if len(self.seen[number].frames) == 1 else layout.column(pair)


def show(
    subject: Model,
    images: Sequence[Image.Image],
    question: str,
    settings: Sequence[Setting | Mapping[str, Any]],
    scores: bool = False,
    step: Callable[[str, int, int], None] = lambda label, done, total: None,
) -> Shown:
    """Ask once unpatched and once with each method, and draw what it keeps.

    images: one, or the frames of a video, or several of one prompt; a model that takes videos gets several as a video,
    unless the method acts on pixels. settings: as `patch(config=...)` takes them, each with one
    keep for all of its methods. scores: draw a map of them,
    too, of methods that rank tokens by a score. step: called with a label, how many were asked, and of how many.
    Raises UnsupportedSetupError where the tokens of an image form no grid, OptionError for a method that chooses
    between images.
    """
    if not settings:
        raise OptionError("name at least one method to show")
    asked = [Setting.from_json(one) for one in settings]
    for setting in asked:
        draw.check_drawable(setting)
    videos = [len(images) > 1 and contact_sheet.as_video(subject, one) for one in asked]
    step("unpatched", 0, 1 + len(asked))
    full = contact_sheet.asked(subject, images, question, any(videos))
    (before,) = subject.generate(full)
    tokens = subject.visual_tokens(full)
    single, several = len(images) == 1, len(asked) > 1 or scores
    views = [image.convert("RGB") for image in images]
    notes: list[str] = []
    cropped = None
    if not any(videos):
        boxes = [draw.seen_box(subject, image) for image in views]
        notes += list(dict.fromkeys(filter(None, map(draw.cropped_away, views, boxes))))
        pairs = zip(views, boxes, strict=True)
        cropped = next((draw.boxed(image, box) for image, box in pairs if box and draw.cropped_away(image, box)), None)
        views = [image.crop(box) if box else image for image, box in zip(views, boxes, strict=True)]
    panels: list[Panel] = []
    shown: list[PromptView] = []
    for place, (setting, video) in enumerate(zip(asked, videos, strict=True)):
        name = setting.to_text()
        step(name, 1 + place, 1 + len(asked))
        seen = contact_sheet.seen_under(subject, images, question, setting, video)
        if not video:  # frames at their own resolution; of a video the model may have merged some in time
            seen = PromptView(views, seen.grids, seen.kept, seen.groups, seen.answer, seen.stats, seen.scores)
        shown.append(seen)
        sizes = [_size(frame, grid, single, several) for frame, grid in zip(seen.frames, seen.grids, strict=True)]
        if not panels:
            whole = [frame.resize(size) for frame, size in zip(seen.frames, sizes, strict=True)]
            about = f"{tokens} visual tokens", _said(before)
            panels.append(_panel(_strip(whole), "unpatched", about, seen.frames, _plain(seen.frames)))
        said = format_keep(setting.keep, len(setting.names), int(seen.kept.sum()) / max(1, tokens))
        image, title = _strip(seen.drawings(0, sizes)), f"{name}, keep {said}"
        panels.append(_panel(image, title, _about(seen, tokens), seen.frames, _kept(seen)))
        if scores and seen.scores is None:
            notes.append(f"{name} ranks no tokens by a score: there is no map of it")
        elif scores and seen.scores is not None:
            heated, scale = _heat(seen), ("ranks, from dark (low) to yellow (high)",)
            panels.append(_panel(_strip(heated(sizes)), f"{name}: scores", scale, seen.frames, heated, scores=True))
    caption = subject.name, f"Q: {question}", *(note for note in notes if note.startswith(draw.CROPS))
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
    """Return a matplotlib figure of what methods keep of an image, or of a video's frames, with their answers.

    model, processor: as `patch` takes them; the model is left as it was, unpatched. images: a PIL image, or a list: the
    frames of a video, or several images. methods: names, options and stacks as on the command line,
    "divprune,fastv:layer=3". keep: of each method. scores: also draw maps of scores, of methods that rank tokens by
    one.

    Raises OptionError for a method that cannot be drawn, UnsupportedSetupError where the tokens of an image form no
    grid, TokenPruneError where matplotlib is not installed, and what `patch` raises.
    """
    from tokenprune.api import is_patched
    from tokenprune.errors import AlreadyPatchedError

    try:
        import matplotlib.pyplot  # noqa: F401  (with it notebooks know how to show a figure)
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TokenPruneError("figures need matplotlib: pip install tokenprune-bench") from error
    if is_patched(model):
        raise AlreadyPatchedError("plot asks with and without methods: call tokenprune.unpatch(model) first")
    given = list(images) if isinstance(images, (list, tuple)) else [images]
    specs = split_methods(methods) if isinstance(methods, str) else tuple(methods)
    settings = [Setting.from_text(one, keep).validate() for one in specs]
    name = getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
    subject = Model(model, processor, name, max_new_tokens=16)
    found = show(subject, given, question, settings, scores)
    across, lines = found.across, found.lines(found.across)
    down = len(lines)
    ratio = found.panels[0].image.height / found.panels[0].image.width
    width = 4.0 * across if across > 1 else 8.0
    figure = Figure(figsize=(width, down * (width / across * ratio + 0.9) + 0.6), layout="constrained")
    figure.suptitle("\n".join(found.caption), fontsize=10)
    for row, column, panel in ((row, column, one) for row, line in enumerate(lines) for column, one in enumerate(line)):
        if panel is None:
            continue
        axes = figure.add_subplot(down, across, row * across + column + 1)
        axes.imshow(panel.image)
        axes.set_axis_off()
        axes.set_title("\n".join((panel.title, *(textwrap.shorten(line, 80) for line in panel.lines))), fontsize=8)
    return figure


def _about(seen: PromptView, tokens: int) -> tuple[str, ...]:
    average = f", {seen.stats.visual_tokens_average:.0f} on average over the layers" if seen.stats else ""
    return f"{tokens} to {int(seen.kept.sum())} visual tokens{average}", _said(seen.answer)


def _size(frame: Image.Image, grid: tuple[int, int], single: bool, several: bool) -> tuple[int, int]:
    """Return the size of a drawing: the image's own, within limits, and some pixels for every patch."""
    longest = max(frame.size)
    largest = LARGEST if single and not several else LARGEST // 2 if single else LARGEST // 6
    wanted = min(max(longest, SMALLEST if single else 0), largest)
    scale = max(wanted, 8 * max(grid)) / longest
    return max(1, round(frame.width * scale)), max(1, round(frame.height * scale))


def _said(answer: str) -> str:
    return f"answer: {answer.strip() or '(nothing)'}"


def _panel(
    image: Image.Image, title: str, lines: tuple[str, ...], frames: Sequence[Image.Image], draw_at: _At, **more: bool
) -> Panel:
    """Return a panel whose frames can be drawn at any width. draw_at: returns them at given sizes."""

    def wide(width: int) -> list[Image.Image]:
        return draw_at([(width, max(1, round(width * frame.height / frame.width))) for frame in frames])

    ratio = max(frame.height / frame.width for frame in frames)
    return Panel(image, title, lines, frames=len(frames), ratio=ratio, draw=wide, **more)


def _plain(frames: Sequence[Image.Image]) -> _At:
    """Return a function that draws frames as they are."""
    return lambda sizes: [
        frame.resize(size, Image.Resampling.LANCZOS) for frame, size in zip(frames, sizes, strict=True)
    ]


def _kept(seen: PromptView) -> _At:
    """Return a function that draws what is kept of each frame."""
    return lambda sizes: seen.drawings(0, sizes)


def _heat(seen: PromptView) -> _At:
    """Return a function that draws the scores of each frame."""
    scores = seen.split(seen.scores) if seen.scores is not None else []
    return lambda sizes: [draw.heat(*one) for one in zip(seen.frames, scores, sizes, strict=True)]


def _strip(frames: Sequence[Image.Image]) -> Image.Image:
    """Return frames side by side, eight at most in a line."""
    return layout.strip(frames, 8)


__all__ = ["Panel", "Shown", "plot", "show"]
