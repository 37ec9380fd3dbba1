# SPDX-License-Identifier: Apache-2.0
"""Kinds of questions about drawn videos, with the placement and drawing of their objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from PIL import Image, ImageDraw

from tokenprune_demo.scenes import COLORS, LARGE, TINY, WORDS, Box, _draw_shape_masks, _load_font

FRAMES = 8
ANSWERS: dict[str, tuple[str, ...]] = {
    "direction": ("left", "right", "up", "down"),
    "order": ("first", "second"),  # which of the two named objects; the answer is its name
    "events": ("0", "1", "2", "3", "4"),
    "rare": tuple(COLORS),
    "text": WORDS,
    "when": ("start", "middle", "end"),
    "still": tuple(COLORS),
    "change": tuple(COLORS),
}
VIDEO_KINDS = tuple(ANSWERS)
TIMED = ("direction", "order", "when")  # kinds that need the order of the frames
CHANCE = {kind: 1 / len(answers) for kind, answers in ANSWERS.items()}
CHANCE_SHUFFLED = CHANCE | {"direction": 1 / 2}  # shuffled frames show the axis of the movement
TEXTS = {
    "direction": "which way does the {} move?",
    "order": "what came first, the {} or the {}?",
    "events": "how many times did the {} blink?",
    "rare": "what color was the tiny {}?",
    "text": "which word was shown?",
    "when": "was the {} at the start, the middle or the end?",
    "still": "what color is the {}?",
    "change": "what color was the {} at the end?",
}
_SLIVER = 6  # narrower parts of an object at the edge (in pixels) are not evidence
Region = tuple[int, Box]  # index of a frame or image, and a box (left, top, right, bottom, in pixels)


@dataclass(frozen=True)
class DrawnQuestion:
    """One question about a video or several images.

    Attributes:
        kind: Kind of question.
        text: The question.
        answer: The answer.
        looks: Evidence. Each look is a set of regions, any of which is enough. All looks are needed.
    """

    kind: str
    text: str
    answer: str
    looks: tuple[tuple[Region, ...], ...]

    @property
    def boxes(self) -> tuple[Region, ...]:
        """All regions with evidence."""
        return tuple(region for look in self.looks for region in look)


@dataclass(frozen=True)
class Thing:
    """One drawn object.

    Attributes:
        what: A shape or "sign".
        values: Per frame the colour, "<colour> to <colour>" during a slow change, or the word. None while invisible.
        boxes: Per frame its boxes (also while invisible). Several if it wraps around an edge.
    """

    what: str
    values: tuple[str | None, ...]
    boxes: tuple[tuple[Box, ...], ...]

    def looks(self, frames: Sequence[int]) -> tuple[tuple[Region, ...], ...]:
        """Return one look per frame."""
        return tuple(tuple((frame, box) for box in self.boxes[frame]) for frame in frames)

    def look(self, frames: Sequence[int]) -> tuple[tuple[Region, ...], ...]:
        """Return a single look at any frame in `frames`."""
        return (tuple(region for look in self.looks(frames) for region in look),)


class ActStage:
    """Draw objects on the frames of a ground without overlap in space and time, and add their questions."""

    def __init__(self, rng: np.random.Generator, grounds: list[Image.Image]) -> None:
        self.rng, self.grounds = rng, grounds
        self.width, self.height = grounds[0].size
        self.things: list[Thing] = []
        self.questions: list[DrawnQuestion] = []
        self.taken = np.zeros((0, 4))
        self.light = np.mean([np.asarray(grounds[frame].convert("L")).mean() for frame in (0, -1)]) > 105
        tiny = [str(shape) for shape in rng.permutation(TINY)]
        self.tiny, rest = tiny[:2], [*LARGE, *tiny[2:]]
        self.shapes = [rest[index] for index in rng.permutation(len(rest))]

    def act(self, kind: str, answer: str) -> None:
        """Add the objects and the question of a kind if they fit on the frames.

        The fit and the number of `rng` calls do not depend on the answer.
        """
        getattr(self, f"_{kind}")(answer)

    def _direction(self, answer: str) -> None:
        step = int(self.rng.integers(5, 10)) * (1 if answer in ("right", "down") else -1)
        radius, across = self._choose_radius(), answer in ("left", "right")
        # All positions are equally likely, also across an edge. Otherwise a frame would reveal the direction.
        x, y = int(self.rng.integers(self.width)), int(self.rng.integers(self.height))
        path = [
            ((x + step * frame * across) % self.width, (y + step * frame * (not across)) % self.height)
            for frame in range(FRAMES)
        ]
        color = self._choose_color()
        star = self._shape(self.shapes.pop(), [color] * FRAMES, radius, path)
        self._ask("direction", answer, star.looks(range(FRAMES)), star.what)

    def _order(self, answer: str) -> None:
        if len(self.shapes) < 2 or len(spots := self._find(2)) < 2:
            return
        early = int(self.rng.integers(1, FRAMES - 4))
        late = int(self.rng.integers(early + 3, FRAMES - 1))
        starts = (early, late) if answer == "first" else (late, early)
        pair = [self._add_brief_shape(start, spot) for start, spot in zip(starts, spots, strict=True)]
        looks = tuple(
            look for thing, start in zip(pair, starts, strict=True) for look in thing.look(range(start, start + 2))
        )
        names = [thing.what for thing in pair]
        self._ask("order", names[answer == "second"], looks, *names)

    def _events(self, answer: str) -> None:
        off = _choose_frames(self.rng, int(answer))
        color = self._choose_color()
        if thing := self._place_shape([None if frame in off else color for frame in range(FRAMES)]):
            self._ask("events", answer, thing.looks(range(FRAMES)), thing.what)

    def _rare(self, answer: str) -> None:
        # A second tiny object of another shape, mostly in another frame, is a distractor.
        for spot, color in zip(self._find(2, tiny=True), (answer, self._choose_color()), strict=False):
            frame = int(self.rng.integers(1, FRAMES))
            colors = [color if index == frame else None for index in range(FRAMES)]
            thing = self._shape(self.tiny.pop(), colors, spot[0], [spot[1:]] * FRAMES)
            self._ask("rare", color, thing.look([frame]), thing.what)

    def _text(self, answer: str) -> None:
        font = _load_font(int(self.rng.integers(16, 21)))
        # All words get the same room, so that long words are not left out more often.
        ends = [font.getbbox(word) for word in WORDS]
        left, top = min(end[0] for end in ends), min(end[1] for end in ends)
        width, height = max(end[2] for end in ends) - left + 8, max(end[3] for end in ends) - top + 8
        corner = self._find_corner(width, height)
        if corner is None:
            return
        x, y = corner
        box, frame = (x, y, x + width, y + height), int(self.rng.integers(1, FRAMES))
        dark, light = (tuple(int(v) for v in self.rng.integers(low, low + 45, 3)) for low in (0, 211))
        ink, plate = (dark, light) if self.rng.random() < 0.5 else (light, dark)
        pen = ImageDraw.Draw(self.grounds[frame])
        pen.rectangle((box[0], box[1], box[2] - 1, box[3] - 1), fill=plate, outline=ink)
        pen.text((x + 4 - left, y + 4 - top), answer, fill=ink, font=font)
        values = tuple(answer if index == frame else None for index in range(FRAMES))
        sign = self._keep(Thing("sign", values, ((box,),) * FRAMES))
        self._ask("text", answer, sign.look([frame]))

    def _when(self, answer: str) -> None:
        start = 1 + 2 * ANSWERS["when"].index(answer) + int(self.rng.random() < 0.5 and answer == "end")
        if self.shapes and (places := self._find(1)):
            thing = self._add_brief_shape(start, places[0])
            self._ask("when", answer, thing.look(range(start, start + 2)), thing.what)

    def _still(self, answer: str) -> None:
        if thing := self._place_shape([answer] * FRAMES):
            self._ask("still", answer, thing.look(range(FRAMES)), thing.what)

    def _change(self, answer: str) -> None:
        before, step = self._choose_color(), int(self.rng.integers(2, FRAMES - 1))
        values = [before if frame < step else answer for frame in range(FRAMES)]
        if self.rng.random() < 0.5 and before != answer:
            values = [before, *[f"{before} to {answer}"] * (FRAMES - 3), answer, answer]
        if thing := self._place_shape(values):
            last = max((frame + 1 for frame in range(FRAMES) if values[frame] != answer), default=0)
            self._ask("change", answer, thing.look(range(last, FRAMES)), thing.what)

    def _ask(self, kind: str, answer: str, looks: tuple[tuple[Region, ...], ...], *names: str) -> None:
        self.questions.append(DrawnQuestion(kind, TEXTS[kind].format(*names), answer, looks))

    def _choose_color(self) -> str:
        return list(COLORS)[self.rng.integers(len(COLORS))]

    def _choose_radius(self) -> int:
        large = min(self.width, self.height) >= 160
        return int(self.rng.integers(13, 19) if large else self.rng.integers(12, 15))

    def _place_shape(self, values: Sequence[str | None]) -> Thing | None:
        if not self.shapes or not (places := self._find(1)):
            return None
        return self._shape(self.shapes.pop(), values, places[0][0], [places[0][1:]] * FRAMES)

    def _add_brief_shape(self, start: int, spot: tuple[int, int, int]) -> Thing:
        """Add an object that is visible for two frames."""
        color = self._choose_color()
        colors = [color if frame in (start, start + 1) else None for frame in range(FRAMES)]
        return self._shape(self.shapes.pop(), colors, spot[0], [spot[1:]] * FRAMES)

    def _find(self, count: int, tiny: bool = False) -> list[tuple[int, int, int]]:
        """Return up to `count` free spots (radius, left, top) and mark them as taken."""
        spots = []
        for _ in range(count):
            radius = int(self.rng.integers(6, 9)) if tiny else self._choose_radius()
            side = 2 * radius + 4
            if (corner := self._find_corner(side, side)) is not None:
                spots.append((radius, *corner))
                x, y = corner
                self.taken = np.vstack([self.taken, (x, y, x + side, y + side)])
        return spots

    def _find_corner(self, width: int, height: int) -> tuple[int, int] | None:
        xs = self.rng.integers(2, self.width - width - 1, 80)
        ys = self.rng.integers(2, self.height - height - 1, 80)
        boxes, gap = self.taken[None], 2
        clash = (boxes[..., 0] < (xs + width + gap)[:, None]) & (boxes[..., 2] > (xs - gap)[:, None])
        clash &= (boxes[..., 1] < (ys + height + gap)[:, None]) & (boxes[..., 3] > (ys - gap)[:, None])
        free = (~clash.any(1)).nonzero()[0]
        return (int(xs[free[0]]), int(ys[free[0]])) if len(free) else None

    def _shape(self, what: str, values: Sequence[str | None], radius: int, path: Sequence[tuple[int, int]]) -> Thing:
        """Draw a shape at its position (left, top) and in its colour in each frame. None: invisible."""
        outline_mask, inside = _draw_shape_masks(what, radius, 1.5 if radius > 14 else 0.75)
        outline = (15, 15, 15) if self.light else (245, 245, 245)
        shade = self.rng.integers(-12, 13, 3)
        boxes = []
        for frame, (left, top) in enumerate(path):
            value, image = values[frame], self.grounds[frame]
            mine = []
            for x, y in product((left, left - self.width), (top, top - self.height)):
                right, bottom = min(x + outline_mask.width, self.width), min(y + outline_mask.height, self.height)
                box = (max(x, 0), max(y, 0), right, bottom)
                if box[0] >= box[2] or box[1] >= box[3]:
                    continue
                if value is not None:
                    fill = np.clip(_compute_rgb(value, frame) + shade, 0, 255)
                    image.paste(outline, (x, y), outline_mask)
                    image.paste(tuple(int(v) for v in fill), (x, y), inside)
                if box[2] - box[0] >= _SLIVER and box[3] - box[1] >= _SLIVER:
                    mine.append(box)
            boxes.append(tuple(sorted(mine)))
        return self._keep(Thing(what, tuple(values), tuple(boxes)))

    def _keep(self, thing: Thing) -> Thing:
        self.things.append(thing)
        self.taken = np.vstack([self.taken, *(box for boxes in thing.boxes for box in boxes)])
        return thing


def _compute_rgb(value: str, frame: int) -> np.ndarray:
    """Return the colour in a frame. A slow change covers all frames except the first and the last two."""
    before, _, after = value.partition(" to ")
    part = frame / (FRAMES - 2) if after else 0.0
    return np.array(COLORS[before]) * (1 - part) + np.array(COLORS[after or before]) * part


def _choose_frames(rng: np.random.Generator, count: int) -> set[int]:
    """Return `count` frames except the first, without neighbours, uniformly at random."""
    free = FRAMES - 1 - max(count - 1, 0)
    chosen = np.sort(rng.random(FRAMES - 1)[:free].argsort()[:count])
    return {1 + int(frame) + index for index, frame in enumerate(chosen)}
