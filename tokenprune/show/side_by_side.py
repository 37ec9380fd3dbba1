# SPDX-License-Identifier: Apache-2.0
"""Several methods side by side on one prompt, each with its answer below: an image to show around, and a figure."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageDraw, ImageFont

from tokenprune.errors import OptionError, TokenPruneError
from tokenprune.profiling.kept import keep_in_words
from tokenprune.profiling.model import Model
from tokenprune.setting import Setting
from tokenprune.show import contact_sheet, draw
from tokenprune.show.contact_sheet import PromptView
from tokenprune.spelling import split_methods

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LARGEST, SMALLEST = 1280, 384  # pixels of a drawing's longer side, at most and at least
_ACROSS, _GAP, _INK, _PAPER = 3, 24, "#202020", "white"


@dataclass(frozen=True)
class Panel:
    """A drawing, with its title and the lines of text below it. scores: whether it is a map of them."""

    image: Image.Image
    title: str
    lines: tuple[str, ...]
    scores: bool = False


@dataclass(frozen=True)
class Shown:
    """The output of `tokenprune show`. caption: model and question. panels: unpatched first, then the kept tokens of
    each method, and its scores if they were asked for. seen: the view of each method. tokens: visual tokens before."""

    caption: tuple[str, ...]
    panels: list[Panel]
    seen: list[PromptView]
    before: str
    tokens: int
    notes: tuple[str, ...] = ()

    @property
    def kept_panels(self) -> list[Panel]:
        """Of each method the panel of what it keeps."""
        return [panel for panel in self.panels[1:] if not panel.scores]

    @property
    def across(self) -> int:
        """Return the number of drawings side by side; those of several frames stand one below the other."""
        return 1 if max(len(one.frames) for one in self.seen) > 1 else min(_ACROSS, 1 + len(self.seen))

    def lines(self, across: int) -> list[list[Panel | None]]:
        """Return the panels line by line, a map of scores under the drawing of its own method; None: an empty place."""
        columns: list[list[Panel | None]] = []
        for panel in self.panels:
            if panel.scores:
                columns[-1][1] = panel
            else:
                columns.append([panel, None])
        lines = []
        for start in range(0, len(columns), across):
            drawings, maps = map(list, zip(*columns[start : start + across], strict=True))
            lines += [drawings, maps] if any(maps) else [drawings]
        return lines

    def image(self) -> Image.Image:
        """Return all panels with their text as one image."""
        across = self.across
        width = max(panel.image.width for panel in self.panels)
        size = max(15, min(26, width // 26))
        blank = Image.new("RGB", (width, 1), _PAPER)
        lines = [
            [blank if panel is None else _written(panel, width, size) for panel in line] for line in self.lines(across)
        ]
        head = _text(self.caption, across * (width + _GAP) - _GAP, size)
        rows = [contact_sheet.row(line, _GAP) for line in lines]
        height = sum(one.height + _GAP for one in rows)
        whole = Image.new("RGB", (head.width + 2 * _GAP, head.height + 2 * _GAP + height), _PAPER)
        whole.paste(head, (_GAP, _GAP))
        top = head.height + 2 * _GAP
        for one in rows:
            whole.paste(one, (_GAP, top))
            top += one.height + _GAP
        return whole

    def pair(self, number: int) -> Image.Image:
        """Return the unpatched panel and what the method `number` keeps, without text: side by side, of several frames
        one below the other."""
        pair = self.panels[0].image, self.kept_panels[number].image
        return contact_sheet.row(pair) if len(self.seen[number].frames) == 1 else _column(pair)


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
    asked = [Setting.of(one) for one in settings]
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
    if not any(videos):
        boxes = [draw.seen_box(subject, image) for image in views]
        notes += list(dict.fromkeys(filter(None, map(draw.cropped_away, views, boxes))))
        views = [image.crop(box) if box else image for image, box in zip(views, boxes, strict=True)]
    panels: list[Panel] = []
    shown: list[PromptView] = []
    for place, (setting, video) in enumerate(zip(asked, videos, strict=True)):
        name = setting.spec
        step(name, 1 + place, 1 + len(asked))
        seen = contact_sheet.seen_under(subject, images, question, setting, video)
        if not video:  # frames at their own resolution; of a video the model may have merged some in time
            seen = PromptView(views, seen.grids, seen.kept, seen.groups, seen.answer, seen.stats, seen.scores)
        shown.append(seen)
        sizes = [_size(frame, grid, single, several) for frame, grid in zip(seen.frames, seen.grids, strict=True)]
        if not panels:
            whole = [frame.resize(size) for frame, size in zip(seen.frames, sizes, strict=True)]
            panels.append(Panel(_strip(whole), "unpatched", (f"{tokens} visual tokens", f"answer: {before}")))
        said = keep_in_words(setting.keep, len(setting.names), int(seen.kept.sum()) / max(1, tokens))
        panels.append(Panel(_strip(seen.drawings(0, sizes)), f"{name}, keep {said}", _about(seen, tokens)))
        if scores and seen.scores is None:
            notes.append(f"{name} ranks no tokens by a score: there is no map of it")
        elif scores and seen.scores is not None:
            maps = zip(seen.frames, seen.split(seen.scores), sizes, strict=True)
            heated = [draw.heat(frame, own, size) for frame, own, size in maps]
            panels.append(Panel(_strip(heated), f"{name}: scores", ("ranks, from dark (low) to yellow (high)",), True))
    caption = subject.name, f"Q: {question}", *(note for note in notes if note.startswith(draw.CROPS))
    return Shown(caption, panels, shown, before, tokens, tuple(notes))


def plot(
    model: Any,
    processor: Any,
    images: Any,
    question: str,
    methods: str | Sequence[str] = "dart",
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
        raise TokenPruneError("figures need matplotlib: pip install 'tokenprune-vlm[plot]'") from error
    if is_patched(model):
        raise AlreadyPatchedError("plot asks with and without methods: call tokenprune.unpatch(model) first")
    given = list(images) if isinstance(images, (list, tuple)) else [images]
    specs = split_methods(methods) if isinstance(methods, str) else tuple(methods)
    settings = [Setting.from_spec(one, keep).checked() for one in specs]
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
    return f"{tokens} to {int(seen.kept.sum())} visual tokens{average}", f"answer: {seen.answer}"


def _size(frame: Image.Image, grid: tuple[int, int], single: bool, several: bool) -> tuple[int, int]:
    """Return the size of a drawing: the image's own, within limits, and some pixels for every patch."""
    longest = max(frame.size)
    largest = LARGEST if single and not several else LARGEST // 2 if single else LARGEST // 6
    wanted = min(max(longest, SMALLEST if single else 0), largest)
    scale = max(wanted, 8 * max(grid)) / longest
    return max(1, round(frame.width * scale)), max(1, round(frame.height * scale))


