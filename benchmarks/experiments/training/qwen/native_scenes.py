# SPDX-License-Identifier: Apache-2.0
"""Draw images of any size with named things: the scenes of tokenprune_demo.scenes at native resolution.

A scene has a width, a height and a scale of its items. Scale 1 is the size in the first model's 224 px images.
"""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from qwen_vocabulary import PLURALS, THINGS
from tokenprune_demo.backgrounds import BACKGROUNDS, load_photos
from tokenprune_demo.scenes import COLORS, LARGE, POSITIONS, TINY, WORDS, Item, SceneQuestion, _draw_shape_masks

EMOJI = Path(os.environ.get("TOKENPRUNE_EMOJI", "runs/emoji.npz"))
NAMES = list(THINGS)
MANY = dict(zip((*LARGE, *TINY), PLURALS, strict=True))


@cache
def _emoji() -> dict[str, Image.Image]:
    with np.load(EMOJI) as file:
        return {name: Image.fromarray(file[name]) for name in file.files}


@lru_cache(maxsize=12000)
def _drawing(name: str, size: int, flip: bool, turn: int) -> np.ndarray:
    image = _emoji()[name]
    if turn:
        image = image.rotate(turn, Image.BICUBIC)
    if flip:
        image = image.transpose(Image.FLIP_LEFT_RIGHT)
    return np.asarray(image.resize((size, size), Image.BOX if size < 64 else Image.BILINEAR))


