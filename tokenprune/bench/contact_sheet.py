# SPDX-License-Identifier: Apache-2.0
"""Draw which patches of the images of a prompt, or of a video's frames, a method keeps, drops and merges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from transformers.utils import logging

import tokenprune
from tokenprune.bench import draw
from tokenprune.bench.backend import patched_by
from tokenprune.bench.grids import Grid, grids_of
from tokenprune.bench.model import Model
from tokenprune.bench.token_scores import placed_scores, watched_scores
from tokenprune.errors import OptionError
from tokenprune.spelling import methods_of, setting_of

CELL, _GAP = 16, 6  # pixels of a patch in the drawing, and between frames
_ACROSS = 8  # frames side by side; more go below


@dataclass(frozen=True)
class Shown:
    """What `tokenprune show` tells of a prompt.

    image: the drawing. before, after: the answers. tokens_in, tokens_out: visual tokens before and after. frames: for
    each frame as the model has it (or image) how many of its tokens stay, and how many it has.
    """

    image: Image.Image
    before: str
    after: str
    tokens_in: int
    tokens_out: int
    stats: tokenprune.Stats
    frames: list[tuple[int, int]]


def show(subject: Model, images: Sequence[Image.Image], question: str, method: str, keep: float | int) -> Shown:
    """Ask once without and once with `method`, and draw what it kept: of one image beside it, as the model sees it;
    of several below each.

    A model that takes videos gets several as a video, unless the method acts on pixels; others get images of one
    prompt. Raises UnsupportedSetupError where the tokens of an image form no grid, OptionError for a method that
    chooses between images.
    """
    setting = setting_of(method, keep)
    draw.check_drawable(setting)
    video = len(images) > 1 and as_video(subject, method)
    full = asked(subject, images, question, video)
    (before,) = subject.generate(full)
    seen = seen_under(subject, images, question, setting, video)
    if len(images) == 1:
        original = draw.seen_image(subject, full, images[0])
        drawing = row(_drawn(seen, draw.CELL, original), gap=draw.CELL // 2)
    else:
        drawing = sheet(seen)
    kept = seen.kept_of_frames()
    return Shown(drawing, before, seen.answer, subject.visual_tokens(full), int(seen.kept.sum()), seen.stats, kept)


def fitting(
    subject: Model, read: Callable[[int], list[Image.Image]], most: int, question: str, method: str
) -> tuple[list[Image.Image], str | None]:
    """Return as many frames as the model's context holds beside the question and the answer, and a sentence that says
    how many were left out; None where none were.

    read: returns frames of a video, or images, evenly chosen where there are too many. most: how many are
    wanted. Raises OptionError where not even one fits.
    """
    frames = read(most)
    wanted, context = len(frames), getattr(subject.adapter.text_config, "max_position_embeddings", None)
    said = None
    while context is not None:
        with _quiet():
            inputs = asked(subject, frames, question, len(frames) > 1 and as_video(subject, method))
        number, visual = len(frames), subject.visual_tokens(inputs)
        text = inputs["input_ids"].shape[1] - visual + subject.max_new_tokens
        if visual + text <= context:
            break
        fewer = min(number - 1, (context - text) * number // visual)
        if fewer < 1:
            raise OptionError(
                f"an image takes {visual // number} tokens and the rest of the prompt {text}, but this model's context"
                f" is {context}: ask a shorter question, or take a smaller image"
            )
        needed = f"all of them and the question take {visual + text} tokens, and this model's context is {context}"
        said = said or needed
        frames = read(fewer)
    return frames, said and f"{len(frames)} of the {wanted} frames are taken: {said}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the tokenizer from warning of a prompt that is only measured."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@dataclass(frozen=True)
class Seen:
    """What a method did with one prompt: its frames, as the model sees them, the grid of each, and for all their tokens
    `kept` and `groups` as of `draw.patches`."""

    frames: list[Image.Image]
    grids: list[Grid]
    kept: np.ndarray
    groups: np.ndarray
    answer: str = ""
    stats: tokenprune.Stats | None = None
    scores: np.ndarray | None = None  # float, of all tokens, where a method ranks them by one; NaN: has none

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """Return what belongs to each frame's tokens as `[height, width]`; what comes behind the last is left out."""
        ends = np.cumsum([height * width for height, width in self.grids])
        return [
            values[end - height * width : end].reshape(height, width)
            for (height, width), end in zip(self.grids, ends, strict=True)
        ]

    def drawings(self, cell: int, sizes: Sequence[tuple[int, int]] | None = None) -> list[Image.Image]:
        """Return the drawing of each frame. cell: pixels of a patch; sizes: or the size of each drawing."""
        groups, merged = self.split(self.groups), self.split(draw.shared(self.groups))
        fills = draw.mean_colors(self.frames, groups)
        parts = zip(self.frames, self.split(self.kept), groups, merged, fills, strict=True)
        return [
            draw.draw(frame, kept, own, shared, cell, fill, None if sizes is None else sizes[place])
            for place, (frame, kept, own, shared, fill) in enumerate(parts)
        ]

    def kept_of_frames(self) -> list[tuple[int, int]]:
        """Return for each frame how many of its tokens stay, and how many it has."""
        sizes = [height * width for height, width in self.grids]
        starts = np.cumsum([0, *sizes])
        return [(int(self.kept[start : start + size].sum()), size) for start, size in zip(starts, sizes, strict=False)]


