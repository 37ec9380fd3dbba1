# SPDX-License-Identifier: Apache-2.0
"""Drawn pages, screens and charts at native size, with questions about texts and marks.

As in real documents, much of the image is plain, edges are straight, without blur or compression. Greeked text,
windows, rows, bars and axes are drawn first. Then one word on a plate, one digit, one coloured shape and one tiny shape
are drawn on top, so that every question has one answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageDraw

from tokenprune_demo.drawn_videos import DrawnQuestion
from tokenprune_demo.scenes import COLORS, TINY, WORDS, Box, _draw_shape_masks, _load_font

LAYOUTS = ("page", "screen", "chart")
DOCUMENT_KINDS = ("word", "digits", "colour", "small")
TEXT_KINDS = ("word", "digits")
_SHAPES = ("circle", "triangle", "star", "ring")  # no squares: bars and windows look like squares
_TEXTS = {
    "word": "what does the sign say?",
    "digits": "which digit is written?",
    "colour": "what color is the {}?",
    "small": "what color is the tiny {}?",
}
Colour = tuple[int, int, int]


@dataclass
class DrawnDocument:
    """A drawn document.

    Attributes:
        image: The image.
        layout: One of `LAYOUTS`.
        questions: One question of each of `DOCUMENT_KINDS`.
    """

    image: Image.Image
    layout: str
    questions: list[DrawnQuestion] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[DrawnQuestion]:
        return [question for question in self.questions if question.kind == kind]


def get_document_answers() -> dict[str, tuple[str, ...]]:
    """Return the possible answers of each kind of question. All answers of a kind are equally likely."""
    digits = tuple(str(digit) for digit in range(10))
    return {"word": WORDS, "digits": digits, "colour": tuple(COLORS), "small": tuple(COLORS)}


def draw_document(
    rng: np.random.Generator, layout: str, size: tuple[int, int], answers: Mapping[str, str] | None = None
) -> DrawnDocument:
    """Draw one document.

    Args:
        rng: Random generator.
        layout: One of `LAYOUTS`.
        size: (width, height) in pixels, at least 160 each.
        answers: Answers by kind. Other answers are drawn uniformly.

    Raises:
        ValueError: If the layout or the size is not valid.

    Examples:
        >>> document = draw_document(np.random.default_rng(0), "chart", (320, 320))
        >>> [question.kind for question in document.questions]
        ['word', 'digits', 'colour', 'small']
    """
    if layout not in LAYOUTS or min(size) < 160:
        raise ValueError(f"layout={layout!r}, size={size} is not valid. Use {', '.join(LAYOUTS)}, at least 160 pixels.")
    requested = {kind: str(rng.choice(options)) for kind, options in get_document_answers().items()}
    requested |= answers or {}
    image = {"page": _draw_page, "screen": _draw_screen, "chart": _draw_chart}[layout](rng, *size)
    document, taken = DrawnDocument(image, layout), []
    shape, tiny = str(rng.choice(_SHAPES)), str(rng.choice(TINY))

    def ask(kind: str, box: Box, *words: str) -> None:
        document.questions.append(DrawnQuestion(kind, _TEXTS[kind].format(*words), requested[kind], (((0, box),),)))

    ask("word", _write(rng, image, requested["word"], int(rng.integers(20, 27)), taken))
    ask("digits", _write(rng, image, requested["digits"], int(rng.integers(20, 27)), taken))
    ask("colour", _mark(rng, image, shape, requested["colour"], int(rng.integers(16, 24)), taken), shape)
    ask("small", _mark(rng, image, tiny, requested["small"], int(rng.integers(8, 11)), taken), tiny)
    return document


def _draw_page(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Draw a sheet of paper with a heading, paragraphs of greeked text, and a ruled table."""
    paper = tuple(int(v) for v in 255 - rng.integers(0, 12, 3))
    image = Image.new("RGB", (width, height), paper)
    pen, ink, left = ImageDraw.Draw(image), _sample_grey(rng, 40, 90), int(rng.integers(14, 30))
    pen.rectangle((left, left, left + int(width * rng.uniform(0.3, 0.6)), left + 7), fill=ink)
    pen.line((left, left + 16, width - left, left + 16), fill=ink)
    y = left + 28
    for _ in range(int(rng.integers(2, 6))):
        lines = int(rng.integers(4, 9))
        if y + 9 * lines > height - left:
            break
        for _ in range(lines):
            _draw_text_line(rng, pen, left, y, width - left, ink)
            y += 9
        y += int(rng.integers(12, 30))
    rows, row = int(rng.integers(2, 5)), int(rng.integers(16, 28))
    top = height - left - rows * row
    if top > y:
        for line in range(rows + 1):
            pen.line((left, top + line * row, width - left, top + line * row), fill=ink)
        for column in np.linspace(left, width - left, int(rng.integers(3, 5))).astype(int).tolist():
            pen.line((column, top, column, top + rows * row), fill=ink)
    return image


