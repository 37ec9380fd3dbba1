# SPDX-License-Identifier: Apache-2.0
"""Draw which patches of a video's frames, or of several pictures of one prompt, a method keeps, drops and merges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

import tokenprune
from tokenprune.bench import draw
from tokenprune.bench.model import Subject
from tokenprune.bench.suite import patched
from tokenprune.errors import UnsupportedSetupError
from tokenprune.registry import method_class

CELL, _GAP = 16, 6  # pixels of a patch in the drawing, and between frames
Grid = tuple[int, int]


def show(subject: Subject, frames: Sequence[Image.Image], question: str, method: str, keep: float | int) -> draw.Shown:
    """Ask once without and once with `method`, and draw what it kept of each frame, below the frames.

    A model that takes videos gets one, unless the method acts on pixels; others get the frames as pictures of one
    prompt. Raises UnsupportedSetupError where the tokens of a frame form no grid.
    """
    draw.check_drawable(method)
    film = takes_video(subject) and method_class(method).site is not tokenprune.Site.PRE_ENCODER

    def make() -> dict[str, Any]:
        return subject.film_inputs(frames, question) if film else subject.inputs([list(frames)], [question])

    full = make()
    (before,) = subject.generate(full)
    with patched(subject, method, keep, record=True):
        inputs = make()
        grids = grids_of(subject, inputs, len(frames), film)
        (after,) = subject.generate(inputs)
        stats = tokenprune.stats(subject.model)
    kept, groups = draw.patches(subject, inputs, stats)
    # A model that merges frames in time has fewer of them: each shows its first.
    step = math.ceil(len(frames) / len(grids))
    shown = [
        frames[place] if film else draw.seen_picture(subject, inputs, frames[place], place)
        for place in (min(number * step, len(frames) - 1) for number in range(len(grids)))
    ]
    image = strip(shown, grids, kept, groups)
    return draw.Shown(image, before, after, subject.visual_tokens(full), int(kept.sum()), stats)


def takes_video(subject: Subject) -> bool:
    """Whether both the model and its processor take videos."""
    able = getattr(subject.processor, "video_processor", None) is not None
    return able and "video" in subject.adapter.placeholders


def grids_of(subject: Subject, inputs: dict[str, Any], frames: int, film: bool) -> list[Grid]:
    """Return (height, width) in tokens of each frame of the one prompt, in the order of its tokens."""
    family, count = subject.model.config.model_type, subject.visual_tokens(inputs)
    told = subject.adapter.grids("video" if film else "image", inputs)
    if told is None and not film:
        if len(inputs["pixel_values"]) != frames or inputs["pixel_values"].ndim != 4:
            raise UnsupportedSetupError(f"{family!r} cuts pictures into tiles; `show` draws pictures that are one grid")
        side = math.isqrt(count // frames)
        told = [(1, side, side)] * frames
    grids = [(height, width) for times, height, width in told or [] for _ in range(times)]
    if not grids or sum(height * width for height, width in grids) != count:
        raise UnsupportedSetupError(f"the {count} visual tokens of {family!r} form no grids that `show` knows of")
    return grids


def strip(frames: Sequence[Image.Image], grids: Sequence[Grid], kept: np.ndarray, groups: np.ndarray) -> Image.Image:
    """Return the frames side by side, and below each what is kept of it.

    kept, groups: `[tokens]` of all frames, see `draw.patches`; a group has one colour in all frames.
    """
    merged, ends = draw.shared(groups), np.cumsum([height * width for height, width in grids])
    parts = [array[: ends[-1]] for array in (kept, groups, merged)]
    columns = []
    for frame, grid, end in zip(frames, grids, ends, strict=True):
        own = slice(end - grid[0] * grid[1], end)
        drawing = draw.draw(frame, *(part[own].reshape(grid) for part in parts), cell=CELL)
        columns.append((frame.convert("RGB").resize(drawing.size, Image.Resampling.BICUBIC), drawing))
    width = sum(drawing.width + _GAP for _, drawing in columns) - _GAP
    tallest = max(drawing.height for _, drawing in columns)
    image, left = Image.new("RGB", (width, 2 * tallest + _GAP), "white"), 0
    for original, drawing in columns:
        image.paste(original, (left, 0))
        image.paste(drawing, (left, tallest + _GAP))
        left += drawing.width + _GAP
    return image
