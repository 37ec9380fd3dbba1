# SPDX-License-Identifier: Apache-2.0
"""Draw which patches of an image are kept, dropped and merged."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from einops import rearrange
from PIL import Image, ImageDraw

from tokenprune.errors import OptionError
from tokenprune.selection.method import Method
from tokenprune.selection.sites.pixels import ImageChooser
from tokenprune.settings import Setting
from tokenprune.statistics import Stats
from tokenprune_bench.profiling.model import Model
from tokenprune_bench.profiling.patched import is_escalation
from tokenprune_bench.two_pass import ESCALATE

CELL = 32  # pixels of a patch in the drawing
_DARK, _HATCH = 0.22, 64
_BORDERS = (255, 255, 255), (0, 60, 160)  # of a dark patch, and of a light one
_BOX = (255, 140, 0)
CROPS = "its processor crops away"
_CROP = 0.02  # of a side: less is rounding
_LIGHT = 150  # mean brightness from which a patch is light
_HEAT = ((15, 10, 70), (100, 20, 130), (200, 50, 90), (250, 140, 20), (250, 250, 110))  # from low to high
_STOPS = (0.0, 0.25, 0.5, 0.75, 1.0)


def check_drawable(setting: Setting) -> list[Method]:
    """Return the methods of a setting; raises OptionError for one of which nothing can be drawn."""
    if is_escalation(setting):
        raise OptionError(f"{ESCALATE} is no method, it asks twice: draw what the method of its first pass keeps")
    for method in setting.methods:
        if isinstance(method, ImageChooser):
            raise OptionError(f"{method.name} chooses between images, not within them: there is nothing to draw")
    return setting.methods


def patches(subject: Model, inputs: dict[str, Any], stats: Stats) -> tuple[np.ndarray, np.ndarray]:
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
    colours = [getattr(processor, name, None) for name in ("image_mean", "image_std")]
    if pixels.ndim != 4 or None in colours:
        return image.convert("RGB")  # flattened patches (Qwen's families) are of the whole image, resized
    mean, std = torch.tensor(colours, dtype=torch.float32, device="cpu")
    values = rearrange(pixels[number].float().cpu(), "c h w -> h w c") * std + mean
    return Image.fromarray((values.clamp(0, 1) * 255).round().byte().numpy())


def draw(
    image: Image.Image,
    kept: np.ndarray,
    groups: np.ndarray,
    merged: np.ndarray | None = None,
    cell: int = CELL,
    fill: np.ndarray | None = None,
    size: tuple[int, int] | None = None,
) -> Image.Image:
    """Outline what is kept, darken and hatch what is dropped (which tells it on a black image, too), and show tokens
    that were merged into one as one patch of their mean colour, as ToMe's paper does.

    kept, groups: `[height, width]`, see `patches`. A merged patch has an outline of its own colour, wherever its parts
    lie, and a dot marks the token that stands for it. merged: bool `[height, width]`, which tokens share their group
    with others, and fill: `[height, width, 3]`, their mean colours, if this image alone cannot tell (frames of a
    video). cell: pixels of a patch; size: or width and height of the drawing.
    """
    height, width = kept.shape
    merged = shared(groups) if merged is None else merged
    (fill,) = mean_colors([image], [groups]) if fill is None else (fill,)
    wide, high = size or (width * cell, height * cell)
    rows, columns = np.arange(high) * height // high, np.arange(wide) * width // wide
    side = min(wide // width, high // height)
    # Few large patches need no thicker lines than many small ones.
    line, step = max(1, min(side // 24, max(wide, high) // 200)), max(4, min(side // 4, max(wide, high) // 40))

    def spread(values: np.ndarray) -> np.ndarray:
        return values[rows][:, columns]

    pixels = np.asarray(image.convert("RGB").resize((wide, high), Image.Resampling.BICUBIC), np.float32)
    own, joined = spread(groups), spread(merged)[..., None]
    drawing = np.where(joined, spread(fill), pixels)
    hatch = np.add.outer(np.arange(high), np.arange(wide)) % step
    dark = pixels.mean(-1) * _DARK + _HATCH * ((hatch >= step // 2) & (hatch < step // 2 + line))
    drawing = np.where(own[..., None] < 0, dark[..., None], drawing)
    colors = np.array([[color_of(group) for group in row] for row in groups], np.float32)
    light = np.asarray(image.convert("L").resize((width, height), Image.Resampling.BOX), np.float32) > _LIGHT
    dark_border, light_border = (np.array(one, np.float32) for one in _BORDERS)
    border = np.where(spread(light)[..., None], light_border, dark_border)
    outline = np.where(joined, spread(colors), border)
    drawing = np.where((_edges(own, line) & (own >= 0))[..., None], outline, drawing)
    drawn = Image.fromarray(drawing.clip(0, 255).round().astype(np.uint8))
    pen, dot = ImageDraw.Draw(drawn), max(1, side // 10)
    for row, column in zip(*(merged & kept).nonzero(), strict=True):
        x, y = (2 * int(column) + 1) * wide // (2 * width), (2 * int(row) + 1) * high // (2 * height)
        pen.ellipse((x - dot, y - dot, x + dot, y + dot), fill=color_of(groups[row, column]))
    return drawn


def sizes_of(frames: Sequence[Image.Image], side: int) -> list[tuple[int, int]]:
    """Return the sizes of drawings of frames whose longer side is `side`."""
    scales = [side / max(frame.size) for frame in frames]
    return [
        (max(1, round(frame.width * scale)), max(1, round(frame.height * scale)))
        for frame, scale in zip(frames, scales, strict=True)
    ]


def _edges(labels: np.ndarray, line: int) -> np.ndarray:
    """Return which pixels lie within `line` of one with another label, or of the image's edge."""
    padded = np.pad(labels, line, constant_values=-1)
    height, width = labels.shape
    found = np.zeros(labels.shape, bool)
    for away in range(1, line + 1):
        for down, across in ((-away, 0), (away, 0), (0, -away), (0, away)):
            there = padded[line + down : line + down + height, line + across : line + across + width]
            found |= there != labels
    return found


