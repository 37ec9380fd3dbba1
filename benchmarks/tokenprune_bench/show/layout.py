# SPDX-License-Identifier: Apache-2.0
"""A sheet of drawings with captions, sized for chats and phones."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from PIL import Image, ImageDraw, ImageFont, ImageOps

from tokenprune_bench.show import contact_sheet

WIDTH, ANIMATED = 1440, 960  # width of a sheet and of an animation, in pixels
GAP, FRAME_GAP = 24, 6  # between drawings, and between frames of one drawing
PAPER, INK, PALE, EDGE = "white", "#202020", "#505050", "#909090"
TALLEST = 1500  # maximum height of a drawing, in pixels
_ROW = 64  # minimum height of a row of a wide image, in pixels
_PHONE, _LEAST = 800, 13  # width of a sheet on a phone, and the minimum readable font size
_RATIO = 0.9  # preferred height of a sheet divided by its width
_ACROSS, _FRAMES = 4, 8  # maximum drawings and frames per line
_NARROW = 340  # minimum width of a caption, in pixels
_MOST_LINES = 5  # maximum lines of an answer


@dataclass(frozen=True)
class Panel:
    """A drawing with a title and lines of text.

    Attributes:
        image: The drawing.
        title: Title of the caption.
        lines: Further lines of the caption.
        scores: Whether the drawing is a map of scores.
        frames: Number of frames.
        ratio: Height of a frame divided by its width.
        draw: Returns the frames at a given width. None: scale `image`.
    """

    image: Image.Image
    title: str
    lines: tuple[str, ...]
    scores: bool = False
    frames: int = 1
    ratio: float | None = None
    draw: Callable[[int], list[Image.Image]] | None = None

    @property
    def shape(self) -> float:
        """Height of a frame divided by its width."""
        return self.image.height / self.image.width if self.ratio is None else self.ratio

    def drawn(self, width: int) -> list[Image.Image]:
        """Return the frames, each `width` pixels wide."""
        if self.draw is not None:
            return self.draw(width)
        return [self.image.resize((width, max(1, round(width * self.shape))), Image.Resampling.LANCZOS)]

    def rows(self, width: int) -> int:
        """Return the number of rows into which a wide image is cut, so that each row is high enough to see."""
        return 1 if self.frames > 1 else _count_rows(width * self.shape)

    def wrapped(self, width: int, per_line: int) -> Image.Image:
        """Return the frames as one image. Wide images are cut into rows.

        Args:
            width: Width of a frame in pixels.
            per_line: Frames per line.
        """
        if (rows := self.rows(width)) == 1:
            return strip(self.drawn(width), per_line)
        (image,) = self.drawn(width * rows)
        return column([image.crop((row * width, 0, (row + 1) * width, image.height)) for row in range(rows)])

    def select_frame(self, index: int) -> Panel:
        """Return the panel with only one frame."""
        return replace(self, frames=1, draw=lambda width: [self.drawn(width)[min(index, self.frames - 1)]])


def find_largest(size: tuple[int, int]) -> tuple[int, int]:
    """Return the (width, height) of the largest drawing of an image on a sheet.

    Args:
        size: Width and height of the image.
    """
    width, height = size
    columns = WIDTH * _count_rows(WIDTH * height / width)
    scale = min(1.0, columns / width, TALLEST / height)
    return max(1, round(scale * width)), max(1, round(scale * height))


def _count_rows(height: float) -> int:
    """Return the number of rows into which a drawing of this height is cut."""
    return 1 if height >= _ROW else max(1, min(math.ceil(_ROW / height), math.isqrt(int(TALLEST / height))))


def columns(count: int, ratio: float, width: int = WIDTH, max_columns: int = _ACROSS) -> int:
    """Return the number of drawings per line that makes the sheet about square with few empty cells.

    Args:
        number: Number of drawings.
        ratio: Height of a drawing divided by its width.
        width: Width of the sheet in pixels.
        most: Maximum number per line.
    """

    def cost(across: int) -> float:
        down = math.ceil(count / across)
        high = down * ((width / across - GAP) * ratio + 6 * letters(width))
        return abs(math.log(high / width / _RATIO)) + 1.5 * (across * down - count) / across

    return min(range(1, min(count, max_columns) + 1), key=cost)


def letters(width: int) -> int:
    """Return the font size of a sheet. Wide sheets need larger letters, because phones scale them down."""
    return math.ceil(_LEAST * max(1.0, width / _PHONE))


def sheet(
    head: Sequence[str],
    rows: Sequence[Sequence[Panel | None]],
    width: int = WIDTH,
    beside: Image.Image | None = None,
    least: int = 0,
) -> Image.Image:
    """Return rows of panels with captions below a heading.

    Args:
        head: Lines of the heading.
        rows: Rows of panels. None: an empty cell.
        width: Width of the sheet in pixels.
        beside: Image on the right of the heading.
        least: Minimum height of a caption in pixels.
    """
    across, size = max(map(len, rows)), letters(width)
    cell, frame, per_line = _compute_layout(rows, width)
    parts = []
    for line in rows:
        images = [None if panel is None else panel.wrapped(frame, per_line) for panel in line]
        texts = [None if panel is None else caption(panel, cell, size) for panel in line]
        tall = max(image.height for image in images if image)
        deep = max(least, *(text.height for text in texts if text))
        part = Image.new("RGB", (across * (cell + GAP) - GAP, tall + size // 3 + deep), PAPER)
        for index, (image, text) in enumerate(zip(images, texts, strict=True)):
            if image and text:
                part.paste(image, (index * (cell + GAP), 0))
                if per_line == 1:  # an edge separates a white image from the background
                    edge = index * (cell + GAP), 0, index * (cell + GAP) + image.width - 1, image.height - 1
                    ImageDraw.Draw(part).rectangle(edge, outline=EDGE)
                part.paste(text, (index * (cell + GAP), tall + size // 3))
        parts.append(part)
    image = column([_draw_head(head, parts[0].width, size, beside), *parts], GAP)
    return ImageOps.expand(image, GAP, PAPER)


def get_caption_height(rows: Sequence[Sequence[Panel | None]], width: int = WIDTH) -> int:
    """Return the height of the highest caption of a sheet."""
    cell, _, _ = _compute_layout(rows, width)
    return max(caption(panel, cell, letters(width)).height for line in rows for panel in line if panel is not None)


def _compute_layout(rows: Sequence[Sequence[Panel | None]], width: int) -> tuple[int, int, int]:
    """Return the width of a panel, the width of a frame, and the number of frames per line."""
    panels = [panel for line in rows for panel in line if panel is not None]
    across = max(map(len, rows))
    cell = (width - 2 * GAP - (across - 1) * GAP) // across
    per_line = _choose_frames_per_line(panels, cell)
    frame = (cell - (per_line - 1) * FRAME_GAP) // per_line
    frame = max(1, min(frame, round(TALLEST / max(panel.shape for panel in panels))))
    if per_line == 1 and frame < cell:  # narrow panels avoid wide margins beside tall images
        cell = max(frame, _NARROW * letters(width) // letters(WIDTH))
    return cell, frame, per_line


def caption(panel: Panel, width: int, size: int) -> Image.Image:
    """Return the caption of a panel, `width` pixels wide."""
    font = ImageFont.load_default(size)
    title = [(part, INK) for part in wrapped(panel.title, font, width)]
    return _draw_text(
        [*title, *((part, PALE) for line in panel.lines for part in wrapped(line, font, width))], width, size
    )


def wrapped(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Wrap a text into few lines of similar length.

    Names of methods may break after a plus, a comma, a colon or an equals sign.
    """
    words = re.findall(r"\s*[^\s+,:=]*[+,:=]*", text.strip())
    pieces = [part for word in words if word for part in _split_word(word, font, width)]
    lines = _fill_lines(pieces, font, width)
    if len(lines) < 2:
        return lines or [""]
    if len(lines) == 2:  # prefer a break after a comma
        halves = [(text[: comma.start() + 1], text[comma.end() :]) for comma in re.finditer(r", ", text)]
        fitting = [pair for pair in halves if max(map(font.getlength, pair)) <= width]
        if fitting:
            return list(min(fitting, key=lambda pair: max(map(font.getlength, pair))))
    low, high = 1, width
    while low < high:  # binary search for the narrowest column with the same number of lines
        middle = (low + high) // 2
        if max(map(font.getlength, pieces)) <= middle and len(_fill_lines(pieces, font, middle)) <= len(lines):
            high = middle
        else:
            low = middle + 1
    lines = _fill_lines(pieces, font, low)
    if len(lines) <= _MOST_LINES:
        return lines
    last = lines[_MOST_LINES - 1]
    while font.getlength(f"{last} ...") > width:
        last = last[:-1]
    return [*lines[: _MOST_LINES - 1], f"{last} ..."]


