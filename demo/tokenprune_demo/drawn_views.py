# SPDX-License-Identifier: Apache-2.0
"""Drawn prompts of two to six images with questions that one of them answers, or all together.

One shape is in every image, in colours of their own; another is in some of them; two more are in one image each. So a
question about the color of the first has as many answers as there are images, and needs the one that it names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from tokenprune_demo.backgrounds import BACKGROUNDS, draw_background
from tokenprune_demo.drawn_videos import DrawnQuestion, Region
from tokenprune_demo.scenes import COLORS, LARGE, Box, _sprite

CAMERAS = ("front", "front left", "front right", "back", "back left", "back right")
NUMBERS = ("two", "three", "four", "five", "six")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
MAX_VIEWS = len(CAMERAS)
# which: where a thing is; named, numbered: a thing of one view, by its camera or its number; across: of all views.
VIEW_KINDS = ("which", "named", "numbered", "across")
_TEXTS = {
    "which": "which of the {} images shows the {}?",
    "named": "{}: what color is the {}?",
    "numbered": "what color is the {1} in the {0} image?",
    "across": "how many images show a {}?",
}


@dataclass
class DrawnViews:
    """The images of a prompt, the name of each one's camera, and all questions that they answer.

    labels: what stands before each image in the prompt ("front left:"); none where cameras have no names.
    """

    images: list[Image.Image]
    cameras: tuple[str, ...]
    questions: list[DrawnQuestion] = field(default_factory=list)

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(f"{camera}:" for camera in self.cameras)

    def of_kind(self, kind: str) -> list[DrawnQuestion]:
        return [question for question in self.questions if question.kind == kind]


def get_view_answers(views: int = MAX_VIEWS) -> dict[str, tuple[str, ...]]:
    """Return the answers of each kind of question about a number of images; those of a kind are equally likely."""
    return {
        "which": ORDINALS[:views],
        "named": tuple(COLORS),
        "numbered": tuple(COLORS),
        "across": tuple(str(number) for number in range(views + 1)),
    }


def get_view_words() -> list[str]:
    """Return all words and marks of the questions about several images, their answers and labels, sorted."""
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

    views: how many, 2 to 6; None: any. size: (width, height) of each, 112 to 224 pixels. named: whether cameras have
    names, without which nothing is asked by name; None: either. photos: to be put behind things. answers: for each kind
    the answer that its first question shall have, out of `view_answers(views)`; others are drawn evenly.
    Raises ValueError for another size or number.
    """
    views = int(rng.integers(2, MAX_VIEWS + 1)) if views is None else views
    if not 2 <= views <= MAX_VIEWS or not all(112 <= side <= 224 for side in size):
        raise ValueError(
            f"views={views}, size={size}: 2 to {MAX_VIEWS} images of 112 to 224 pixels a side can be drawn"
        )
    named = bool(rng.random() < 0.5) if named is None else named
    wanted = {kind: _pick(rng, options) for kind, options in get_view_answers(views).items()} | dict(answers or {})
    images = [draw_background(rng, _pick(rng, BACKGROUNDS), photos) for _ in range(views)]
    images = [image.resize(size, Image.Resampling.BILINEAR) for image in images]
    everywhere, some, single, other = (str(shape) for shape in rng.permutation(LARGE)[:4])

    # What is asked by name and by number are two views, so that neither answer binds the other.
    by_name, by_number = (int(view) for view in rng.choice(views, 2, replace=False))
    colors = [_pick(rng, tuple(COLORS)) for _ in range(views)]
    colors[by_name], colors[by_number] = wanted["named"], wanted["numbered"]
    shown = set(rng.permutation(views)[: int(wanted["across"])].tolist())
    where = {single: ORDINALS.index(wanted["which"]), other: int(rng.integers(views))}

    boxes: dict[tuple[str, int], Box] = {}
    for view, image in enumerate(images):
        here = {everywhere: colors[view]}
        for shape in (some, single, other):
            if view in shown if shape == some else where[shape] == view:
                here[shape] = _pick(rng, tuple(COLORS))
        for (shape, color), cell in zip(here.items(), rng.permutation(9), strict=False):
            boxes[shape, view] = _draw(rng, image, shape, color, divmod(int(cell), 3))

    cameras = tuple(CAMERAS[place] for place in sorted(rng.choice(MAX_VIEWS, views, replace=False))) if named else ()
    drawn = DrawnViews(images, cameras)

    def ask(kind: str, answer: str, places: list[Region], *words: str) -> None:
        looks = tuple((place,) for place in places)
        drawn.questions.append(DrawnQuestion(kind, _TEXTS[kind].format(*words), answer, looks))

    for shape in (single, other):
        view = where[shape]
        ask("which", ORDINALS[view], [(view, boxes[shape, view])], NUMBERS[views - 2], shape)
    if named:
        ask("named", colors[by_name], [(by_name, boxes[everywhere, by_name])], cameras[by_name], everywhere)
    place = (by_number, boxes[everywhere, by_number])
    ask("numbered", colors[by_number], [place], ORDINALS[by_number], everywhere)
    ask("across", str(len(shown)), [(view, boxes[some, view]) for view in sorted(shown)], some)
    return drawn


def _pick(rng: np.random.Generator, options: tuple[str, ...]) -> str:
    return options[rng.integers(len(options))]


def _draw(rng: np.random.Generator, image: Image.Image, what: str, color: str, cell: tuple[int, int]) -> Box:
    """Draw a shape somewhere in a cell (row, column) of three by three; returns its box."""
    radius = int(rng.integers(12, 15))
    whole, inside = _sprite(what, radius, 0.75)
    rooms = image.height // 3, image.width // 3
    y, x = (
        place * room + int(rng.integers(room - side + 1))
        for place, room, side in zip(cell, rooms, (whole.height, whole.width), strict=True)
    )
    light = np.asarray(image.crop((x, y, x + whole.width, y + whole.height)).convert("L")).mean() > 105
    fill = np.clip(np.array(COLORS[color]) + rng.integers(-12, 13, 3), 0, 255)
    image.paste((15, 15, 15) if light else (245, 245, 245), (x, y), whole)
    image.paste(tuple(int(v) for v in fill), (x, y), inside)
    return x, y, x + whole.width, y + whole.height
