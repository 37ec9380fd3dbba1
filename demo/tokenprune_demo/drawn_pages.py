# SPDX-License-Identifier: Apache-2.0
"""Drawn prompts of a thousand visual tokens and more: letters, tables, receipts, and spreads of two pages.

A word and a digit are in a line, cell or entry among unreadable text. Other questions ask for the colour of a shape and
of a tiny shape. Each occurs once (in a spread on one of the pages), so that every question has one answer. Paper is
grey and a third of it is filled: demo_qwen, which was not trained on pages, hardly reads white or full pages, and does
not read narrow slips of more than 40 tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageDraw

from tokenprune_demo.drawn_documents import _SHAPES, _TEXTS, Colour, _mark, _sample_grey, get_document_answers
from tokenprune_demo.drawn_videos import DrawnQuestion
from tokenprune_demo.scenes import TINY, Box, _load_font

# (width, height) of a page by layout, in multiples of 16 pixels (one visual token). A prompt has 1,024 to 1,280 tokens.
PAGE_SIZES = {
    "letter": ((512, 512), (544, 512), (512, 544), (576, 512)),
    "table": ((512, 512), (576, 480), (640, 512), (544, 512)),
    "receipt": ((448, 592), (416, 640), (432, 608), (448, 608)),
    "spread": ((384, 352), (352, 384), (320, 416), (384, 368)),
}
PAGE_LAYOUTS = tuple(PAGE_SIZES)
_MIN_SIDE = 288  # pixels
_LETTERS = {"word": (16, 22), "digits": (19, 26)}
_FILLED = 0.35  # share of filled lines, cells and entries


@dataclass
class DrawnPages:
    """The images of a prompt.

    Attributes:
        images: The pages.
        layout: One of `PAGE_LAYOUTS`.
        questions: One question of each of `DOCUMENT_KINDS`.
    """

    images: list[Image.Image]
    layout: str
    questions: list[DrawnQuestion] = field(default_factory=list)


@dataclass
class _Page:
    """A page.

    Attributes:
        image: The image.
        places: Free lines where a text fits: left, top, right end, height.
        taken: Boxes of the drawn texts and shapes.
    """

    image: Image.Image
    places: list[Box]
    taken: list[Box] = field(default_factory=list)

    def write(self, rng: np.random.Generator, text: str, size: int) -> Box:
        """Write a text on a plate in one of the lines and return its box."""
        font = _load_font(size)
        left, top, right, bottom = (int(side) for side in font.getbbox(text))
        width, height = right - left + 8, bottom - top + 8
        fitting = []
        for x, y, end, high in self.places:
            start, middle = x + int(rng.integers(max(1, end - x - width))), y + (high - height) // 2
            box = start, middle, start + width, middle + height
            if start + width <= end and self._is_clear(box):
                fitting.append(box)
        box = fitting[int(rng.integers(len(fitting)))]
        self.taken.append(box)
        dark, light = _sample_grey(rng, 0, 50), _sample_grey(rng, 225, 256)
        front, back = (dark, light) if rng.random() < 0.5 else (light, dark)
        pen = ImageDraw.Draw(self.image)
        pen.rectangle((box[0], box[1], box[2] - 1, box[3] - 1), fill=back, outline=front)
        pen.text((box[0] + 4 - left, box[1] + 4 - top), text, fill=front, font=font)
        return box

    def _is_clear(self, box: Box) -> bool:
        return all(box[2] + 6 < a or c + 6 < box[0] or box[3] + 6 < b or d + 6 < box[1] for a, b, c, d in self.taken)


def draw_pages(
    rng: np.random.Generator, layout: str, size: tuple[int, int], answers: Mapping[str, str] | None = None
) -> DrawnPages:
    """Draw the pages of one prompt: two for a "spread", one for other layouts.

    Args:
        rng: Random generator.
        layout: One of `PAGE_LAYOUTS`.
        size: (width, height) of a page in pixels, at least 288 each.
        answers: Answers by kind. Other answers are drawn uniformly.

    Raises:
        ValueError: If the layout or the size is not valid.
    """
    if layout not in PAGE_LAYOUTS or min(size) < _MIN_SIDE:
        known = ", ".join(PAGE_LAYOUTS)
        raise ValueError(f"layout={layout!r}, size={size} is not valid. Use {known}, at least {_MIN_SIDE} pixels.")
    requested = {kind: str(rng.choice(options)) for kind, options in get_document_answers().items()}
    requested |= answers or {}
    drawers = [_draw_letter, _draw_table] if layout == "spread" else [_DRAWERS[layout]]
    pages = [drawers[index](rng, *size) for index in rng.permutation(len(drawers))]
    prompt, where = DrawnPages([page.image for page in pages], layout), [0] * len(requested)
    if len(pages) > 1:  # each page has half of the answers
        where = rng.permutation([0, 0, 1, 1]).tolist()
    shapes = {"colour": (str(rng.choice(_SHAPES)), 16, 24), "small": (str(rng.choice(TINY)), 8, 11)}
    for page_index, kind in zip(where, requested, strict=True):
        page, shape = pages[page_index], ""
        if kind in _LETTERS:
            box = page.write(rng, requested[kind], int(rng.integers(*_LETTERS[kind])))
        else:
            shape, low, high = shapes[kind]
            box = _mark(rng, page.image, shape, requested[kind], int(rng.integers(low, high)), page.taken)
        prompt.questions.append(
            DrawnQuestion(kind, _TEXTS[kind].format(shape), requested[kind], (((page_index, box),),))
        )
    return prompt


def _build_sheet(
    rng: np.random.Generator, width: int, height: int
) -> tuple[Image.Image, ImageDraw.ImageDraw, int, Colour]:
    """Return a sheet, its pen, its margin, and its ink."""
    image = Image.new("RGB", (width, height), tuple(int(v) for v in rng.integers(200, 236, 3)))
    return image, ImageDraw.Draw(image), int(rng.integers(16, 32)), _sample_grey(rng, 120, 160)


def _draw_line(rng: np.random.Generator, pen: ImageDraw.ImageDraw, x: int, y: int, end: int, ink: Colour) -> None:
    """Draw a line of unreadable words, or leave the line empty."""
    if rng.random() < _FILLED:
        while (after := x + int(rng.integers(10, 60))) < end:
            pen.rectangle((x, y, after, y + 1), fill=ink)
            x = after + 4


def _draw_letter(rng: np.random.Generator, width: int, height: int) -> _Page:
    """Draw a heading and paragraphs."""
    (image, pen, margin, ink), places = _build_sheet(rng, width, height), []
    pen.rectangle((margin, margin, margin + int(width * rng.uniform(0.3, 0.5)), margin + 8), fill=ink)
    pen.line((margin, margin + 18, width - margin, margin + 18), fill=ink)
    step, y = int(rng.integers(16, 21)), margin + 36
    while y + step < height - margin:
        _draw_line(rng, pen, margin, y + step // 2, width - margin, ink)
        places.append((margin, y, width - margin, step))
        y += step + (int(rng.integers(8, 24)) if rng.random() < 0.2 else 0)
    return _Page(image, places)


def _draw_table(rng: np.random.Generator, width: int, height: int) -> _Page:
    """Draw a ruled grid with a heading row."""
    image, pen, margin, ink = _build_sheet(rng, width, height)
    rows = (height - 2 * margin) // int(rng.integers(32, 42))
    columns = (width - 2 * margin) // int(rng.integers(80, 120))
    xs = np.linspace(margin, width - margin, columns + 1).astype(int).tolist()
    ys = np.linspace(margin, height - margin, rows + 1).astype(int).tolist()
    pen.rectangle((margin, ys[0], width - margin, ys[1]), fill=_sample_grey(rng, 170, 195))
    for x in xs:
        pen.line((x, margin, x, height - margin), fill=ink)
    for y in ys:
        pen.line((margin, y, width - margin, y), fill=ink)
    places = [
        (x + 4, y, end - 3, after - y) for y, after in itertools.pairwise(ys[1:]) for x, end in itertools.pairwise(xs)
    ]
    for x, y, end, high in places:
        _draw_line(rng, pen, x + 4, y + high // 2, end - 4, ink)
    return _Page(image, places)


def _draw_receipt(rng: np.random.Generator, width: int, height: int) -> _Page:
    """Draw a centred heading, and entries with prices, some above a dotted rule."""
    (image, pen, margin, ink), places = _build_sheet(rng, width, height), []
    for line, half in enumerate((width // 4, width // 7)):
        pen.rectangle((width // 2 - half, margin + 14 * line, width // 2 + half, margin + 14 * line + 7), fill=ink)
    step, y = int(rng.integers(22, 28)), margin + 40
    while y + step < height - margin:
        price = width - margin - int(rng.integers(24, 48))
        _draw_line(rng, pen, margin, y + step // 2, price - 12, ink)
        pen.rectangle((price, y + step // 2, width - margin, y + step // 2 + 1), fill=ink)
        places.append((margin, y, price - 4, step))
        y += step
        if rng.random() < 0.12:
            for x in range(margin, width - margin, 8):
                pen.line((x, y + 4, x + 4, y + 4), fill=ink)
            y += 9
    return _Page(image, places)


_DRAWERS: dict[str, Callable[[np.random.Generator, int, int], _Page]] = {
    "letter": _draw_letter, "table": _draw_table, "receipt": _draw_receipt,
}  # fmt: skip