def _split_word(word: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Split a word that is wider than a line."""
    pieces = [""]
    for letter in word:
        if pieces[-1] and font.getlength((pieces[-1] + letter).strip()) > width:
            pieces.append("")
        pieces[-1] += letter
    return pieces


def _fill_lines(pieces: Sequence[str], font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: float) -> list[str]:
    lines: list[str] = []
    for piece in pieces:
        if lines and font.getlength(lines[-1] + piece) <= width:
            lines[-1] += piece
        else:
            lines.append(piece.lstrip())
    return lines


def _choose_frames_per_line(panels: Sequence[Panel], cell: int) -> int:
    """Return the number of frames per line of a drawing."""
    frames, ratio = max(panel.frames for panel in panels), max(panel.shape for panel in panels)
    if frames <= _ACROSS:
        return frames

    def cost(across: int) -> float:
        down = math.ceil(frames / across)
        high = len(panels) * (down * cell / across * ratio + 5 * letters(cell))
        return abs(math.log(high / cell / _RATIO)) + (across * down - frames) / across

    return min(range(_ACROSS, _FRAMES + 1), key=cost)


def strip(frames: Sequence[Image.Image], per_line: int) -> Image.Image:
    """Return frames side by side, with at most `per_line` per line."""
    lines = [frames[start : start + per_line] for start in range(0, len(frames), per_line)]
    return column([contact_sheet.row(line, FRAME_GAP) if len(line) > 1 else line[0] for line in lines])


def column(rows: Sequence[Image.Image], gap: int = FRAME_GAP) -> Image.Image:
    """Return images below each other."""
    if len(rows) == 1:
        return rows[0]
    size = max(row.width for row in rows), sum(row.height + gap for row in rows) - gap
    image, top = Image.new("RGB", size, PAPER), 0
    for row in rows:
        image.paste(row, (0, top))
        top += row.height + gap
    return image


def _draw_head(lines: Sequence[str], width: int, size: int, beside: Image.Image | None) -> Image.Image:
    """Return the heading of a sheet, with an image on the right."""
    if beside is not None:
        beside = ImageOps.contain(beside, (width // 5, 6 * size))
    text_width = width if beside is None else width - beside.width - GAP
    font = ImageFont.load_default(size)
    text = _draw_text([(part, INK) for line in lines for part in wrapped(line, font, text_width)], text_width, size)
    if beside is None:
        return text
    head = Image.new("RGB", (width, max(text.height, beside.height)), PAPER)
    head.paste(text, (0, 0))
    head.paste(beside, (width - beside.width, 0))
    return head


def _draw_text(lines: Sequence[tuple[str, str]], width: int, size: int) -> Image.Image:
    """Return lines of text with their colors, on a plain background."""
    font, high = ImageFont.load_default(size), int(1.35 * size)
    image = Image.new("RGB", (width, high * len(lines) + 4), PAPER)
    pen = ImageDraw.Draw(image)
    for index, (line, color) in enumerate(lines):
        pen.text((0, high * index), line, fill=color, font=font)
    return image


__all__ = [
    "ANIMATED",
    "WIDTH",
    "Panel",
    "caption",
    "column",
    "columns",
    "get_caption_height",
    "letters",
    "sheet",
    "strip",
    "wrapped",
]