def _strip(frames: Sequence[Image.Image]) -> Image.Image:
    """Return frames side by side, eight at most in a line."""
    return _column([contact_sheet.row(frames[start : start + 8]) for start in range(0, len(frames), 8)])


def _column(rows: Sequence[Image.Image]) -> Image.Image:
    """Return images one below the other."""
    if len(rows) == 1:
        return rows[0]
    size = max(row.width for row in rows), sum(row.height + 6 for row in rows) - 6
    image, top = Image.new("RGB", size, _PAPER), 0
    for row in rows:
        image.paste(row, (0, top))
        top += row.height + 6
    return image


def _written(panel: Panel, width: int, size: int) -> Image.Image:
    """Return a panel with its text below, `width` wide."""
    text = _text((panel.title, *panel.lines), width, size)
    whole = Image.new("RGB", (width, panel.image.height + size // 3 + text.height), _PAPER)
    whole.paste(panel.image, (0, 0))
    whole.paste(text, (0, panel.image.height + size // 3))
    return whole


def _text(lines: Sequence[str], width: int, size: int) -> Image.Image:
    """Return lines of text on paper, broken where they are too long."""
    font = ImageFont.load_default(size)
    broken = [part for line in lines for part in textwrap.wrap(line, max(12, int(width / (0.52 * size)))) or [""]]
    image = Image.new("RGB", (width, int(1.35 * size * len(broken)) + 4), _PAPER)
    pen = ImageDraw.Draw(image)
    for place, part in enumerate(broken):
        pen.text((0, int(1.35 * size * place)), part, fill=_INK, font=font)
    return image


__all__ = ["Panel", "Shown", "plot", "show"]
