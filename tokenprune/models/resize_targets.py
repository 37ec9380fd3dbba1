# SPDX-License-Identifier: Apache-2.0
"""Size of an image after an image processor resized it, which covers all views such as tiles."""

from __future__ import annotations

import math

from tokenprune.models.processor_settings import SettingsReader

Size = tuple[int, int]


def find_square(read: SettingsReader, height: int, width: int) -> Size:
    """Return the size for processors that resize the shorter side, or both, to one size."""
    size = read.size()
    if "height" in size and not read("do_pad"):
        return size["height"], size["width"]
    ratio = max(size.values()) / min(height, width)
    return math.ceil(height * ratio), math.ceil(width * ratio)


def find_anyres(read: SettingsReader, height: int, width: int) -> Size:
    """Return the size for LLaVA-NeXT and OneVision, which fit an image into the best of several resolutions."""
    from transformers.image_processing_utils import select_best_resolution

    size = read.size()
    tile = size.get("height") or size["shortest_edge"]
    high, wide = select_best_resolution((height, width), read("image_grid_pinpoints"))
    ratio = max(min(high / height, wide / width), tile / min(height, width))
    return math.ceil(height * ratio), math.ceil(width * ratio)


def find_tiles(read: SettingsReader, height: int, width: int) -> Size:
    """Return the size for InternVL, the canvas of its tiles."""
    from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

    size = read.size()
    if not read("crop_to_patches") or read("max_patches") == 1:
        return size["height"], size["width"]
    tile = size["height"], size["width"]
    columns, rows = get_optimal_tiled_canvas((height, width), tile, read("min_patches"), read("max_patches"))
    return rows * tile[0], columns * tile[1]


def find_deepseek(read: SettingsReader, height: int, width: int) -> Size:
    """Return the size for DeepSeek-OCR 2, which makes one view and tiles."""
    from transformers.models.deepseek_ocr2.image_processing_deepseek_ocr2 import get_optimal_tiled_canvas

    ratio, tile = read.size()["height"] / max(height, width), read("tile_size")
    view = math.ceil(height * ratio), math.ceil(width * ratio)
    if not read("crop_to_patches") or max(height, width) <= tile:
        return view
    columns, rows = get_optimal_tiled_canvas((height, width), (tile, tile), read("min_patches"), read("max_patches"))
    return max(view[0], rows * tile), max(view[1], columns * tile)


def find_longest_edge(read: SettingsReader, height: int, width: int) -> Size:
    """Return the size for Idefics3, SmolVLM and Pixtral, which limit the longer side."""
    size = read.size()
    ratio = (size.get("longest_edge") or max(size.values())) / max(height, width)
    return math.ceil(height * ratio), math.ceil(width * ratio)


def find_glm(read: SettingsReader, height: int, width: int) -> Size:
    """Return the size for GLM-4.1V and later, where an image counts as `temporal_patch_size` frames."""
    from transformers.models.glm4v.image_processing_glm4v import smart_resize

    frames, size = read("temporal_patch_size"), read.size()
    limits = size["shortest_edge"], size["longest_edge"]
    resized: Size = smart_resize(frames, height, width, frames, read("patch_size") * read("merge_size"), *limits)
    return resized


def find_naflex(read: SettingsReader, height: int, width: int) -> Size:
    """Return the size for SigLIP2 NaFlex."""
    from transformers.models.siglip2.image_processing_siglip2 import get_image_size_for_max_num_patches

    size: Size = get_image_size_for_max_num_patches(height, width, read("patch_size"), read("max_num_patches"))
    return size


def find_gemma4(read: SettingsReader, height: int, width: int) -> Size:
    """Return the size for Gemma 4."""
    from transformers.models.gemma4.image_processing_gemma4 import get_aspect_ratio_preserving_size

    patch, pool = read("patch_size"), read("pooling_kernel_size")
    size: Size = get_aspect_ratio_preserving_size(height, width, patch, read("max_soft_tokens") * pool**2, pool)
    return size


def find_lfm2(read: SettingsReader, height: int, width: int) -> Size:
    """Return the size for LFM2-VL, with all tiles that it may cut."""
    patch, down, tile = read("encoder_patch_size"), read("downsample_factor"), read("tile_size")
    limits = read("min_image_tokens"), read("max_image_tokens")
    wide, high = read.image.smart_resize(height, width, down, *limits, patch)
    if not read("do_image_splitting"):
        return high, wide
    sides = read.image._get_grid_layout(height, width, read("min_tiles"), read("max_tiles"), tile)
    return max(high, sides[3]), max(wide, sides[2])