def mean_colors(images: Sequence[Image.Image], groups: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return, `[height, width, 3]` for each image, the mean colour of each token's group over all of the images."""
    cells = [
        np.asarray(one.convert("RGB").resize(grid.shape[::-1], Image.Resampling.BOX), np.float32)
        for one, grid in zip(images, groups, strict=True)
    ]
    flat = np.concatenate([grid.reshape(-1) for grid in groups]) + 1  # dropped ones are 0
    values = np.concatenate([one.reshape(-1, 3) for one in cells])
    count = np.maximum(1, np.bincount(flat))
    means = np.stack([np.bincount(flat, values[:, channel]) / count for channel in range(3)], axis=1)
    return [means[grid + 1].astype(np.float32) for grid in groups]


def heat(image: Image.Image, scores: np.ndarray, size: tuple[int, int]) -> Image.Image:
    """Return the image in grey under the scores of its tokens, from dark blue (low) to yellow (high).

    scores: float `[height, width]`; NaN and -inf: the token has none, and stays grey. Ranks are shown, so that one very
    high score does not hide the others.
    """
    wide, high = size
    known = np.isfinite(scores)
    level = np.zeros(scores.shape)
    level[known] = np.argsort(np.argsort(scores[known], kind="stable"), kind="stable") / max(1, known.sum() - 1)
    colors = np.stack([np.interp(level, _STOPS, channel) for channel in np.array(_HEAT, float).T], axis=-1)
    rows, columns = np.arange(high) * scores.shape[0] // high, np.arange(wide) * scores.shape[1] // wide
    grey = np.asarray(image.convert("L").resize(size, Image.Resampling.BICUBIC), np.float32)[..., None]
    mixed = 0.35 * grey + 0.65 * colors[rows][:, columns]
    shown = np.where(known[rows][:, columns][..., None], mixed, np.repeat(grey, 3, axis=-1))
    return Image.fromarray(shown.clip(0, 255).round().astype(np.uint8))


def seen_part(subject: Model, image: Image.Image) -> Image.Image | None:
    """Return the part of an image that the model sees, at the image's own resolution; None where its processor does
    more than to resize, crop and pad."""
    box = seen_box(subject, image)
    return box and image.convert("RGB").crop(box)


def cropped_away(image: Image.Image, box: tuple[int, int, int, int] | None) -> str:
    """Return in words what the model does not see of an image: "" where it sees all of it, or where that is not known.

    box: of `seen_box`.
    """
    if box is None:
        return ""
    left, top, right, bottom = box
    width, height = image.size
    cut = (("left", left / width), ("right", 1 - right / width), ("top", top / height), ("bottom", 1 - bottom / height))
    sides = [f"{share:.0%} at the {side}" for side, share in cut if share >= _CROP]
    seen = f"the model sees {right - left} x {bottom - top} of the image's {width} x {height} pixels"
    return f"{CROPS} {' and '.join(sides)}: {seen}" if sides else ""


def boxed(image: Image.Image, box: tuple[int, int, int, int], side: int = 280) -> Image.Image:
    """Return the image, its longer side `side` pixels, dark but for the box, which has an outline."""
    scale = side / max(image.size)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    shown = image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
    left, top, right, bottom = (round(edge * scale) for edge in box)
    dark = shown.point(lambda value: int(value * _DARK) + _HATCH)
    dark.paste(shown.crop((left, top, right, bottom)), (left, top))
    ImageDraw.Draw(dark).rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=_BOX, width=4)
    return dark