@lru_cache(maxsize=4096)
def _masks(sort: str, r: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the masks of a shape with and without outline, as bytes. Small shapes are blurred by 4 x 4 boxes."""
    return tuple(np.asarray(mask) for mask in _draw_shape_masks(sort, r, 1.5 if r > 10 else 0.75))


@lru_cache(maxsize=4096)
def _letters(text: str, size: int, plate: bool) -> tuple[np.ndarray, np.ndarray, tuple]:
    """Return the masks of a text and of its background (a plate or a stroke), and the extents of its letters."""
    font = ImageFont.load_default(size)
    left, top, right, bottom = font.getbbox(text)
    pad = 4 if plate else 2
    shape = (round(right - left) + 2 * pad, round(bottom - top) + 2 * pad)
    ink, behind = Image.new("L", shape), Image.new("L", shape, 255 if plate else 0)
    origin = (pad - left, pad - top)
    ImageDraw.Draw(ink).text(origin, text, fill=255, font=font)
    if plate:
        ImageDraw.Draw(ink).rectangle((0, 0, shape[0] - 1, shape[1] - 1), outline=255)
    else:
        ImageDraw.Draw(behind).text(origin, text, fill=255, font=font, stroke_width=2, stroke_fill=255)
    ends = [origin[0] + font.getlength(text[:n]) for n in range(len(text) + 1)]
    return np.asarray(ink), np.asarray(behind), tuple(itertools.pairwise(ends))


def backdrop(rng: np.random.Generator, kind: str, width: int, height: int, photos) -> np.ndarray:
    """Return a background of a kind in `tokenprune_demo.backgrounds`, as bytes (height, width, 3)."""
    first, second = rng.integers(20, 256, 3), rng.integers(20, 256, 3)
    if kind == "plain":
        return np.broadcast_to(first.astype(np.uint8), (height, width, 3)).copy()
    if kind == "photo" and photos:
        photo = photos[rng.integers(len(photos))]
        max_zoom = min(photo.width / width, photo.height / height)
        zoom = rng.uniform(min(1.0, max_zoom), max_zoom)
        w, h = min(photo.width, int(width * zoom)), min(photo.height, int(height * zoom))
        left, top = int(rng.integers(photo.width - w + 1)), int(rng.integers(photo.height - h + 1))
        crop = photo.resize((width, height), Image.BILINEAR, box=(left, top, left + w, top + h))
        if rng.random() < 0.3:
            crop = crop.filter(ImageFilter.BoxBlur(1.5))
        crop = np.asarray(crop)[:, :: -1 if rng.random() < 0.5 else 1]
        return (crop * np.float32(rng.uniform(0.5, 1.0))).astype(np.uint8)
    y, x = np.ogrid[0:height, 0:width]
    if kind == "gradient":
        angle = rng.uniform(0, 2 * math.pi)
        t = np.float32(math.cos(angle)) * x.astype(np.float32) + np.float32(math.sin(angle)) * y.astype(np.float32)
        t = (t - t.min()) / (t.max() - t.min())
    else:
        second = np.clip(first + rng.integers(-70, 71, 3), 10, 255)
        style, period = rng.integers(3), int(rng.integers(8, 40))
        if style == 0:
            t = np.kron(rng.random((-(-height // 2), -(-width // 2)), np.float32), np.ones((2, 2), np.float32))
            t = t[:height, :width]
        elif style == 1:
            a, b = ((1, 0), (0, 1), (1, 1), (1, -1))[rng.integers(4)]
            t = np.broadcast_to(((a * x + b * y) // period) % 2, (height, width))
        else:
            t = (x // period + y // period) % 2
    step = (second - first).astype(np.float32)
    return (first.astype(np.float32) + step * np.asarray(t, np.float32)[..., None]).astype(np.uint8)


@dataclass
class NativeScene:
    """Pixels, bytes (frames, height, width, 3), items, their pixels (`owner`: 1 + index of the item), and questions."""

    pixels: np.ndarray
    background: str
    scale: float
    items: list[Item]
    owner: np.ndarray
    questions: list[SceneQuestion] = field(default_factory=list)

    @property
    def size(self) -> tuple[int, int]:
        return self.owner.shape[1], self.owner.shape[0]


class Canvas:
    """Place items on a background without overlap and record them.

    With two frames, some items are in only one of them, or at shifted positions.
    """

    def __init__(self, rng: np.random.Generator, pixels: np.ndarray, scale: float, frames: int = 1) -> None:
        self.rng, self.scale = rng, scale
        self.frames = [pixels.copy() for _ in range(frames)]
        self.height, self.width = pixels.shape[:2]
        self.items: list[Item] = []
        self.owner = np.zeros((self.height, self.width), np.uint8)
        self.taken = np.zeros((256, 4), np.int32)

    def find(self, w: int, h: int, allowed=None, tries: int = 40):
        if w + 4 > self.width or h + 4 > self.height:
            return None
        gap = max(1, round(3 * self.scale))
        xs = self.rng.integers(1, self.width - w, tries)
        ys = self.rng.integers(1, self.height - h, tries)
        t = self.taken[: len(self.items)]
        clash = (
            (t[:, 0] < xs[:, None] + w + gap)
            & (t[:, 2] > xs[:, None] - gap)
            & (t[:, 1] < ys[:, None] + h + gap)
            & (t[:, 3] > ys[:, None] - gap)
        ).any(1)
        for i in np.flatnonzero(~clash):
            x, y = int(xs[i]), int(ys[i])
            if allowed is None or allowed(x + w / 2, y + h / 2):
                return x, y, x + w, y + h
        return None

    def paste(self, box, layers) -> None:
        """Blend layers of (color or pixels, mask) into the frames that show the item."""
        x0, y0, x1, y1 = box
        frames, dx, dy = self.frames, 0, 0
        if len(frames) == 2 and self.rng.random() < 0.5:
            if self.rng.random() < 0.5:
                frames = [frames[self.rng.integers(2)]]
            else:
                max_shift = max(1, round(6 * self.scale))
                dx, dy = (int(v) for v in self.rng.integers(-max_shift, max_shift + 1, 2))
        for i, pixels in enumerate(frames):
            if i and (dx or dy) and x0 + dx >= 0 and x1 + dx <= self.width and y0 + dy >= 0 and y1 + dy <= self.height:
                part = pixels[y0 + dy : y1 + dy, x0 + dx : x1 + dx]
            else:
                part = pixels[y0:y1, x0:x1]
            here = part.astype(np.float32)
            for color, mask in layers:
                here += (np.asarray(color, np.float32) - here) * (mask[..., None].astype(np.float32) / 255)
            part[:] = here.astype(np.uint8)

    def keep(self, item: Item, mask: np.ndarray) -> Item:
        x0, y0, x1, y1 = item.box
        self.taken[len(self.items)] = item.box
        self.items.append(item)
        self.owner[y0:y1, x0:x1][mask > 127] = len(self.items)
        return item

    def shape(self, sort: str, color: str, allowed=None) -> Item | None:
        low, high = (15, 22) if sort in LARGE else (6, 9)
        r = max(3, round(self.scale * self.rng.uniform(low, high)))
        outline, inside = _masks(sort, r)
        box = self.find(outline.shape[1], outline.shape[0], allowed)
        if box is None:
            return None
        behind = self.frames[0][box[1] : box[3] : 3, box[0] : box[2] : 3].mean()
        fill = np.clip(np.array(COLORS[color]) + self.rng.integers(-12, 13, 3), 0, 255)
        self.paste(box, (((15, 15, 15) if behind > 105 else (245, 245, 245), outline), (fill, inside)))
        return self.keep(Item(sort, color, box), outline)

    def thing(self, name: str, allowed=None) -> Item | None:
        size = max(16, round(self.scale * self.rng.uniform(32, 50)))
        flip, turn = bool(self.rng.random() < 0.5), int(self.rng.choice((-10, 0, 0, 10)))
        drawing = _drawing(name, size, flip, turn)
        box = self.find(size, size, allowed)
        if box is None:
            return None
        shade = np.float32(self.rng.uniform(0.8, 1.1))
        self.paste(box, ((np.minimum(drawing[..., :3] * shade, 255), drawing[..., 3]),))
        return self.keep(Item("thing", name, box), drawing[..., 3])

    def text(self, sort: str, text: str) -> Item | None:
        low, high = (18, 23) if sort == "sign" else (17, 24)
        size = max(9, round(self.scale * self.rng.uniform(low, high)))
        ink, behind, ends = _letters(text, size, sort == "sign" or bool(self.rng.random() < 0.5))
        box = self.find(ink.shape[1], ink.shape[0])
        if box is None:
            return None
        dark, light = self.rng.integers(0, 60, 3), self.rng.integers(215, 256, 3)
        front, back = (dark, light) if self.rng.random() < 0.5 else (light, dark)
        self.paste(box, ((back, behind), (front, ink)))
        letters = tuple((a + box[0], b + box[0]) for a, b in ends)
        return self.keep(Item(sort, text, box, letters), np.full_like(ink, 255))


def _start(rng, width, height, scale, photos, frames=1) -> tuple[Canvas, str]:
    background = BACKGROUNDS[int(rng.choice(len(BACKGROUNDS), p=(0.2, 0.2, 0.3, 0.3)))]
    return Canvas(rng, backdrop(rng, background, width, height, photos), scale, frames), background


def draw_crowd(rng: np.random.Generator, width: int, height: int, scale: float, photos=(), frames=1) -> NativeScene:
    """Draw as many items of all sorts as fit, for training the tower."""
    canvas, background = _start(rng, width, height, scale, photos, frames)
    area = width * height / (224 * scale) ** 2
    colors = list(COLORS)
    for sort in rng.choice(5, min(60, 4 + int(rng.uniform(10, 26) * area)), p=(0.22, 0.32, 0.24, 0.1, 0.12)):
        color = colors[rng.integers(len(colors))]
        if sort == 0:
            canvas.shape(LARGE[rng.integers(len(LARGE))], color)
        elif sort == 1:
            canvas.shape(TINY[rng.integers(len(TINY))], color)
        elif sort == 2:
            canvas.thing(NAMES[rng.integers(len(NAMES))])
        elif sort == 3:
            canvas.text("digit", str(rng.integers(10)))
        else:
            canvas.text("sign", WORDS[rng.integers(len(WORDS))])
    return NativeScene(np.stack(canvas.frames), background, scale, canvas.items, canvas.owner)


def draw_native(
    rng: np.random.Generator, width: int, height: int, scale: float, photos=(), level: float = 1.0
) -> NativeScene:
    """Draw a scene for questions. `level` is 0 for few items and 1 for as many as in the first model's images."""
    canvas, background = _start(rng, width, height, scale, photos)
    colors = list(COLORS)
    twin, crowd, single, extra, _absent = (str(k) for k in rng.permutation(LARGE))

    def color() -> str:
        return colors[rng.integers(len(colors))]

    def clear(x: float, y: float) -> bool:
        return clear_of_middle(x, y, width, height)

    def add_things() -> None:
        for name in rng.choice(NAMES, int(rng.choice(4, p=(0.15, 0.45, 0.25, 0.15))), replace=False):
            canvas.thing(str(name), clear)

    def add_text() -> None:
        if rng.random() < 0.4 + 0.6 * level:
            canvas.text("sign", WORDS[rng.integers(len(WORDS))])
        if rng.random() < 0.4 + 0.6 * level:
            canvas.text("digit", str(rng.integers(10)))

    def add_tiny() -> None:
        kinds = [str(k) for k in rng.permutation(TINY)]
        counts = (1, 1, int(rng.integers(2, 6)), int(rng.integers(0, 5)))
        for i, (sort, n) in enumerate(zip(kinds, counts, strict=True)):
            for _ in range(n if i == 0 or rng.random() < level else 0):
                canvas.shape(sort, color())

    def add_pair() -> None:
        canvas.shape(single, color(), clear)
        pair = [str(c) for c in rng.choice(colors, 2, replace=False)]
        first = canvas.shape(twin, pair[0])
        if first and rng.random() < 0.9:
            x, y = first.center
            canvas.shape(twin, pair[1], lambda a, b: abs(a - x) > width / 4 or abs(b - y) > height / 4)

    def add_crowd() -> None:
        n = int(rng.choice((0, 1, 3, 4), p=(0.2, 0.2, 0.3, 0.3))) if rng.random() < 0.3 + 0.7 * level else 0
        for sort, times in ((crowd, n), (extra, int(rng.random() < 0.4))):
            for _ in range(times):
                canvas.shape(sort, color())

    parts = [add_pair, add_text, add_things, add_crowd, add_tiny]
    if width * height < (200 * scale) ** 2:  # not all parts fit: use a random order
        parts = [parts[i] for i in rng.permutation(5)]
    for part in parts:
        part()
    scene = NativeScene(np.stack(canvas.frames), background, scale, canvas.items, canvas.owner)
    scene.questions = ask(scene)
    return scene


def clear_of_middle(x: float, y: float, width: int, height: int) -> bool:
    return abs(x - width / 2) > 0.08 * width and abs(y - height / 2) > 0.08 * height


def quadrant(item: Item, width: int, height: int) -> str:
    x, y = item.center
    return POSITIONS[2 * (y > height / 2) + (x > width / 2)]


def ask(scene: NativeScene) -> list[SceneQuestion]:
    """Return every question with one clear answer, worded as in `tokenprune_demo.scenes`, and thing questions."""
    width, height = scene.size
    groups: dict[str, list[Item]] = {}
    for item in scene.items:
        groups.setdefault(item.what, []).append(item)
    out = []

    def add(kind: str, text: str, answer: str, items=()) -> None:
        out.append(SceneQuestion(kind, text, answer, tuple(i.box for i in items)))

    def clear(item: Item) -> bool:
        return clear_of_middle(*item.center, width, height)

    for sort in LARGE:
        group = groups.get(sort, [])
        add("presence", f"is there a {sort}?", "yes" if group else "no", group)
        if len(group) < 5:
            add("count", f"how many {sort}s?", str(len(group)), group)
        if len(group) == 1:
            add("colour", f"what color is the {sort}?", group[0].value, group)
            if clear(group[0]):
                add("position", f"where is the {sort}?", quadrant(group[0], width, height), group)
        if len(group) == 2 and group[0].value != group[1].value:
            for axis, sides in enumerate((("left", "right"), ("upper", "lower"))):
                first, last = sorted(group, key=lambda i: i.center[axis])
                if last.center[axis] - first.center[axis] > 0.2 * (width, height)[axis]:
                    for side, item in zip(sides, (first, last), strict=True):
                        add("grounding", f"what color is the {side} {sort}?", item.value, (item,))
    for sort in TINY:
        if len(groups.get(sort, [])) == 1:
            add("small", f"what color is the tiny {sort}?", groups[sort][0].value, groups[sort])
    readings = (("digit", "digits", "which digit is written?"), ("sign", "word", "what does the sign say?"))
    for sort, kind, text in readings:
        if len(groups.get(sort, [])) == 1:
            add(kind, text, groups[sort][0].value, groups[sort])
    things = groups.get("thing", [])
    if len(things) == 1:
        add("thing", "which thing is shown?", things[0].value, things)
    else:
        corners = [quadrant(i, width, height) if clear(i) else None for i in things]
        if None not in corners:
            for item, corner in zip(things, corners, strict=True):
                if corners.count(corner) == 1:
                    add("thing", f"which thing is {corner}?", item.value, (item,))
    return out


def photographs(split: str) -> tuple[Image.Image, ...]:
    return load_photos(split)
