# SPDX-License-Identifier: Apache-2.0
"""Number of visual tokens that a processor makes of an image, computed from the image size.

Public helpers of transformers are used where they are exact: `get_number_of_image_patches` (Qwen-VL, InternVL),
`get_image_size_for_max_num_patches` (SigLIP2), `smart_resize` (LFM2-VL) and `select_best_resolution` (LLaVA anyres).
The rest is arithmetic, tested against the real processors.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.models import resize_targets, token_limits
from tokenprune.models.processor_settings import SettingsReader, get_image_processor

Count = Callable[[SettingsReader, int, int, int], int]


@dataclass(frozen=True)
class CountRule:
    """Token count of a kind of image processor.

    Args:
        count: Function (settings, height, width, images in the prompt) -> visual tokens.
        resizing: Same as `Family.resizing`.
        grid: Function (settings, height, width) -> rows and columns of tokens, pixels per token side, minimum and
            maximum pixels of an image. None if the processor does not make one grid per image within `size`.
        limit: Setting that limits the tokens of an image. None if the size of the image limits them.
        target: Function (settings, height, width) -> height and width to which the processor resizes an image.
    """

    count: Count
    resizing: str | None
    grid: Callable[[SettingsReader, int, int], tuple[int, int, int, int, int]] | None = None
    limit: token_limits.NativeLimit | None = None
    target: Callable[[SettingsReader, int, int], tuple[int, int]] | None = None


def find_rule(processor: Any) -> CountRule | None:
    """Return the rule of a processor or image processor, or None if its tokens cannot be counted."""
    for cls in type(get_image_processor(processor)).__mro__:
        if rule := RULES.get(cls.__name__.removesuffix("Pil").removesuffix("Fast")):
            return rule
    return None


def list_countable_processors() -> list[str]:
    """Return the class names of image processors with countable tokens, sorted."""
    return sorted(RULES)


def count_visual_tokens(processor: Any, height: int, width: int, *, images: int = 1, **images_kwargs: Any) -> int:
    """Return the exact number of visual tokens (placeholders) that `processor` makes of one image.

    Excludes tokens that only frame an image (start, end and row separators).

    Args:
        processor: A transformers processor. For Qwen-VL, LFM2-VL and SigLIP2, the image processor is sufficient.
        height: Height in pixels.
        width: Width in pixels.
        images: Number of images in the prompt. LLaVA-OneVision tiles only a single image.
        images_kwargs: Settings that are passed to the processor's call.

    Raises:
        UnsupportedSetupError: If the processor is unknown.
        OptionError: If an image processor lacks settings of its processor.

    Examples:
        >>> tokenprune.count_visual_tokens(processor, height=256, width=256)
        256
    """
    rule = find_rule(processor)
    if rule is None:
        raise UnsupportedSetupError(
            f"cannot count the visual tokens of {type(processor).__name__}. "
            "Supported are, among others, Qwen2VLImageProcessor, LlavaNextImageProcessor and SmolVLMImageProcessor."
        )
    try:
        height, width, images = map(operator.index, (height, width, images))
    except TypeError:
        raise OptionError(f"height={height!r}, width={width!r} and images={images!r} must be ints.") from None
    if height < 1 or width < 1:
        raise OptionError(f"an image of {height} x {width} pixels is invalid: both sides must be at least 1 pixel")
    return rule.count(SettingsReader(processor, images_kwargs), height, width, images)


# -- Qwen2-VL, Qwen2.5-VL, Qwen3-VL


def _count_qwen(read: SettingsReader, height: int, width: int, images: int) -> int:
    limits, merge = _read_pixel_limits(read), read("merge_size")
    settings = dict(min_pixels=limits[0], max_pixels=limits[1], patch_size=read("patch_size"), merge_size=merge)
    with _check_image_size(height, width):
        return read.image.get_number_of_image_patches(height, width, settings) // merge**2


@contextmanager
def _check_image_size(height: int, width: int) -> Iterator[None]:
    """Raise OptionError if the processor rejects the image size, such as an extreme aspect ratio."""
    try:
        yield
    except ValueError as error:
        raise OptionError(f"the processor rejects an image of {height} x {width} pixels: {error}") from error


def _compute_qwen_grid(read: SettingsReader, height: int, width: int) -> tuple[int, int, int, int, int]:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    min_value, max_value = _read_pixel_limits(read)
    factor = read("patch_size") * read("merge_size")
    with _check_image_size(height, width):
        high, wide = smart_resize(height, width, factor, min_value, max_value)
    return high // factor, wide // factor, factor, min_value, max_value


def _find_qwen_target(read: SettingsReader, height: int, width: int) -> tuple[int, int]:
    rows, columns, factor, _, _ = _compute_qwen_grid(read, height, width)
    return rows * factor, columns * factor


def _read_pixel_limits(read: SettingsReader) -> tuple[int, int]:
    """Return minimum and maximum pixels. transformers calls them edges, but they are areas."""
    size = read.size()
    return (
        read.overrides.get("min_pixels") or size["shortest_edge"],
        read.overrides.get("max_pixels") or size["longest_edge"],
    )


# -- GLM-4.1V and later


def _count_glm(read: SettingsReader, height: int, width: int, images: int) -> int:
    settings = {name: read(name) for name in ("patch_size", "merge_size")} | {"size": read.size()}
    with _check_image_size(height, width):
        return read.image.get_number_of_image_patches(height, width, settings) // read("merge_size") ** 2


# -- SigLIP2 NaFlex


def _count_naflex(read: SettingsReader, height: int, width: int, images: int) -> int:
    from transformers.models.siglip2.image_processing_siglip2 import get_image_size_for_max_num_patches

    patch = read("patch_size")
    high, wide = get_image_size_for_max_num_patches(height, width, patch, read("max_num_patches"))
    return (high // patch) * (wide // patch)


# -- LFM2-VL


def _count_lfm2(read: SettingsReader, height: int, width: int, images: int) -> int:
    patch, down, max_value = read("encoder_patch_size"), read("downsample_factor"), read("max_image_tokens")
    factor = patch * down
    wide, high = read.image.smart_resize(height, width, down, read("min_image_tokens"), max_value, patch)
    unsplit = math.ceil(high // patch / down) * math.ceil(wide // patch / down)
    rounded = [max(patch, round(side / factor) * factor) for side in (height, width)]
    large = rounded[0] * rounded[1] > max_value * factor**2 * read("max_pixels_tolerance")
    min_value, tiles = (read("min_tiles"), read("max_tiles")) if read("do_image_splitting") else (1, 1)
    if not large or min_value == tiles == 1:
        return unsplit
    columns, rows = _find_closest_grid(height, width, read("tile_size"), min_value, tiles)
    if columns * rows == 1:
        # A single tile is encoded at the tile's size, but the processor writes placeholders for the full image.
        return unsplit
    tile = math.ceil(read("tile_size") // patch / down) ** 2
    return columns * rows * tile + (unsplit if read("use_thumbnail") else 0)


def _find_closest_grid(height: int, width: int, tile: int, min_value: int, max_value: int) -> tuple[int, int]:
    """Return the columns and rows closest to the aspect ratio.

    Ties go to the larger grid if the image fills half of it.
    """
    sides = range(1, max_value + 1)
    grids = sorted(
        ((columns, rows) for columns in sides for rows in sides if min_value <= columns * rows <= max_value),
        key=lambda grid: grid[0] * grid[1],
    )
    best, smallest = (1, 1), math.inf
    for columns, rows in grids:
        gap = abs(width / height - columns / rows)
        if gap < smallest or (gap == smallest and width * height > 0.5 * tile**2 * columns * rows):
            best, smallest = (columns, rows), gap
    return best


# -- Pixtral and Mistral 3


def _count_pixtral(read: SettingsReader, height: int, width: int, images: int) -> int:
    size = read.size()
    side = read.get_processor_setting("patch_size") * read.get_processor_setting("spatial_merge_size")
    max_value = [size.get("longest_edge") or size[edge] for edge in ("height", "width")]
    ratio = max(1.0, height / max_value[0], width / max_value[1])
    return math.prod((math.floor(edge / ratio) - 1) // side + 1 for edge in (height, width))


# -- LLaVA-NeXT and LLaVA-OneVision


def _compute_anyres_grid(read: SettingsReader, height: int, width: int, side: int) -> tuple[int, int]:
    """Return rows and columns of features after padding is removed. `side` is the side of a tile's features."""
    from transformers.image_processing_utils import select_best_resolution

    size = read.size()
    tile_high = size.get("height") or size["shortest_edge"]
    tile_wide = size.get("width") or size["shortest_edge"]
    best = select_best_resolution((height, width), read("image_grid_pinpoints"))
    rows, columns = side * (best[0] // tile_high), side * (best[1] // tile_wide)
    # Same rounding steps as in the processor.
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    return rows, columns


def _count_llava_next(read: SettingsReader, height: int, width: int, images: int) -> int:
    size, patch = read.size(), read.get_processor_setting("patch_size")
    side = (size.get("height") or size["shortest_edge"]) // patch
    rows, columns = _compute_anyres_grid(read, height, width, side)
    return (
        side**2
        + read.get_processor_setting("num_additional_image_tokens")
        + rows * (columns + 1)
        - _count_dropped(read)
    )


def _count_onevision(read: SettingsReader, height: int, width: int, images: int) -> int:
    base = read.get_processor_setting("num_image_tokens")
    if images > 1:
        return base + 1 - _count_dropped(read)
    side = math.isqrt(base)
    rows, columns = _compute_anyres_grid(read, height, width, side)
    max_value = int(read.get_processor_setting("vision_aspect_ratio").removeprefix("anyres_max_"))
    ratio = math.sqrt(rows * columns / (max_value * side**2))
    if ratio > 1.1:
        rows, columns = int(rows // ratio), int(columns // ratio)
    return base + rows * (columns + 1) - _count_dropped(read)


def _count_dropped(read: SettingsReader) -> int:
    return int(read.get_processor_setting("vision_feature_select_strategy") == "default")


# -- Families with a fixed number of tokens, or a number that depends only on the image shape


def _count_llava(read: SettingsReader, height: int, width: int, images: int) -> int:
    patch = read.get_processor_setting("patch_size")
    size = (read("do_center_crop") is not False and read.size("crop_size")) or read.size()
    if "height" not in size:
        raise UnsupportedSetupError(f"size={size} without a center crop does not give all images one size")
    patches = (size["height"] // patch) * (size["width"] // patch)
    return patches + read.get_processor_setting("num_additional_image_tokens") - _count_dropped(read)


def _count_internvl(read: SettingsReader, height: int, width: int, images: int) -> int:
    names = ("crop_to_patches", "min_patches", "max_patches")
    tiles = read.image.get_number_of_image_patches(height, width, {name: read(name) for name in names})
    return tiles * read.get_processor_setting("image_seq_length")


def _count_idefics3(read: SettingsReader, height: int, width: int, images: int) -> int:
    # get_number_of_image_patches rounds the shorter side differently from preprocess.
    length = read.get_processor_setting("image_seq_len")
    if not read("do_image_splitting"):
        return length
    tile, long = read("max_image_size")["longest_edge"], read.size()["longest_edge"]
    height, width = _scale_to_long_side(height, width, long, even=True)
    if long > 4096:  # fixed upper bound in transformers
        height, width = _scale_to_long_side(height, width, 4096)
    height, width = _scale_to_long_side(height, width, math.ceil(max(height, width) / tile) * tile)
    rows, columns = math.ceil(height / tile), math.ceil(width / tile)
    return length * (rows * columns + 1 if rows * columns > 1 else 1)


def _scale_to_long_side(height: int, width: int, long: int, even: bool = False) -> tuple[int, int]:
    """Return height and width with the longer side `long`. The other side is rounded down as in the processor."""
    aspect = width / height
    short = int(long / aspect) if width >= height else int(long * aspect)
    short = max(1, short + short % 2 if even else short)
    return (short, long) if width >= height else (long, short)


def _count_gemma4(read: SettingsReader, height: int, width: int, images: int) -> int:
    from transformers.models.gemma4.image_processing_gemma4 import get_aspect_ratio_preserving_size

    patch, pool = read("patch_size"), read("pooling_kernel_size")
    with _check_image_size(height, width):
        size = get_aspect_ratio_preserving_size(height, width, patch, read("max_soft_tokens") * pool**2, pool)
    return math.prod(size) // (patch * pool) ** 2


def _count_deepseek_ocr2(read: SettingsReader, height: int, width: int, images: int) -> int:
    names = ("crop_to_patches", "min_patches", "max_patches", "tile_size")
    view, tile = token_limits.count_deepseek_views(read)
    views = read.image.get_number_of_image_patches(height, width, {name: read(name) for name in names})
    return view + 1 + tile * (views - 1)


_GLM = CountRule(_count_glm, "input", limit=token_limits.GLM, target=resize_targets.find_glm)
_LLAVA = CountRule(_count_llava, "target", target=resize_targets.find_square)
_IDEFICS3 = CountRule(_count_idefics3, None, limit=token_limits.IDEFICS3, target=resize_targets.find_longest_edge)

RULES: dict[str, CountRule] = {
    "Qwen2VLImageProcessor": CountRule(_count_qwen, "input", _compute_qwen_grid, target=_find_qwen_target),
    "Glm4vImageProcessor": _GLM,
    "Glm46VImageProcessor": _GLM,
    "GlmgaImageProcessor": _GLM,
    "Siglip2ImageProcessor": CountRule(
        _count_naflex, None, limit=token_limits.NAFLEX, target=resize_targets.find_naflex
    ),
    "Lfm2VlImageProcessor": CountRule(_count_lfm2, "input", limit=token_limits.LFM2, target=resize_targets.find_lfm2),
    "Gemma4ImageProcessor": CountRule(
        _count_gemma4, None, limit=token_limits.GEMMA4, target=resize_targets.find_gemma4
    ),
    "DeepseekOcr2ImageProcessor": CountRule(
        _count_deepseek_ocr2, None, limit=token_limits.DEEPSEEK_OCR2, target=resize_targets.find_deepseek
    ),
    "PixtralImageProcessor": CountRule(_count_pixtral, "input", target=resize_targets.find_longest_edge),
    "LlavaNextImageProcessor": CountRule(_count_llava_next, "input", target=resize_targets.find_anyres),
    "LlavaOnevisionImageProcessor": CountRule(_count_onevision, "input", target=resize_targets.find_anyres),
    "CLIPImageProcessor": _LLAVA,
    "LlavaImageProcessor": _LLAVA,
    "GotOcr2ImageProcessor": CountRule(
        _count_internvl, None, limit=token_limits.INTERNVL, target=resize_targets.find_tiles
    ),
    "Idefics3ImageProcessor": _IDEFICS3,
    "SmolVLMImageProcessor": _IDEFICS3,
}
