# SPDX-License-Identifier: Apache-2.0
"""Draw which patches of a picture a method keeps, drops and merges."""

from __future__ import annotations

import colorsys
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

import tokenprune
from tokenprune.base import ImageChooser
from tokenprune.bench.model import Subject
from tokenprune.bench.suite import patched
from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.registry import method_class

CELL = 32  # pixels of a patch in the drawing
_DARK, _BORDER, _TINT = 0.22, (255, 255, 255), 0.35


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

    Raises UnsupportedSetupError where the patches of this model's pictures form no single grid, OptionError for a
    method that chooses between pictures.
    """
    check_drawable(method)
    full = subject.inputs([image], [question])
    (before,) = subject.generate(full)
    seen = look(subject, image, question, method, keep)
    original = seen_picture(subject, full, image).resize(seen.image.size, Image.Resampling.BICUBIC)
    pair = Image.new("RGB", (2 * seen.image.width + CELL // 2, seen.image.height), "white")
    pair.paste(original, (0, 0))
    pair.paste(seen.image, (seen.image.width + CELL // 2, 0))
    return Shown(pair, before, seen.answer, subject.visual_tokens(full), seen.kept, seen.stats)


@dataclass(frozen=True)
class Look:
    """What a method did with one prompt: the drawing, the answer, how many visual tokens are left."""

    image: Image.Image
    answer: str
    kept: int
    stats: tokenprune.Stats


def look(
    subject: Subject,
    image: Image.Image,
    question: str,
    method: str,
    keep: float | int,
    side: int | None = None,
    **options: Any,
) -> Look:
    """Ask with `method` and draw what it kept; raises like `show`.

    side: pixels of the drawing's longer side, about; default: `CELL` for each patch. options: of the method.
    """
    check_drawable(method)
    with patched(subject, method, keep, record=True, **options):
        inputs = subject.inputs([image], [question])
        height, width = grid_of(subject, inputs)
        (answer,) = subject.generate(inputs)
        stats = tokenprune.stats(subject.model)
    kept, groups = patches(subject, inputs, stats)
    cell = CELL if side is None else max(2, side // max(height, width))
    seen = seen_picture(subject, inputs, image)
    drawing = draw(seen, kept.reshape(height, width), groups.reshape(height, width), cell=cell)
    return Look(drawing, answer, int(kept.sum()), stats)


def check_drawable(method: str) -> None:
    """Raise OptionError for a method of which nothing can be drawn."""
    if issubclass(method_class(method), ImageChooser):
        raise OptionError(f"{method} chooses between pictures, not within them: there is nothing to draw")


def grid_of(subject: Subject, inputs: dict[str, Any]) -> tuple[int, int]:
    """Return (height, width) in tokens of the one picture in `inputs`."""
    family = subject.model.config.model_type
    pixels = inputs.get("pixel_values")
    if pixels is None:
        raise UnsupportedSetupError(f"{family!r} takes pictures in a form that `show` does not know")
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
    """Return, for each visual token of the one prompt, whether it is kept (bool) and its group (int).

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


def seen_picture(subject: Subject, inputs: dict[str, Any], image: Image.Image, number: int = 0) -> Image.Image:
    """Return what the model sees of picture `number`: a processor that crops or pads shows only a part of it."""
    pixels, processor = inputs["pixel_values"], subject.processor.image_processor
    mean, std = (getattr(processor, name, None) for name in ("image_mean", "image_std"))
    if pixels.ndim != 4 or mean is None or std is None:
        return image.convert("RGB")  # flattened patches (Qwen's families) are of the whole picture, resized
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (mean, std))
    values = (pixels[number].float().cpu() * std + mean).clamp(0, 1)
    return Image.fromarray((values * 255).round().byte().permute(1, 2, 0).numpy())


def draw(
    picture: Image.Image, kept: np.ndarray, groups: np.ndarray, merged: np.ndarray | None = None, cell: int = CELL
) -> Image.Image:
    """Darken what is dropped and outline what is kept.

    kept, groups: `[height, width]`, see `patches`. Tokens that were merged into one are tinted and outlined in one
    colour, wherever they lie, and a dot marks the one that stands for them. merged: bool `[height, width]`, which
    tokens share their group with others, if `groups` alone cannot tell (frames of a video). cell: pixels of a patch.
    """
    height, width = kept.shape
    merged = shared(groups) if merged is None else merged
    picture = picture.resize((width * cell, height * cell), Image.Resampling.BICUBIC)
    pixels = np.asarray(picture, np.float32)
    colors = np.array([[color_of(group) for group in row] for row in groups], np.float32)
    tint = np.where(merged[..., None], _TINT, 0.0)
    mixed = pixels * (1 - enlarge(tint, cell)) + enlarge(colors * tint, cell)
    drawing = np.where(enlarge(groups < 0, cell)[..., None], pixels.mean(-1, keepdims=True) * _DARK, mixed)
    image = Image.fromarray(drawing.round().astype(np.uint8))
    pen = ImageDraw.Draw(image)
    everything = np.pad(groups, 1, constant_values=-1)
    for row, column in zip(*(groups >= 0).nonzero(), strict=True):
        color = color_of(groups[row, column]) if merged[row, column] else _BORDER
        left, top = int(column) * cell, int(row) * cell
        right, bottom = left + cell - 1, top + cell - 1
        # A line on every side behind which another group begins.
        for (down, across), line in (
            ((0, 1), (left, top, right, top)),
            ((2, 1), (left, bottom, right, bottom)),
            ((1, 0), (left, top, left, bottom)),
            ((1, 2), (right, top, right, bottom)),
        ):
            if everything[row + down, column + across] != groups[row, column]:
                pen.line(line, fill=color)
        if merged[row, column] and kept[row, column]:
            middle, size = (left + cell // 2, top + cell // 2), max(1, cell // 10)
            pen.ellipse((middle[0] - size, middle[1] - size, middle[0] + size, middle[1] + size), fill=color)
    return image


def shared(groups: np.ndarray) -> np.ndarray:
    """Return which tokens share their group with others, bool like `groups`."""
    _, place, count = np.unique(groups, return_inverse=True, return_counts=True)
    return (count[place].reshape(groups.shape) > 1) & (groups >= 0)


def color_of(group: int) -> tuple[int, int, int]:
    """Return a bright colour; numbers that are close get colours that are not."""
    red, green, blue = colorsys.hsv_to_rgb(float(group) * 0.61803399 % 1, 0.9, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def enlarge(values: np.ndarray, cell: int) -> np.ndarray:
    """`[height, width, ...]` of patches -> of pixels."""
    return values.repeat(cell, 0).repeat(cell, 1)
