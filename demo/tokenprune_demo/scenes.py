# SPDX-License-Identifier: Apache-2.0
"""Drawn images with known answers, for training and benchmarking small vision-language models.

A scene is drawn from one `numpy.random.Generator`. It has large shapes, many tiny shapes, a digit and a word on a sign,
over a plain, gradient, textured or photographic background. There are eight kinds of question. Each is answered by
looking at one region, and the kinds differ in the size of that region.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from tokenprune_demo.backgrounds import BACKGROUNDS, SIZE, draw_background, load_photos

__all__ = [
    "BACKGROUNDS",
    "COLORS",
    "KINDS",
    "LARGE",
    "POSITIONS",
    "SIZE",
    "TINY",
    "WORDS",
    "Item",
    "Scene",
    "SceneQuestion",
    "build_questions",
    "draw_scene",
    "load_photos",
]

KINDS = ("colour", "presence", "count", "position", "small", "digits", "word", "grounding")
COLORS = {
    "red": (222, 38, 38),
    "green": (40, 165, 60),
    "blue": (40, 80, 225),
    "yellow": (240, 220, 40),
    "purple": (140, 50, 180),
    "orange": (246, 136, 24),
    "cyan": (50, 205, 215),
    "pink": (248, 140, 190),
}
LARGE = ("circle", "square", "triangle", "star", "ring")
TINY = ("heart", "cross", "diamond", "moon")
WORDS = ("cat", "car", "cap", "hat", "bat", "bar", "map", "tap", "cup", "cub", "bus", "bun", "pen", "pin")
POSITIONS = ("top-left", "top-right", "bottom-left", "bottom-right")
Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class SceneQuestion:
    """One question.

    Attributes:
        kind: Kind of question.
        text: The question.
        answer: The answer.
        boxes: Boxes (left, top, right, bottom) of the evidence in pixels.
    """

    kind: str
    text: str
    answer: str
    boxes: tuple[Box, ...] = ()


@dataclass(frozen=True)
class Item:
    """One drawn object.

    Attributes:
        what: A shape, "digit" or "sign".
        value: Its colour, digit or word.
        box: Its box.
        letters: Left and right end of each letter of a digit or word, in pixels.
    """

    what: str
    value: str
    box: Box
    letters: tuple[tuple[float, float], ...] = ()

    @property
    def center(self) -> tuple[float, float]:
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2


@dataclass
class Scene:
    """A drawn scene.

    Attributes:
        image: The image.
        background: Kind of background.
        items: Objects in the image.
        owner: For each pixel, 1 + the index of its object, or 0.
        questions: All questions that the image answers.
    """

    image: Image.Image
    background: str
    items: list[Item]
    owner: np.ndarray
    questions: list[SceneQuestion] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[SceneQuestion]:
        return [q for q in self.questions if q.kind == kind]


def _outline(what: str, r: float, c: float) -> list[tuple[float, float]]:
    """Return the corner points of a shape of radius `r` around `(c, c)`."""
    if what == "square":
        return [(c - r, c - r), (c + r, c - r), (c + r, c + r), (c - r, c + r)]
    if what == "triangle":
        return [(c, c - r), (c + r, c + r), (c - r, c + r)]
    if what == "diamond":
        return [(c, c - r), (c + 0.75 * r, c), (c, c + r), (c - 0.75 * r, c)]
    if what == "star":
        radii = (r, 0.45 * r)
        turns = [math.pi * k / 5 for k in range(10)]
        return [(c + radii[k % 2] * math.sin(t), c - radii[k % 2] * math.cos(t)) for k, t in enumerate(turns)]
    if what == "cross":
        a = 0.36 * r
        right = [(-a, -r), (a, -r), (a, -a), (r, -a), (r, a), (a, a)]
        return [(c + x, c + y) for x, y in right] + [(c - x, c - y) for x, y in right]
    turns = [2 * math.pi * k / 32 for k in range(32)]
    if what == "heart":
        xs = [16 * math.sin(t) ** 3 for t in turns]
        ys = [13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t) for t in turns]
        return [(c + r * x / 16, c - r * (y + 2.5) / 15) for x, y in zip(xs, ys, strict=True)]
    return [(c + r * math.cos(t), c + r * math.sin(t)) for t in turns]


@lru_cache(maxsize=2048)
def _draw_shape_masks(what: str, r: int, edge: float) -> tuple[Image.Image, Image.Image]:
    """Return two antialiased masks of a shape: with its outline, and its interior."""
    scale, half = 4, r + 2
    masks = []
    for grow in (0.0, edge):
        mask = Image.new("L", (2 * half * scale, 2 * half * scale))
        draw, c = ImageDraw.Draw(mask), half * scale
        points = _outline(what, r * scale, c)
        draw.polygon(points, fill=255)
        if what in ("ring", "moon"):
            hole, shift = (0.55, 0.0) if what == "ring" else (0.8, 0.55)
            h, s = hole * r * scale, shift * r * scale
            draw.ellipse((c - h + s, c - h, c + h + s, c + h), fill=0)
        if grow:
            mask = mask.filter(ImageFilter.MinFilter(2 * round(grow * scale) + 1))
        masks.append(mask.resize((2 * half, 2 * half), Image.BOX))
    return masks[0], masks[1]


@lru_cache(maxsize=64)
def _load_font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)


class _Canvas:
    """Draw objects on a background without overlap."""

    def __init__(self, rng: np.random.Generator, image: Image.Image) -> None:
        self.rng, self.image = rng, image
        self.items: list[Item] = []
        self.owner = np.zeros((SIZE, SIZE), np.uint8)
        self.taken = np.zeros((0, 4))

    def find(self, w: int, h: int, allowed=None, tries: int = 60) -> Box | None:
        for _ in range(tries):
            x, y = int(self.rng.integers(2, SIZE - w - 1)), int(self.rng.integers(2, SIZE - h - 1))
            t = self.taken
            clash = (t[:, 0] < x + w + 3) & (t[:, 2] > x - 3) & (t[:, 1] < y + h + 3) & (t[:, 3] > y - 3)
            if not clash.any() and (allowed is None or allowed(x + w / 2, y + h / 2)):
                return x, y, x + w, y + h
        return None

    def keep(self, item: Item, mask: np.ndarray) -> Item:
        x0, y0, x1, y1 = item.box
        self.items.append(item)
        self.taken = np.vstack([self.taken, item.box])
        self.owner[y0:y1, x0:x1][mask] = len(self.items)
        return item

    def contrast(self, box: Box) -> tuple[int, int, int]:
        light = np.asarray(self.image.crop(box).convert("L")).mean() > 105
        return (15, 15, 15) if light else (245, 245, 245)

    def shape(self, what: str, color: str, r: int, allowed=None) -> Item | None:
        outline, inside = _draw_shape_masks(what, r, 1.5 if r > 10 else 0.75)
        box = self.find(*outline.size, allowed)
        if box is None:
            return None
        fill = np.clip(np.array(COLORS[color]) + self.rng.integers(-12, 13, 3), 0, 255)
        self.image.paste(self.contrast(box), box[:2], outline)
        self.image.paste(tuple(int(v) for v in fill), box[:2], inside)
        return self.keep(Item(what, color, box), np.asarray(outline) > 127)

    def text(self, what: str, text: str, size: int, plate: bool) -> Item | None:
        font = _load_font(size)
        left, top, right, bottom = font.getbbox(text)
        pad = 4 if plate else 2
        box = self.find(right - left + 2 * pad, bottom - top + 2 * pad)
        if box is None:
            return None
        draw = ImageDraw.Draw(self.image)
        dark, light = self.rng.integers(0, 60, 3), self.rng.integers(215, 256, 3)
        ink, ground = (dark, light) if self.rng.random() < 0.5 else (light, dark)
        ink, ground = tuple(int(v) for v in ink), tuple(int(v) for v in ground)
        origin = (box[0] + pad - left, box[1] + pad - top)
        if plate:
            draw.rectangle((box[0], box[1], box[2] - 1, box[3] - 1), fill=ground, outline=ink)
            draw.text(origin, text, fill=ink, font=font)
        else:
            draw.text(origin, text, fill=ink, font=font, stroke_width=2, stroke_fill=ground)
        ends = [origin[0] + font.getlength(text[:n]) for n in range(len(text) + 1)]
        letters = tuple(itertools.pairwise(ends))
        return self.keep(Item(what, text, box, letters), np.ones((box[3] - box[1], box[2] - box[0]), bool))


def _pick(rng: np.random.Generator, options, weights=None):
    return options[int(rng.choice(len(options), p=weights))]


def _clear_of_middle(x: float, y: float) -> bool:
    return abs(x - SIZE / 2) > 18 and abs(y - SIZE / 2) > 18


def draw_scene(rng: np.random.Generator, photos: tuple[Image.Image, ...] = (), texts: int = 1) -> Scene:
    """Draw one scene.

    Args:
        rng: Random generator.
        photos: Background photographs.
        texts: Number of digits and of signs. More than one is for training a vision tower.

    Examples:
        >>> scene = draw_scene(np.random.default_rng(0))
        >>> scene.image.size
        (224, 224)
    """
    where = _pick(rng, BACKGROUNDS, (0.2, 0.2, 0.3, 0.3))
    canvas, names = _Canvas(rng, draw_background(rng, where, photos)), list(COLORS)
    twin, crowd, single, extra, _absent = (str(k) for k in rng.permutation(LARGE))

    def radius() -> int:
        return int(rng.integers(15, 22))

    def color() -> str:
        return _pick(rng, names)

    canvas.shape(single, color(), radius(), _clear_of_middle)
    pair_colors = [str(c) for c in rng.choice(names, 2, replace=False)]
    first = canvas.shape(twin, pair_colors[0], radius())
    if first and rng.random() < 0.9:
        x, y = first.center
        canvas.shape(twin, pair_colors[1], radius(), lambda a, b: abs(a - x) > 55 or abs(b - y) > 55)
    for _ in range(texts):
        canvas.text("sign", _pick(rng, WORDS), int(rng.integers(18, 23)), plate=True)
        canvas.text("digit", str(rng.integers(10)), int(rng.integers(17, 24)), plate=bool(rng.random() < 0.5))
    for what, n in ((crowd, _pick(rng, (0, 1, 3, 4), (0.2, 0.2, 0.3, 0.3))), (extra, int(rng.random() < 0.4))):
        for _ in range(n):
            canvas.shape(what, color(), radius())
    tiny = [str(k) for k in rng.permutation(TINY)]
    for what, n in zip(tiny, (1, 1, int(rng.integers(2, 6)), int(rng.integers(0, 5))), strict=True):
        for _ in range(n):
            canvas.shape(what, color(), int(rng.integers(6, 9)))
    scene = Scene(canvas.image, where, canvas.items, canvas.owner)
    scene.questions = build_questions(scene)
    return scene


def build_questions(scene: Scene) -> list[SceneQuestion]:
    """Return all questions with one unambiguous answer in a scene."""
    groups: dict[str, list[Item]] = {}
    for item in scene.items:
        groups.setdefault(item.what, []).append(item)
    out = []
    for what in LARGE:
        group = groups.get(what, [])
        boxes = tuple(i.box for i in group)
        out.append(SceneQuestion("presence", f"is there a {what}?", "yes" if group else "no", boxes))
        out.append(SceneQuestion("count", f"how many {what}s?", str(len(group)), boxes))
        if len(group) == 1:
            x, y = group[0].center
            out.append(SceneQuestion("colour", f"what color is the {what}?", group[0].value, boxes))
            if _clear_of_middle(x, y):
                position = POSITIONS[2 * (y > SIZE / 2) + (x > SIZE / 2)]
                out.append(SceneQuestion("position", f"where is the {what}?", position, boxes))
        if len(group) == 2 and group[0].value != group[1].value:
            for axis, sides in enumerate((("left", "right"), ("upper", "lower"))):
                first, last = sorted(group, key=lambda i: i.center[axis])
                if last.center[axis] - first.center[axis] > 45:
                    for side, item in zip(sides, (first, last), strict=True):
                        text = f"what color is the {side} {what}?"
                        out.append(SceneQuestion("grounding", text, item.value, (item.box,)))
    for what in TINY:
        if len(groups.get(what, [])) == 1:
            item = groups[what][0]
            out.append(SceneQuestion("small", f"what color is the tiny {what}?", item.value, (item.box,)))
    readings = (("digit", "digits", "which digit is written?"), ("sign", "word", "what does the sign say?"))
    for what, kind, text in readings:
        if len(groups.get(what, [])) == 1:
            out.append(SceneQuestion(kind, text, groups[what][0].value, (groups[what][0].box,)))
    return out
