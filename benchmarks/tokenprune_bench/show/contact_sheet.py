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

from tokenprune.api import stats as stats_of
from tokenprune.errors import OptionError
from tokenprune.selection.method import Site
from tokenprune.settings import Setting
from tokenprune.statistics import Stats
from tokenprune_bench.profiling.model import Model
from tokenprune_bench.profiling.patched import patched_by
from tokenprune_bench.show import draw
from tokenprune_bench.show.grids import Grid, grids_of
from tokenprune_bench.show.token_scores import placed_scores, watched_scores

_GAP = 6  # pixels between frames


def fitting(
    subject: Model, read: Callable[[int], list[Image.Image]], most: int, question: str, setting: Setting
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
            inputs = asked(subject, frames, question, len(frames) > 1 and as_video(subject, setting))
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
class PromptView:
    """One method's view of a prompt: its frames, as the model sees them, the grid of each, and for all their tokens
    `kept` and `groups` as of `draw.patches`."""

    frames: list[Image.Image]
    grids: list[Grid]
    kept: np.ndarray
    groups: np.ndarray
    answer: str = ""
    stats: Stats | None = None
    scores: np.ndarray | None = None  # float, of all tokens, where a method ranks them by one; NaN: has none

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """Return what belongs to each frame's tokens as `[height, width]`; what comes after the last is left out."""
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
    setting: Setting,
    video: bool,
    side: int,
    labels: Sequence[str] = (),
) -> tuple[Image.Image, int]:
    """Ask under a setting, and return the drawing of what it kept of each image, side by side, and how many tokens that
    is. Raises UnsupportedSetupError where the tokens of an image form no grid, OptionError for a method that chooses
    between images.

    video: whether the images are a video. side: pixels of a drawing's longer side, of every method. labels: the text
    before each image.
    """
    draw.check_drawable(setting)
    seen = seen_under(subject, images, question, setting, video, labels)
    return row(seen.drawings(0, draw.sizes_of(seen.frames, side))), int(seen.kept.sum())


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
    setting: Setting,
    video: bool,
    labels: Sequence[str] = (),
) -> PromptView:
    with patched_by(subject, setting, video, record=True), watched_scores(subject.model) as found:
        inputs = asked(subject, frames, question, video, labels)
        shown, grids = seen_frames(subject, inputs, frames, video)
        (answer,) = subject.generate(inputs)
        stats = stats_of(subject.model)
    kept, groups = draw.patches(subject, inputs, stats)
    scores = placed_scores(subject, inputs, stats, found)
    return PromptView(shown, grids, kept, groups, answer, stats, scores)


def seen_frames(
    subject: Model, inputs: dict[str, Any], frames: Sequence[Image.Image], video: bool
) -> tuple[list[Image.Image], list[Grid]]:
    """Return the images, or frames, as a model has them, and the grid of each.

    A model that merges frames in time has fewer of them: each shows its first. Raises UnsupportedSetupError where the
    tokens form no grid.
    """
    grids = grids_of(subject, inputs, len(frames), video)
    step = math.ceil(len(frames) / len(grids))
    places = [min(number * step, len(frames) - 1) for number in range(len(grids))]
    shown = [
        frames[place].convert("RGB") if video else draw.seen_image(subject, inputs, frames[place], place)
        for place in places
    ]
    return shown, grids


def as_video(subject: Model, setting: Setting) -> bool:
    """Return True if a model gets several images as a video: if it takes one, and no method of the setting acts on
    pixels."""
    pixels = any(one.site is Site.PRE_ENCODER for one in setting.methods)
    return takes_video(subject) and not pixels


def takes_video(subject: Model) -> bool:
    """Return True if both the model and its processor take videos."""
    able = getattr(subject.processor, "video_processor", None) is not None
    return able and "video" in subject.adapter.placeholders


def row(parts: Sequence[Image.Image], gap: int = _GAP) -> Image.Image:
    """Return images side by side."""
    width = sum(part.width + gap for part in parts) - gap
    image, left = Image.new("RGB", (width, max(part.height for part in parts)), "white"), 0
    for part in parts:
        image.paste(part, (left, 0))
        left += part.width + gap
    return image
