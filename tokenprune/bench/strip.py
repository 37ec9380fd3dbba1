# SPDX-License-Identifier: Apache-2.0
"""Draw which patches of a video's frames, or of several pictures of one prompt, a method keeps, drops and merges."""

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
from tokenprune.bench.model import Subject
from tokenprune.bench.suite import patched
from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.registry import method_class

CELL, _GAP = 16, 6  # pixels of a patch in the drawing, and between frames
Grid = tuple[int, int]


def show(subject: Subject, frames: Sequence[Image.Image], question: str, method: str, keep: float | int) -> draw.Shown:
    """Ask once without and once with `method`, and draw what it kept of each frame, below the frames.

    A model that takes videos gets one, unless the method acts on pixels; others get the frames as pictures of one
    prompt. Raises UnsupportedSetupError where the tokens of a frame form no grid.
    """
    draw.check_drawable(method)
    film = _as_film(subject, method)
    full = _asked(subject, frames, question, film)
    (before,) = subject.generate(full)
    seen = _seen(subject, frames, question, method, keep, film)
    image = strip(seen.frames, seen.grids, seen.kept, seen.groups)
    return draw.Shown(image, before, seen.answer, subject.visual_tokens(full), int(seen.kept.sum()), seen.stats)


def fitting(
    subject: Subject, read: Callable[[int], list[Image.Image]], most: int, question: str, method: str
) -> tuple[list[Image.Image], str | None]:
    """Return as many frames as the model's context holds beside the question and the answer, and a sentence that says
    how many were left out; None where none were.

    read: returns frames of a video, or pictures, evenly chosen where there are more than it is told. most: how many are
    wanted. Raises OptionError where not even one fits.
    """
    frames = read(most)
    wanted, context = len(frames), getattr(subject.adapter.text_config, "max_position_embeddings", None)
    said = None
    while context is not None:
        with _quiet():
            inputs = _asked(subject, frames, question, len(frames) > 1 and _as_film(subject, method))
        number, visual = len(frames), subject.visual_tokens(inputs)
        text = inputs["input_ids"].shape[1] - visual + subject.max_new_tokens
        if visual + text <= context:
            break
        fewer = min(number - 1, (context - text) * number // visual)
        if fewer < 1:
            raise OptionError(
                f"a picture takes {visual // number} tokens and the rest of the prompt {text}, but this model's context"
                f" is {context}: ask a shorter question, or take a smaller picture"
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


def look(
    subject: Subject,
    frames: Sequence[Image.Image],
    question: str,
    method: str,
    keep: float | int,
    film: bool,
    side: int,
    **options: Any,
) -> draw.Look:
    """Ask with `method` and draw what it kept of each frame, side by side; raises like `show`.

    film: whether the frames are a video, not pictures of one prompt. side: pixels of a frame's longer side, about.
    options: of the method.
    """
    draw.check_drawable(method)
    seen = _seen(subject, frames, question, method, keep, film, **options)
    cell = max(2, side // max(max(grid) for grid in seen.grids))
    drawings = drawn(seen.frames, seen.grids, seen.kept, seen.groups, cell)
    return draw.Look(row(drawings), seen.answer, int(seen.kept.sum()), seen.stats)


@dataclass(frozen=True)
class _Seen:
    """What a method did: frames: as the model sees them. grids: of each. kept, groups: see `draw.patches`."""

    frames: list[Image.Image]
    grids: list[Grid]
    kept: np.ndarray
    groups: np.ndarray
    answer: str
    stats: tokenprune.Stats


def _asked(subject: Subject, frames: Sequence[Image.Image], question: str, film: bool) -> dict[str, Any]:
    return subject.film_inputs(frames, question) if film else subject.inputs([list(frames)], [question])


def _seen(
    subject: Subject,
    frames: Sequence[Image.Image],
    question: str,
    method: str,
    keep: float | int,
    film: bool,
    **options: Any,
) -> _Seen:
    with patched(subject, method, keep, film, record=True, **options):
        inputs = _asked(subject, frames, question, film)
        grids = grids_of(subject, inputs, len(frames), film)
        (answer,) = subject.generate(inputs)
        stats = tokenprune.stats(subject.model)
    kept, groups = draw.patches(subject, inputs, stats)
    # A model that merges frames in time has fewer of them: each shows its first.
    step = math.ceil(len(frames) / len(grids))
    shown = [
        frames[place] if film else draw.seen_picture(subject, inputs, frames[place], place)
        for place in (min(number * step, len(frames) - 1) for number in range(len(grids)))
    ]
    return _Seen(shown, grids, kept, groups, answer, stats)


def _as_film(subject: Subject, method: str) -> bool:
    return takes_video(subject) and method_class(method).site is not tokenprune.Site.PRE_ENCODER


def takes_video(subject: Subject) -> bool:
    """Whether both the model and its processor take videos."""
    able = getattr(subject.processor, "video_processor", None) is not None
    return able and "video" in subject.adapter.placeholders


def grids_of(subject: Subject, inputs: dict[str, Any], frames: int, film: bool) -> list[Grid]:
    """Return (height, width) in tokens of each frame of the one prompt, in the order of its tokens."""
    family, count = subject.model.config.model_type, subject.visual_tokens(inputs)
    told = subject.adapter.grids("video" if film else "image", inputs)
    if told is None and not film:
        pixels = inputs.get("pixel_values")
        if pixels is None or len(pixels) != frames or pixels.ndim != 4:
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
    drawings = drawn(frames, grids, kept, groups, CELL)
    originals = [
        frame.convert("RGB").resize(drawing.size, Image.Resampling.BICUBIC)
        for frame, drawing in zip(frames, drawings, strict=True)
    ]
    upper, lower = row(originals), row(drawings)
    image = Image.new("RGB", (lower.width, 2 * lower.height + _GAP), "white")
    image.paste(upper, (0, 0))
    image.paste(lower, (0, lower.height + _GAP))
    return image


def drawn(
    frames: Sequence[Image.Image], grids: Sequence[Grid], kept: np.ndarray, groups: np.ndarray, cell: int
) -> list[Image.Image]:
    """Return the drawing of each frame; the arguments are those of `strip` and of `draw.draw`."""
    merged, ends = draw.shared(groups), np.cumsum([height * width for height, width in grids])
    parts = [array[: ends[-1]] for array in (kept, groups, merged)]
    own = [slice(end - height * width, end) for (height, width), end in zip(grids, ends, strict=True)]
    return [
        draw.draw(frame, *(part[place].reshape(grid) for part in parts), cell=cell)
        for frame, grid, place in zip(frames, grids, own, strict=True)
    ]


def row(pictures: Sequence[Image.Image]) -> Image.Image:
    """Return pictures side by side."""
    width = sum(picture.width + _GAP for picture in pictures) - _GAP
    image, left = Image.new("RGB", (width, max(picture.height for picture in pictures)), "white"), 0
    for picture in pictures:
        image.paste(picture, (left, 0))
        left += picture.width + _GAP
    return image