def look(
    subject: Model,
    images: Sequence[Image.Image],
    question: str,
    setting: dict[str, Any],
    video: bool,
    side: int,
    labels: Sequence[str] = (),
) -> tuple[Image.Image, int]:
    """Ask under a setting, and return the drawing of what it kept of each image, side by side, and how many tokens that
    is; raises like `show`.

    setting: as `patch(config=...)` takes it. video: whether the images are a video. side: pixels of a drawing's longer
    side, about. labels: the text before each image.
    """
    draw.check_drawable(setting)
    seen = seen_under(subject, images, question, setting, video, labels)
    cell = max(2, side // max(max(grid) for grid in seen.grids))
    return row(_drawn(seen, cell)), int(seen.kept.sum())


def asked(
    subject: Model, frames: Sequence[Image.Image], question: str, video: bool, labels: Sequence[str] = ()
) -> dict[str, Any]:
    if video:
        return subject.video_inputs(frames, question)
    return subject.inputs([list(frames)], [question], [labels] if labels else ())


def seen_under(
    subject: Model,
    frames: Sequence[Image.Image],
    question: str,
    setting: dict[str, Any],
    video: bool,
    labels: Sequence[str] = (),
) -> Seen:
    with patched_by(subject, setting, video, record=True), watched_scores(subject.model) as found:
        inputs = asked(subject, frames, question, video, labels)
        grids = grids_of(subject, inputs, len(frames), video)
        (answer,) = subject.generate(inputs)
        stats = tokenprune.stats(subject.model)
    kept, groups = draw.patches(subject, inputs, stats)
    scores = placed_scores(subject, inputs, stats, found)
    # A model that merges frames in time has fewer of them: each shows its first.
    step = math.ceil(len(frames) / len(grids))
    shown = [
        frames[place] if video else draw.seen_image(subject, inputs, frames[place], place)
        for place in (min(number * step, len(frames) - 1) for number in range(len(grids)))
    ]
    return Seen(shown, grids, kept, groups, answer, stats, scores)


def as_video(subject: Model, method: str) -> bool:
    """Whether a model gets several images as a video: if it takes one, and no method of the setting acts on pixels."""
    pixels = any(one.site is tokenprune.Site.PRE_ENCODER for one in methods_of(method))
    return takes_video(subject) and not pixels


def takes_video(subject: Model) -> bool:
    """Whether both the model and its processor take videos."""
    able = getattr(subject.processor, "video_processor", None) is not None
    return able and "video" in subject.adapter.placeholders


def sheet(seen: Seen) -> Image.Image:
    """Return the frames side by side, eight at most in a line, and below each what is kept of it; a group has one
    colour in all frames."""
    drawings = _drawn(seen, CELL)
    originals = [_resized(frame, drawing) for frame, drawing in zip(seen.frames, drawings, strict=True)]
    lines = []
    for start in range(0, len(drawings), _ACROSS):
        lines += [row(some[start : start + _ACROSS]) for some in (originals, drawings)]
    height = sum(line.height + _GAP for line in lines) - _GAP
    image, top = Image.new("RGB", (max(line.width for line in lines), height), "white"), 0
    for line in lines:
        image.paste(line, (0, top))
        top += line.height + _GAP
    return image


def _drawn(seen: Seen, cell: int, *before: Image.Image) -> list[Image.Image]:
    """Return the drawing of each frame, behind `before`, in the size of the first drawing."""
    drawings = seen.drawings(cell)
    return [*(_resized(one, drawings[0]) for one in before), *drawings]


def _resized(image: Image.Image, like: Image.Image) -> Image.Image:
    return image.convert("RGB").resize(like.size, Image.Resampling.BICUBIC)


def row(parts: Sequence[Image.Image], gap: int = _GAP) -> Image.Image:
    """Return images side by side."""
    width = sum(part.width + gap for part in parts) - gap
    image, left = Image.new("RGB", (width, max(part.height for part in parts)), "white"), 0
    for part in parts:
        image.paste(part, (left, 0))
        left += part.width + gap
    return image
