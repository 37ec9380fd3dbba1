# SPDX-License-Identifier: Apache-2.0
"""Draw the patches of images or video frames that a method keeps, drops and merges."""

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
from tokenprune_bench.profiling.photo import Photo, get_preview, load_for
from tokenprune_bench.show import draw
from tokenprune_bench.show.grids import Grid, get_grids
from tokenprune_bench.show.token_scores import align_scores, record_scores

_GAP = 6  # pixels between frames


def fit_frames(
    subject: Model,
    read: Callable[[int], Sequence[Image.Image | Photo]],
    max_frames: int,
    question: str,
    setting: Setting,
) -> tuple[Sequence[Image.Image | Photo], str | None]:
    """Read as many frames as fit the model's context with the question and the answer.

    Args:
        subject: The model.
        read: Returns at most the given number of evenly spaced frames.
        most: Requested number of frames.
        question: The question.
        setting: The setting.

    Returns:
        The frames, and a note if frames were left out, else None.

    Raises:
        OptionError: If not even one frame fits.
    """
    frames = read(max_frames)
    num_requested, context = len(frames), getattr(subject.adapter.text_config, "max_position_embeddings", None)
    note = None
    while context is not None:
        with _quiet():
            inputs = build_inputs(subject, frames, question, len(frames) > 1 and is_video_input(subject, setting))
        num_frames, visual = len(frames), subject.visual_tokens(inputs)
        text = inputs["input_ids"].shape[1] - visual + subject.max_new_tokens
        if visual + text <= context:
            break
        fewer = min(num_frames - 1, (context - text) * num_frames // visual)
        if fewer < 1:
            raise OptionError(
                f"An image has {visual // num_frames} tokens and the text {text}, but the context is {context}. "
                "Use a shorter question or a smaller image."
            )
        needed = f"all frames and the question have {visual + text} tokens, but the context is {context}"
        note = note or needed
        frames = read(fewer)
    return frames, note and f"{len(frames)} of {num_requested} frames are used: {note}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the tokenizer warning about long prompts, which are only measured here."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@dataclass(frozen=True)
class PromptView:
    """A prompt as one method sees it.

    Attributes:
        frames: Frames as the model sees them.
        grids: Height and width in tokens of each frame.
        kept: Kept tokens, see `draw.patches`.
        groups: Group of each token, see `draw.patches`.
        answer: The answer.
        stats: Statistics of the call.
        scores: Score of each token (NaN without score), or None if the method does not rank tokens.
    """

    frames: list[Image.Image]
    grids: list[Grid]
    kept: np.ndarray
    groups: np.ndarray
    answer: str = ""
    stats: Stats | None = None
    scores: np.ndarray | None = None

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """Split values of all tokens into one (height, width) array per frame, without tokens after the last frame."""
        ends = np.cumsum([height * width for height, width in self.grids])
        return [
            values[end - height * width : end].reshape(height, width)
            for (height, width), end in zip(self.grids, ends, strict=True)
        ]

    def drawings(self, cell: int, sizes: Sequence[tuple[int, int]] | None = None) -> list[Image.Image]:
        """Return the drawing of each frame, with patches of `cell` pixels or of the given sizes."""
        groups, merged = self.split(self.groups), self.split(draw.shared(self.groups))
        fills = draw.mean_colors(self.frames, groups)
        parts = zip(self.frames, self.split(self.kept), groups, merged, fills, strict=True)
        return [
            draw.draw(frame, kept, group, shared, cell, fill, None if sizes is None else sizes[index])
            for index, (frame, kept, group, shared, fill) in enumerate(parts)
        ]

    def count_kept(self) -> list[tuple[int, int]]:
        """Return the number of kept tokens and of all tokens, for each frame."""
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
    """Draw the kept tokens of each image, side by side.

    Args:
        subject: The model.
        images: The images.
        question: The question.
        setting: The setting.
        video: Whether the images are a video.
        side: Longer side of a drawing in pixels.
        labels: Text before each image.

    Returns:
        The drawing, and the number of kept tokens.

    Raises:
        UnsupportedSetupError: If the tokens of an image do not form a grid.
        OptionError: If the method selects between images.
    """
    draw.check_drawable(setting)
    view = view_prompt(subject, images, question, setting, video, labels)
    return row(view.drawings(0, draw.compute_sizes(view.frames, side))), int(view.kept.sum())


def build_inputs(
    subject: Model, frames: Sequence[Image.Image | Photo], question: str, video: bool, labels: Sequence[str] = ()
) -> dict[str, Any]:
    images = [load_for(frame, subject.processor) for frame in frames]
    if video:
        return subject.video_inputs(images, question)
    return subject.inputs([images], [question], [labels] if labels else ())


def view_prompt(
    subject: Model,
    frames: Sequence[Image.Image | Photo],
    question: str,
    setting: Setting,
    video: bool,
    labels: Sequence[str] = (),
) -> PromptView:
    with patched_by(subject, setting, video, record=True), record_scores(subject.model) as recorded:
        inputs = build_inputs(subject, frames, question, video, labels)
        shown, grids = seen_frames(subject, inputs, [get_preview(frame) for frame in frames], video)
        (answer,) = subject.generate(inputs)
        stats = stats_of(subject.model)
    kept, groups = draw.patches(subject, inputs, stats)
    scores = align_scores(subject, inputs, stats, recorded)
    return PromptView(shown, grids, kept, groups, answer, stats, scores)


def seen_frames(
    subject: Model, inputs: dict[str, Any], frames: Sequence[Image.Image], video: bool
) -> tuple[list[Image.Image], list[Grid]]:
    """Return the images or frames as the model sees them, and their grids.

    A model that merges frames in time has fewer frames. Each shows the first of its merged frames.

    Raises:
        UnsupportedSetupError: If the tokens do not form a grid.
    """
    grids = get_grids(subject, inputs, len(frames), video)
    step = math.ceil(len(frames) / len(grids))
    indices = [min(index * step, len(frames) - 1) for index in range(len(grids))]
    shown = [
        frames[index].convert("RGB") if video else draw.seen_image(subject, inputs, frames[index], index)
        for index in indices
    ]
    return shown, grids


def is_video_input(subject: Model, setting: Setting) -> bool:
    """Return True if several images are passed as a video.

    The model must support videos, and no method of the setting may run on pixels.
    """
    pixels = any(method.site is Site.PRE_ENCODER for method in setting.methods)
    return takes_video(subject) and not pixels


def takes_video(subject: Model) -> bool:
    """Return True if the model and its processor support videos."""
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
