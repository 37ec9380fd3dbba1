# SPDX-License-Identifier: Apache-2.0
"""Drawn prompts of two to six images with questions about one image or all images.

One shape is in every image, with a different colour in each. Another shape is in some images, and two more shapes are
in one image each. A colour question about the first shape has as many possible answers as images, so the named image
is needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from tokenprune_demo.backgrounds import BACKGROUNDS, draw_background
from tokenprune_demo.drawn_videos import DrawnQuestion, Region
from tokenprune_demo.scenes import COLORS, LARGE, Box, _draw_shape_masks

CAMERAS = ("front", "front left", "front right", "back", "back left", "back right")
NUMBERS = ("two", "three", "four", "five", "six")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
MAX_VIEWS = len(CAMERAS)
# which: the image of an object; named, numbered: an object in one image, by camera or number; across: all images.
VIEW_KINDS = ("which", "named", "numbered", "across")
_TEXTS = {
    "which": "which of the {} images shows the {}?",
    "named": "{}: what color is the {}?",
    "numbered": "what color is the {1} in the {0} image?",
    "across": "how many images show a {}?",
}


@dataclass
class DrawnViews:
    """The images of a prompt.

    Attributes:
        images: The images.
        cameras: Name of each image's camera. Empty without names.
        questions: All questions that the images answer.
    """

    images: list[Image.Image]
    cameras: tuple[str, ...]
    questions: list[DrawnQuestion] = field(default_factory=list)

    @property
    def labels(self) -> tuple[str, ...]:
        """Text before each image in the prompt ("front left:"). Empty without camera names."""
        return tuple(f"{camera}:" for camera in self.cameras)

    def of_kind(self, kind: str) -> list[DrawnQuestion]:
        return [question for question in self.questions if question.kind == kind]


def get_view_answers(views: int = MAX_VIEWS) -> dict[str, tuple[str, ...]]:
    """Return the possible answers of each kind of question. All answers of a kind are equally likely."""
    return {
        "which": ORDINALS[:views],
        "named": tuple(COLORS),
        "numbered": tuple(COLORS),
        "across": tuple(str(count) for count in range(views + 1)),
    }


def get_view_words() -> list[str]:
    """Return all words and punctuation of questions, answers and labels about several images, sorted."""
    texts = [re.sub(r"\{\d?\}", " ", text) for text in (*_TEXTS.values(), *CAMERAS)]
    answers = (word for words in get_view_answers().values() for word in words)
    return sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", text)} | {*answers, *NUMBERS, *LARGE})


def draw_views(
    rng: np.random.Generator,
    views: int | None = None,
    size: tuple[int, int] = (112, 112),
    named: bool | None = None,
    photos: tuple[Image.Image, ...] = (),
    answers: Mapping[str, str] | None = None,
) -> DrawnViews:
    """Draw the images of one prompt.

    Args:
        rng: Random generator.
        views: Number of images, 2 to 6. None selects at random.
        size: (width, height) of an image, each 112 to 224 pixels.
        named: Whether cameras have names; "named" questions need names. None selects at random.
        photos: Background photographs.
        answers: Answer of the first question of each kind, out of `get_view_answers(views)`. Other answers are drawn
            uniformly.

    Raises:
        ValueError: If the size or the number of views is not valid.
    """
    views = int(rng.integers(2, MAX_VIEWS + 1)) if views is None else views
    if not 2 <= views <= MAX_VIEWS or not all(112 <= side <= 224 for side in size):
        raise ValueError(f"views={views}, size={size} is not valid. Use 2 to {MAX_VIEWS} images of 112 to 224 pixels.")
    named = bool(rng.random() < 0.5) if named is None else named
    requested = {kind: _pick(rng, options) for kind, options in get_view_answers(views).items()} | dict(answers or {})
    images = [draw_background(rng, _pick(rng, BACKGROUNDS), photos) for _ in range(views)]
    images = [image.resize(size, Image.Resampling.BILINEAR) for image in images]
    everywhere, some, single, other = (str(shape) for shape in rng.permutation(LARGE)[:4])

    # The named and the numbered question ask about different images, so their answers are independent.
    by_name, by_number = (int(view) for view in rng.choice(views, 2, replace=False))
    colors = [_pick(rng, tuple(COLORS)) for _ in range(views)]
    colors[by_name], colors[by_number] = requested["named"], requested["numbered"]
    shown = set(rng.permutation(views)[: int(requested["across"])].tolist())
    where = {single: ORDINALS.index(requested["which"]), other: int(rng.integers(views))}

    boxes: dict[tuple[str, int], Box] = {}
    for view, image in enumerate(images):
        here = {everywhere: colors[view]}
        for shape in (some, single, other):
            if view in shown if shape == some else where[shape] == view:
                here[shape] = _pick(rng, tuple(COLORS))
        for (shape, color), cell in zip(here.items(), rng.permutation(9), strict=False):
            boxes[shape, view] = _draw(rng, image, shape, color, divmod(int(cell), 3))

    cameras = tuple(CAMERAS[index] for index in sorted(rng.choice(MAX_VIEWS, views, replace=False))) if named else ()
    drawn = DrawnViews(images, cameras)

    def ask(kind: str, answer: str, regions: list[Region], *words: str) -> None:
        looks = tuple((region,) for region in regions)
        drawn.questions.append(DrawnQuestion(kind, _TEXTS[kind].format(*words), answer, looks))

    for shape in (single, other):
        view = where[shape]
        ask("which", ORDINALS[view], [(view, boxes[shape, view])], NUMBERS[views - 2], shape)
    if named:
        ask("named", colors[by_name], [(by_name, boxes[everywhere, by_name])], cameras[by_name], everywhere)
    region = (by_number, boxes[everywhere, by_number])
    ask("numbered", colors[by_number], [region], ORDINALS[by_number], everywhere)
    ask("across", str(len(shown)), [(view, boxes[some, view]) for view in sorted(shown)], some)
    return drawn


def _pick(rng: np.random.Generator, options: tuple[str, ...]) -> str:
    return options[rng.integers(len(options))]


def _draw(rng: np.random.Generator, image: Image.Image, what: str, color: str, cell: tuple[int, int]) -> Box:
    """Draw a shape at a random position in a cell (row, column) of a 3 x 3 grid and return its box."""
    radius = int(rng.integers(12, 15))
    outline, inside = _draw_shape_masks(what, radius, 0.75)
    rooms = image.height // 3, image.width // 3
    y, x = (
        index * room + int(rng.integers(room - side + 1))
        for index, room, side in zip(cell, rooms, (outline.height, outline.width), strict=True)
    )
    light = np.asarray(image.crop((x, y, x + outline.width, y + outline.height)).convert("L")).mean() > 105
    fill = np.clip(np.array(COLORS[color]) + rng.integers(-12, 13, 3), 0, 255)
    image.paste((15, 15, 15) if light else (245, 245, 245), (x, y), outline)
    image.paste(tuple(int(v) for v in fill), (x, y), inside)
    return x, y, x + outline.width, y + outline.height