def seen_box(subject: Model, image: Image.Image) -> tuple[int, int, int, int] | None:
    """Return the part of an image that the model sees, as left, top, right and bottom in its pixels; None where its
    processor does more than to resize, crop and pad.

    An image whose colours tell their places goes through the processor, and tells which of them come out.
    """
    width, height = image.size
    ramp = np.zeros((height, width, 3), np.uint8)
    ramp[..., 0], ramp[..., 1], ramp[..., 2] = np.linspace(0, 255, width), np.linspace(0, 255, height)[:, None], 255
    inputs = subject.inputs([[Image.fromarray(ramp)]], ["?"])
    if inputs.get("pixel_values") is None or inputs["pixel_values"].ndim != 4:
        return 0, 0, width, height  # flattened patches (Qwen's families) are of the whole image
    seen = np.asarray(seen_image(subject, inputs, image), float)
    inside = seen[..., 2] > 250  # what was padded is not
    box = []
    for axis, length in ((1, width), (0, height)):
        places = np.flatnonzero(inside.any(1 - axis))[2:-2]
        if len(places) < 4:
            return None
        values = np.where(inside, seen[..., 1 - axis], 0).sum(1 - axis) / np.maximum(1, inside.sum(1 - axis))
        found = values[places] / 255 * (length - 1)
        slope, start = np.polyfit(places, found, 1)
        if slope <= 0 or np.abs(found - slope * places - start).max() > 0.02 * length + 2:
            return None
        first, last = start - slope / 2 + 0.5, start + slope * (seen.shape[axis] - 0.5) + 0.5
        edge = 0.01 * length  # 256 shades tell a place no better
        box.append((0 if abs(first) < edge else first, length if abs(last - length) < edge else last))
    (left, right), (top, bottom) = box
    return round(left), round(top), round(right), round(bottom)


def shared(groups: np.ndarray) -> np.ndarray:
    """Return which tokens share their group with others, bool like `groups`."""
    _, place, count = np.unique(groups, return_inverse=True, return_counts=True)
    return (count[place].reshape(groups.shape) > 1) & (groups >= 0)


def color_of(group: int) -> tuple[int, int, int]:
    """Return a bright colour; numbers that are close get colours that are not."""
    red, green, blue = colorsys.hsv_to_rgb(float(group) * 0.61803399 % 1, 0.9, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)
