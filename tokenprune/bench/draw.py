# SPDX-License-Identifier: Apache-2.0
"""Draw which patches of a picture a method keeps, drops and merges."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

import tokenprune
from tokenprune.bench.model import Subject
from tokenprune.bench.suite import patched
from tokenprune.errors import UnsupportedSetupError

CELL = 32  # pixels of a patch in the drawing
_DARK, _BORDER, _GROUP = 0.22, (255, 255, 255), (255, 214, 0)


@dataclass(frozen=True)
class Shown:
    """What `tokenprune show` tells of one picture.

    image: the drawing, the picture as the model sees it on the left, the kept patches on the right. before, after: the
    answers. tokens_in, tokens_out: visual tokens of the picture before and after.
    """

    image: Image.Image
    before: str
    after: str
    tokens_in: int
    tokens_out: int
    stats: tokenprune.Stats


def show(subject: Subject, image: Image.Image, question: str, method: str, keep: float | int) -> Shown:
    """Ask once without and once with `method`, and draw what it kept.

    Raises UnsupportedSetupError where the patches of this model's pictures form no single grid.
    """
    full = subject.inputs([image], [question])
    (before,) = subject.generate(full)
    with patched(subject, method, keep, record=True):
        inputs = subject.inputs([image], [question])
        height, width = grid_of(subject, inputs)
        (after,) = subject.generate(inputs)
        stats = tokenprune.stats(subject.model)
    kept, groups = patches(subject, inputs, stats)
    drawing = draw(seen_picture(subject, inputs, image), kept.reshape(height, width), groups.reshape(height, width))
    original = seen_picture(subject, full, image).resize(drawing.size, Image.Resampling.BICUBIC)
    pair = Image.new("RGB", (2 * drawing.width + CELL // 2, drawing.height), "white")
    pair.paste(original, (0, 0))
    pair.paste(drawing, (drawing.width + CELL // 2, 0))
    return Shown(pair, before, after, subject.visual_tokens(full), int(kept.sum()), stats)


def grid_of(subject: Subject, inputs: dict[str, Any]) -> tuple[int, int]:
    """Return (height, width) in tokens of the one picture in `inputs`."""
    family = subject.model.config.model_type
    pixels = inputs["pixel_values"]
    # [1, tiles, 3, H, W] or [tiles, 3, H, W]: its tokens are those of several crops, and overlap in the picture.
    if pixels.ndim > 4 or (pixels.ndim == 4 and pixels.shape[0] > 1):
        raise UnsupportedSetupError(f"{family!r} cuts a picture into tiles; `show` draws pictures that are one grid")
    count = subject.visual_tokens(inputs)
    grids = subject.adapter.grids("image", inputs)
    side = math.isqrt(count)
    frames, height, width = grids[0] if grids else (1, side, side)
    if frames * height * width != count:
        raise UnsupportedSetupError(f"the {count} visual tokens of {family!r} form no grid that `show` knows of")
    return frames * height, width


def patches(subject: Subject, inputs: dict[str, Any], stats: tokenprune.Stats) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each visual token of the one picture, whether it is kept (bool) and its group (int).

    A kept token and what was merged into it share a number; a token that was dropped has -1.
    """
    (mask,) = (mask for mask in subject.adapter.visual_mask(inputs).values() if mask.any())
    place = mask[0].nonzero().flatten().tolist()
    index = {position: number for number, position in enumerate(place)}
    kept, groups = np.ones(len(place), bool), np.arange(len(place))
    if stats.cuts:
        alive = set(stats.cuts[-1].kept[0])
        kept = np.array([position in alive for position in place])
    for cut in stats.cuts:
        into = np.arange(len(place))
        for target, sources in (cut.sources[0] if cut.sources else {}).items():
            into[[index[source] for source in sources]] = index[target]
        groups = into[groups]
    return kept, np.where(kept[groups], groups, -1)  # a later cut may drop what earlier ones merged into


def seen_picture(subject: Subject, inputs: dict[str, Any], image: Image.Image) -> Image.Image:
    """Return what the model sees: a processor that crops or pads shows only a part of the picture."""
    pixels, processor = inputs["pixel_values"], subject.processor.image_processor
    if pixels.ndim != 4:
        return image.convert("RGB")  # flattened patches (Qwen's families) are of the whole picture, resized
    mean, std = (torch.tensor(getattr(processor, name)).view(3, 1, 1) for name in ("image_mean", "image_std"))
    values = (pixels[0].float().cpu() * std + mean).clamp(0, 1)
    return Image.fromarray((values * 255).round().byte().permute(1, 2, 0).numpy())


def draw(picture: Image.Image, kept: np.ndarray, groups: np.ndarray) -> Image.Image:
    """Darken what is dropped and outline what is kept.

    kept, groups: `[height, width]`, see `patches`. Where tokens are merged, groups are outlined in yellow, and a dot
    marks the token that stands for its group.
    """
    height, width = kept.shape
    picture = picture.resize((width * CELL, height * CELL), Image.Resampling.BICUBIC)
    shown = groups >= 0
    light = np.where(shown, 1.0, _DARK).repeat(CELL, 0).repeat(CELL, 1)[..., None]
    pixels = np.asarray(picture, np.float32)
    grey = pixels.mean(-1, keepdims=True)
    mixed = np.where(light < 1, grey, pixels) * light
    drawing = Image.fromarray(mixed.round().astype(np.uint8))
    pen = ImageDraw.Draw(drawing)
    merging = bool((shown & ~kept).any())
    color = _GROUP if merging else _BORDER
    everything = np.pad(groups, 1, constant_values=-1)
    for row in range(height):
        for column in range(width):
            group = groups[row, column]
            if group < 0:
                continue
            left, top = column * CELL, row * CELL
            right, bottom = left + CELL - 1, top + CELL - 1
            # A line on every side behind which another group begins.
            for (down, across), line in (
                ((0, 1), (left, top, right, top)),
                ((2, 1), (left, bottom, right, bottom)),
                ((1, 0), (left, top, left, bottom)),
                ((1, 2), (right, top, right, bottom)),
            ):
                if everything[row + down, column + across] != group:
                    pen.line(line, fill=color)
            if merging and kept[row, column]:
                middle = (left + CELL // 2, top + CELL // 2)
                pen.ellipse((middle[0] - 3, middle[1] - 3, middle[0] + 3, middle[1] + 3), fill=color)
    return drawing
