# SPDX-License-Identifier: Apache-2.0
"""Draw the patches of an image that are kept, dropped and merged."""

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
from tokenprune_bench.profiling.photo import Photo
from tokenprune_bench.two_pass import ESCALATE

CELL = 32  # pixels of a patch in the drawing
_DARK, _HATCH = 0.22, 64
_BORDERS = (255, 255, 255), (0, 60, 160)  # outlines of dark and of light patches
_BOX = (255, 140, 0)
CROPS = "its processor crops away"
_CROP = 0.02  # minimum share of a side, larger than rounding errors
_LIGHT = 150  # minimum mean brightness of a light patch
_HEAT = ((15, 10, 70), (100, 20, 130), (200, 50, 90), (250, 140, 20), (250, 250, 110))  # colors from low to high
_STOPS = (0.0, 0.25, 0.5, 0.75, 1.0)


def check_drawable(setting: Setting) -> list[Method]:
    """Return the methods of a setting. Raise OptionError if a method cannot be drawn."""
    if is_escalation(setting):
        raise OptionError(f"{ESCALATE} runs the model twice and cannot be drawn. Draw the method of its first pass.")
    for method in setting.methods:
        if isinstance(method, ImageChooser):
            raise OptionError(f"{method.name} selects between images, so it cannot be drawn.")
    return setting.methods


def patches(subject: Model, inputs: dict[str, Any], stats: Stats) -> tuple[np.ndarray, np.ndarray]:
    """Return the state of each visual token of one prompt.

    Returns:
        A bool array of kept tokens, and an int array of groups. A kept token and the tokens merged into it share a
        group. Dropped tokens have group -1.
    """
    (mask,) = (mask for mask in subject.adapter.visual_mask(inputs).values() if mask.any())
    positions = mask[0].nonzero().flatten().tolist()
    index = {position: token for token, position in enumerate(positions)}
    kept, groups = np.ones(len(positions), bool), np.arange(len(positions))
    if stats.cuts:
        alive = set(stats.cuts[-1].kept[0])
        kept = np.array([position in alive for position in positions])
    for cut in stats.cuts:
        targets = np.arange(len(positions))
        for target, sources in (cut.sources[0] if cut.sources else {}).items():
            targets[[index[source] for source in sources]] = index[target]
        groups = targets[groups]
    return kept, np.where(kept[groups], groups, -1)  # a later cut may drop the target of an earlier merge


