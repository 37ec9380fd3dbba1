# SPDX-License-Identifier: Apache-2.0
"""Draw which patches of an image are kept, dropped and merged."""

from __future__ import annotations

import colorsys
from typing import Any

import numpy as np
import torch
from einops import rearrange, repeat
from PIL import Image, ImageDraw

import tokenprune
from tokenprune.base import ImageChooser
from tokenprune.bench.model import Model
from tokenprune.bench.plan import ESCALATE
from tokenprune.errors import OptionError
from tokenprune.registry import method_class

CELL = 32  # pixels of a patch in the drawing
_DARK, _BORDER, _TINT = 0.22, (255, 255, 255), 0.35


def check_drawable(method: str) -> None:
    """Raise OptionError for a method of which nothing can be drawn."""
    if method == ESCALATE:
        raise OptionError(f"{method} is no method, it asks twice: draw what the method of its first pass keeps")
    if issubclass(method_class(method), ImageChooser):
        raise OptionError(f"{method} chooses between images, not within them: there is nothing to draw")


def patches(subject: Model, inputs: dict[str, Any], stats: tokenprune.Stats) -> tuple[np.ndarray, np.ndarray]:
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


def seen_image(subject: Model, inputs: dict[str, Any], image: Image.Image, number: int = 0) -> Image.Image:
    """Return what the model sees of image `number`: a processor that crops or pads shows only a part of it."""
    pixels, processor = inputs["pixel_values"], subject.processor.image_processor
    mean, std = (getattr(processor, name, None) for name in ("image_mean", "image_std"))
    if pixels.ndim != 4 or mean is None or std is None:
        return image.convert("RGB")  # flattened patches (Qwen's families) are of the whole image, resized
    values = rearrange(pixels[number].float().cpu(), "c h w -> h w c") * torch.tensor(std) + torch.tensor(mean)
    return Image.fromarray((values.clamp(0, 1) * 255).round().byte().numpy())


def draw(
    image: Image.Image, kept: np.ndarray, groups: np.ndarray, merged: np.ndarray | None = None, cell: int = CELL
) -> Image.Image:
    """Darken what is dropped and outline what is kept.

    kept, groups: `[height, width]`, see `patches`. Tokens that were merged into one are tinted and outlined in one
    colour, wherever they lie, and a dot marks the one that stands for them. merged: bool `[height, width]`, which
    tokens share their group with others, if `groups` alone cannot tell (frames of a video). cell: pixels of a patch.
    """
    height, width = kept.shape
    merged = shared(groups) if merged is None else merged
    image = image.resize((width * cell, height * cell), Image.Resampling.BICUBIC)
    pixels = np.asarray(image, np.float32)
    colors = np.array([[color_of(group) for group in row] for row in groups], np.float32)
    tint = np.where(merged[..., None], _TINT, 0.0)
    mixed = pixels * (1 - enlarge(tint, cell)) + enlarge(colors * tint, cell)
    drawing = np.where(enlarge(groups < 0, cell)[..., None], pixels.mean(-1, keepdims=True) * _DARK, mixed)
    drawn = Image.fromarray(drawing.round().astype(np.uint8))
    pen = ImageDraw.Draw(drawn)
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
    return drawn


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
    return repeat(values, "h w ... -> (h a) (w b) ...", a=cell, b=cell)
