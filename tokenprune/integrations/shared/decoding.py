# SPDX-License-Identifier: Apache-2.0
"""Decode a JPEG at the smallest scale (1/2, 1/4 or 1/8) that still has all pixels that a processor needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile

from tokenprune.integrations.shared.resizing import Resizer
from tokenprune.models.processor_settings import SettingsReader
from tokenprune.models.token_counts import CountRule, find_rule
from tokenprune.selection.images import MAX_SIDE, InputImage

_ORIENTATION = Image.ExifTags.Base.Orientation
_TURNED = (5, 6, 7, 8)  # orientations that exchange height and width


@dataclass(frozen=True)
class Need:
    """The pixels that a processor needs of an image.

    Args:
        size: (height, width) of the image after resizing.
        tokens: Number of visual tokens. None if the decoded size does not influence them, because the resizer knows the
            size of the file.
    """

    size: tuple[int, int]
    tokens: int | None = None


Count = Callable[[int, int], int]
FindNeed = Callable[[int, int], Need | None]


def find_need(
    processor: Any, resizer: Resizer | None, kwargs: Mapping[str, Any], is_size_known: bool, height: int, width: int
) -> Need | None:
    """Return the pixels that a processor needs of an image, or None if it is not known.

    Args:
        processor: A processor or image processor.
        resizer: Resizes the processor's images. None if they are not resized.
        kwargs: Keyword arguments of the processor's call.
        is_size_known: Whether `resizer` gets the size of the file with the decoded image.
        height: Height of the image.
        width: Width of the image.
    """
    rule = find_rule(processor)
    if rule is None or (resizer is not None and resizer.method.depends_on_content):
        return None
    try:
        return _find_need(rule, processor, resizer, kwargs, is_size_known, height, width)
    except ValueError:  # the processor refuses the size, and reports it when it gets the image
        return None


def _find_need(
    rule: CountRule,
    processor: Any,
    resizer: Resizer | None,
    kwargs: Mapping[str, Any],
    is_size_known: bool,
    height: int,
    width: int,
) -> Need | None:
    size = height, width
    if resizer is not None and not resizer.identity:
        before = SettingsReader(processor, kwargs)
        image = InputImage(None, count=lambda rows, columns: rule.count(before, rows, columns, 1), full_size=size)
        (size,), kwargs = resizer.plan([image], dict(kwargs))
    read = SettingsReader(processor, kwargs)
    if size != (height, width):
        return Need(size, None if is_size_known else rule.count(read, *size, 1))
    return None if rule.target is None else Need(rule.target(read, *size), rule.count(read, *size, 1))


def decode(image: Image.Image, find: FindNeed) -> Image.Image:
    """Decode an opened image, turned upright. A JPEG is decoded at the smallest sufficient scale.

    Args:
        image: Image of `PIL.Image.open`. Only its header was read.
        find: Function (height, width) -> the needed pixels.

    Returns:
        The decoded image in the mode of the file.
    """
    if isinstance(image, JpegImageFile):
        draft(image, find_scale(*get_full_size(image), find))
    image.load()
    with suppress(Exception):  # the metadata may be damaged
        image = ImageOps.exif_transpose(image)
    return image


def draft(image: Image.Image, scale: int) -> None:
    """Make the decoder of an opened JPEG divide both sides by `scale`, rounded up."""
    if scale > 1:
        image.draft(None, (max(1, image.width // scale), max(1, image.height // scale)))


def decode_by_content(open_file: Callable[[], Image.Image], resizer: Resizer, count: Count) -> Image.Image:
    """Decode an image in the size that a method chooses by its content.

    The method reads at most `MAX_SIDE` pixels along the longer side. A JPEG is decoded at the smallest scale with these
    pixels, and again only if the chosen size needs more pixels.

    Args:
        open_file: Function that opens the file by `PIL.Image.open`.
        resizer: Resizer of the method.
        count: Function (height, width) -> number of visual tokens.
    """
    with open_file() as file:
        full_size = get_full_size(file)
        image = decode(file, _find_read).convert("RGB")
    read = InputImage(image, count=count, full_size=full_size)
    (size,), _ = resizer.plan([read], {})
    if image.height < size[0] or image.width < size[1]:
        with open_file() as file:
            image = decode(file, lambda height, width: Need(size)).convert("RGB")
    image = InputImage(image).resize(*size)
    resizer.mark_resized(image, full_size)
    return image


def _find_read(height: int, width: int) -> Need:
    """Return the pixels that `InputImage.grey` reads."""
    scale = min(1.0, MAX_SIDE / max(height, width))
    return Need((round(height * scale), round(width * scale)))


def find_scale(height: int, width: int, find: FindNeed) -> int:
    """Return the largest sufficient scale of 8, 4, 2 and 1.

    The smaller image must have the tokens of the complete image, and the same size after resizing.
    """
    full = find(height, width)
    if full is None:
        return 1
    for scale in (8, 4, 2):
        small = -(-height // scale), -(-width // scale)
        is_enough = small[0] >= full.size[0] and small[1] >= full.size[1]
        if is_enough and (full.tokens is None or _is_same(find(*small), full)):
            return scale
    return 1


def _is_same(small: Need | None, full: Need) -> bool:
    """Return whether a smaller image has the same tokens and the same size after resizing, up to rounding."""
    if small is None or small.tokens != full.tokens:
        return False
    return all(abs(side - other) <= 1 for side, other in zip(small.size, full.size, strict=True))


def get_full_size(image: Image.Image) -> tuple[int, int]:
    """Return (height, width) of an opened image, upright."""
    is_turned = False
    with suppress(Exception):  # the metadata may be damaged
        is_turned = image.getexif().get(_ORIENTATION) in _TURNED
    return (image.width, image.height) if is_turned else (image.height, image.width)