def _draw_screen(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Draw a desktop with a bar, a side list and one or two windows with buttons, in a dark or light theme."""
    dark = bool(rng.random() < 0.5)
    ground, panel = (
        (_sample_grey(rng, 20, 50), _sample_grey(rng, 55, 80))
        if dark
        else (_sample_grey(rng, 215, 235), _sample_grey(rng, 240, 255))
    )
    ink = _sample_grey(rng, 150, 200) if dark else _sample_grey(rng, 70, 120)
    accent = tuple(int(v) for v in rng.integers(40, 180, 3))
    image = Image.new("RGB", (width, height), ground)
    pen, bar, side = ImageDraw.Draw(image), int(rng.integers(14, 24)), int(width * rng.uniform(0.15, 0.25))
    pen.rectangle((0, 0, width, bar), fill=accent)
    pen.rectangle((0, bar, side, height), fill=panel)
    for y in range(bar + 12, height - 12, int(rng.integers(16, 26))):
        pen.rectangle((8, y, 8 + int((side - 16) * rng.uniform(0.4, 1)), y + 4), fill=ink)
    for _ in range(int(rng.integers(1, 3))):
        w, h = (int(room * rng.uniform(0.4, 0.6)) for room in (width - side, height - bar))
        x, y = int(rng.integers(side + 4, width - w - 3)), int(rng.integers(bar + 4, height - h - 3))
        pen.rectangle((x, y, x + w, y + h), fill=panel, outline=ink)
        pen.rectangle((x, y, x + w, y + 12), fill=accent)
        for button in range(int(rng.integers(1, 3))):
            right = x + w - 8 - 46 * button
            pen.rounded_rectangle((right - 38, y + h - 22, right, y + h - 8), 4, fill=accent)
    return image


def _draw_chart(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Draw axes with rules and bars in grey, on plain paper."""
    image = Image.new("RGB", (width, height), _sample_grey(rng, 242, 256))
    pen, ink, rule = ImageDraw.Draw(image), _sample_grey(rng, 20, 70), _sample_grey(rng, 190, 220)
    left, top, right, bottom = int(width * 0.12), int(height * 0.1), width - 12, height - int(rng.integers(24, 40))
    for y in np.linspace(bottom, top, int(rng.integers(4, 7))).astype(int).tolist():
        pen.line((left, y, right, y), fill=rule)
        pen.rectangle((left - 20, y - 2, left - 6, y + 2), fill=ink)
    count = int(rng.integers(3, 8))
    step = (right - left) / count
    for bar in range(count):
        x, high = left + step * (bar + 0.2), (bottom - top) * rng.uniform(0.1, 0.8)
        pen.rectangle((int(x), int(bottom - high), int(x + 0.6 * step), bottom), fill=_sample_grey(rng, 80, 170))
    pen.line((left, top, left, bottom, right, bottom), fill=ink, width=2)
    return image


def _sample_grey(rng: np.random.Generator, low: int, high: int) -> Colour:
    return (int(rng.integers(low, high)),) * 3


def _draw_text_line(rng: np.random.Generator, pen: ImageDraw.ImageDraw, x: int, y: int, end: int, ink: Colour) -> None:
    """Draw a line of unreadable words."""
    while (after := x + int(rng.integers(6, 26))) < end:
        pen.rectangle((x, y, after, y + 3), fill=ink)
        x = after + 4


def _reserve_box(rng: np.random.Generator, image: Image.Image, size: tuple[int, int], taken: list[Box]) -> Box:
    """Return a free box of this size and mark it as taken."""
    for _ in range(1000):
        x, y = (int(rng.integers(4, room - side - 3)) for room, side in zip(image.size, size, strict=True))
        box = x, y, x + size[0], y + size[1]
        clear = (box[2] + 6 < a or c + 6 < x or box[3] + 6 < b or d + 6 < y for a, b, c, d in taken)
        if all(clear):
            taken.append(box)
            return box
    raise AssertionError(f"no room for {size} in {image.size}")


def _write(rng: np.random.Generator, image: Image.Image, text: str, size: int, taken: list[Box]) -> Box:
    """Write a text on a plate and return its box."""
    font, pad = _load_font(size), 4
    left, top, right, bottom = (int(side) for side in font.getbbox(text))
    box = _reserve_box(rng, image, (right - left + 2 * pad, bottom - top + 2 * pad), taken)
    dark, light = _sample_grey(rng, 0, 50), _sample_grey(rng, 225, 256)
    front, back = (dark, light) if rng.random() < 0.5 else (light, dark)
    pen = ImageDraw.Draw(image)
    pen.rectangle((box[0], box[1], box[2] - 1, box[3] - 1), fill=back, outline=front)
    pen.text((box[0] + pad - left, box[1] + pad - top), text, fill=front, font=font)
    return box


def _mark(rng: np.random.Generator, image: Image.Image, what: str, color: str, radius: int, taken: list[Box]) -> Box:
    """Draw a shape with an outline and return its box."""
    outline, inside = _draw_shape_masks(what, radius, 1.5 if radius > 10 else 0.75)
    box = _reserve_box(rng, image, outline.size, taken)
    light = np.asarray(image.crop(box).convert("L")).mean() > 105
    image.paste((15, 15, 15) if light else (245, 245, 245), box[:2], outline)
    image.paste(COLORS[color], box[:2], inside)
    return box