def seen_image(subject: Model, inputs: dict[str, Any], image: Image.Image, index: int = 0) -> Image.Image:
    """Return the image at `index` as the model sees it, which may be cropped or padded."""
    pixels, processor = inputs["pixel_values"], subject.processor.image_processor
    colours = [getattr(processor, name, None) for name in ("image_mean", "image_std")]
    if pixels.ndim != 4 or None in colours:
        return image.convert("RGB")  # flattened patches (Qwen) contain the whole resized image
    mean, std = torch.tensor(colours, dtype=torch.float32, device="cpu")
    values = rearrange(pixels[index].float().cpu(), "c h w -> h w c") * std + mean
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
    """Draw kept, dropped and merged tokens.

    Kept patches have an outline. Dropped patches are dark and hatched, which is visible on black images too. Merged
    patches have the mean color of their group (as in the ToMe paper), an outline in a color of the group, and a dot
    on the kept token.

    Args:
        image: The image.
        kept: Kept tokens, shape (height, width), see `patches`.
        groups: Group of each token, shape (height, width), see `patches`.
        merged: Tokens that share their group with others, shape (height, width). Required for frames of a video.
        cell: Size of a patch in pixels.
        fill: Mean colors, shape (height, width, 3). Required for frames of a video.
        size: Width and height of the drawing. Replaces `cell`.
    """
    height, width = kept.shape
    merged = shared(groups) if merged is None else merged
    (fill,) = mean_colors([image], [groups]) if fill is None else (fill,)
    wide, high = size or (width * cell, height * cell)
    rows, columns = np.arange(high) * height // high, np.arange(wide) * width // wide
    side = min(wide // width, high // height)
    # Limit the line width for few large patches.
    line, step = max(1, min(side // 24, max(wide, high) // 200)), max(4, min(side // 4, max(wide, high) // 40))

    def spread(values: np.ndarray) -> np.ndarray:
        return values[rows][:, columns]

    pixels = np.asarray(image.convert("RGB").resize((wide, high), Image.Resampling.BICUBIC), np.float32)
    group, joined = spread(groups), spread(merged)[..., None]
    drawing = np.where(joined, spread(fill), pixels)
    hatch = np.add.outer(np.arange(high), np.arange(wide)) % step
    dark = pixels.mean(-1) * _DARK + _HATCH * ((hatch >= step // 2) & (hatch < step // 2 + line))
    drawing = np.where(group[..., None] < 0, dark[..., None], drawing)
    colors = np.array([[color_of(label) for label in row] for row in groups], np.float32)
    light = np.asarray(image.convert("L").resize((width, height), Image.Resampling.BOX), np.float32) > _LIGHT
    dark_border, light_border = (np.array(color, np.float32) for color in _BORDERS)
    border = np.where(spread(light)[..., None], light_border, dark_border)
    outline = np.where(joined, spread(colors), border)
    drawing = np.where((_find_edges(group, line) & (group >= 0))[..., None], outline, drawing)
    drawn = Image.fromarray(drawing.clip(0, 255).round().astype(np.uint8))
    pen, dot = ImageDraw.Draw(drawn), max(1, side // 10)
    for row, column in zip(*(merged & kept).nonzero(), strict=True):
        x, y = (2 * int(column) + 1) * wide // (2 * width), (2 * int(row) + 1) * high // (2 * height)
        pen.ellipse((x - dot, y - dot, x + dot, y + dot), fill=color_of(groups[row, column]))
    return drawn


def compute_sizes(frames: Sequence[Image.Image], side: int) -> list[tuple[int, int]]:
    """Return the sizes of drawings of frames with a longer side of `side` pixels."""
    scales = [side / max(frame.size) for frame in frames]
    return [
        (max(1, round(frame.width * scale)), max(1, round(frame.height * scale)))
        for frame, scale in zip(frames, scales, strict=True)
    ]


def _find_edges(labels: np.ndarray, line: int) -> np.ndarray:
    """Return pixels within `line` pixels of another label or of the edge of the image."""
    padded = np.pad(labels, line, constant_values=-1)
    height, width = labels.shape
    edges = np.zeros(labels.shape, bool)
    for distance in range(1, line + 1):
        for down, across in ((-distance, 0), (distance, 0), (0, -distance), (0, distance)):
            neighbor = padded[line + down : line + down + height, line + across : line + across + width]
            edges |= neighbor != labels
    return edges


def mean_colors(images: Sequence[Image.Image], groups: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the mean color of each token's group over all images, shape (height, width, 3) per image."""
    cells = [
        np.asarray(image.convert("RGB").resize(grid.shape[::-1], Image.Resampling.BOX), np.float32)
        for image, grid in zip(images, groups, strict=True)
    ]
    flat = np.concatenate([grid.reshape(-1) for grid in groups]) + 1  # dropped tokens have index 0
    values = np.concatenate([colors.reshape(-1, 3) for colors in cells])
    count = np.maximum(1, np.bincount(flat))
    means = np.stack([np.bincount(flat, values[:, channel]) / count for channel in range(3)], axis=1)
    return [means[grid + 1].astype(np.float32) for grid in groups]


def heat(image: Image.Image, scores: np.ndarray, size: tuple[int, int]) -> Image.Image:
    """Return the gray image under a heat map of the scores, from dark blue (low) to yellow (high).

    Colors show ranks, so that one very high score does not hide the others.

    Args:
        image: The image.
        scores: Scores, shape (height, width). Tokens with NaN or -inf stay gray.
        size: Width and height of the drawing.
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
    """Return the visible part of an image at its own resolution. See `seen_box`."""
    box = seen_box(subject, image)
    return box and image.convert("RGB").crop(box)


def scale_box(
    box: tuple[int, int, int, int] | None, size: tuple[int, int], new_size: tuple[int, int]
) -> tuple[int, int, int, int] | None:
    """Return a box of an image of `size`, (width, height), as a box of the same image of `new_size`."""
    if box is None or size == new_size:
        return box
    left, top, right, bottom = (round(edge * new_size[axis % 2] / size[axis % 2]) for axis, edge in enumerate(box))
    return left, top, right, bottom


def describe_crop(image: Image.Image | Photo, box: tuple[int, int, int, int] | None) -> str:
    """Describe the part of an image that the model does not see. "" if it sees the whole image or `box` is None."""
    if box is None:
        return ""
    left, top, right, bottom = box
    width, height = image.size
    cut = (("left", left / width), ("right", 1 - right / width), ("top", top / height), ("bottom", 1 - bottom / height))
    sides = [f"{share:.0%} at the {side}" for side, share in cut if share >= _CROP]
    visible = f"the model sees {right - left} x {bottom - top} of {width} x {height} pixels"
    return f"{CROPS} {' and '.join(sides)}: {visible}" if sides else ""


def boxed(image: Image.Image, box: tuple[int, int, int, int], side: int = 280) -> Image.Image:
    """Return the image with a longer side of `side` pixels, dark outside the box, with an outline around the box."""
    scale = side / max(image.size)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    shown = image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
    left, top, right, bottom = (round(edge * scale) for edge in box)
    dark = shown.point(lambda value: int(value * _DARK) + _HATCH)
    dark.paste(shown.crop((left, top, right, bottom)), (left, top))
    ImageDraw.Draw(dark).rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=_BOX, width=4)
    return dark


def seen_box(subject: Model, image: Image.Image) -> tuple[int, int, int, int] | None:
    """Return the part of an image that the model sees: left, top, right, bottom in pixels.

    An image whose colors encode positions is passed through the processor, and the result shows which positions remain.

    Returns:
        The box, or None if the processor does more than resizing, cropping and padding.
    """
    width, height = image.size
    ramp = np.zeros((height, width, 3), np.uint8)
    ramp[..., 0], ramp[..., 1], ramp[..., 2] = np.linspace(0, 255, width), np.linspace(0, 255, height)[:, None], 255
    inputs = subject.inputs([[Image.fromarray(ramp)]], ["?"])
    if inputs.get("pixel_values") is None or inputs["pixel_values"].ndim != 4:
        return 0, 0, width, height  # flattened patches (Qwen) contain the whole image
    visible = np.asarray(seen_image(subject, inputs, image), float)
    inside = visible[..., 2] > 250  # padding is not inside
    box = []
    for axis, length in ((1, width), (0, height)):
        pixels = np.flatnonzero(inside.any(1 - axis))[2:-2]
        if len(pixels) < 4:
            return None
        values = np.where(inside, visible[..., 1 - axis], 0).sum(1 - axis) / np.maximum(1, inside.sum(1 - axis))
        positions = values[pixels] / 255 * (length - 1)
        slope, start = np.polyfit(pixels, positions, 1)
        if slope <= 0 or np.abs(positions - slope * pixels - start).max() > 0.02 * length + 2:
            return None
        first, last = start - slope / 2 + 0.5, start + slope * (visible.shape[axis] - 0.5) + 0.5
        edge = 0.01 * length  # resolution of 256 color values
        box.append((0 if abs(first) < edge else first, length if abs(last - length) < edge else last))
    (left, right), (top, bottom) = box
    return round(left), round(top), round(right), round(bottom)


def shared(groups: np.ndarray) -> np.ndarray:
    """Return tokens that share their group with others, bool like `groups`."""
    _, inverse, count = np.unique(groups, return_inverse=True, return_counts=True)
    return (count[inverse].reshape(groups.shape) > 1) & (groups >= 0)


def color_of(group: int) -> tuple[int, int, int]:
    """Return a bright color. Adjacent groups get distinct colors."""
    red, green, blue = colorsys.hsv_to_rgb(float(group) * 0.61803399 % 1, 0.9, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)
