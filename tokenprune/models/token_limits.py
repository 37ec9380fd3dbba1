# SPDX-License-Identifier: Apache-2.0
"""Settings of image processors that limit the visual tokens of an image, one row per kind of processor.

A processor without a row here limits tokens by the size of the image, see `CountRule.resizing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenprune.errors import BudgetError
from tokenprune.models.processor_settings import SettingsReader

Step = tuple[int, dict[str, Any]]


@dataclass(frozen=True)
class NativeLimit:
    """Keyword arguments of a processor's call that limit the visual tokens of each image.

    Args:
        setting: Name of the setting, for documentation.
        values: Numbers of tokens that the setting allows, for documentation.
        steps: Function (settings, maximum) -> pairs of the maximum tokens of an image and the keyword arguments that
            set it, from the largest to the smallest. The maximum holds for every image, so images of a call do not
            influence each other.
    """

    setting: str
    values: str
    steps: Callable[[SettingsReader, int], Iterator[Step]]

    def choose(self, read: SettingsReader, max_tokens: int) -> dict[str, Any]:
        """Return the keyword arguments of the largest step of at most `max_tokens` tokens.

        Raises:
            BudgetError: If the smallest step has more tokens.
        """
        smallest = None
        for smallest, kwargs in self.steps(read, max_tokens):
            if smallest <= max_tokens:
                return kwargs
        raise BudgetError(
            f"max_visual_tokens={max_tokens} is too small for {type(read.image).__name__}. It makes at least "
            f"{smallest} tokens of a large image."
        )


def _limit_tiles(read: SettingsReader, tile: int, base: int, thumbnail: int) -> Iterator[Step]:
    """Yield steps of `max_patches` for a processor that cuts an image into at most that many tiles.

    Args:
        tile: Tokens of a tile.
        base: Tokens besides the tiles.
        thumbnail: Tokens of the view of the complete image, which is only added to several tiles.
    """
    for tiles in range(read("max_patches"), 0, -1):
        kwargs = {"max_patches": tiles, "min_patches": min(read("min_patches"), tiles)}
        yield base + tile * tiles + (thumbnail if tiles > 1 else 0), kwargs


def _limit_internvl(read: SettingsReader, max_tokens: int) -> Iterator[Step]:
    tile = read.get_processor_setting("image_seq_length")
    if not read("crop_to_patches"):
        yield tile, {}
        return
    yield from _limit_tiles(read, tile, 0, tile)


def _limit_deepseek_ocr2(read: SettingsReader, max_tokens: int) -> Iterator[Step]:
    view, tile = count_deepseek_views(read)
    yield from _limit_tiles(read, tile, view + 1, 0)


def _limit_idefics3(read: SettingsReader, max_tokens: int) -> Iterator[Step]:
    tokens, tile = read.get_processor_setting("image_seq_len"), read("max_image_size")["longest_edge"]
    if read("do_image_splitting"):
        longest = min(read.size()["longest_edge"], 4096)
        for side in range(math.ceil(longest / tile), 1, -1):
            yield tokens * (side**2 + 1), {"size": {"longest_edge": min(side * tile, longest)}}
        yield tokens, {"size": {"longest_edge": min(tile, longest)}}
        return
    yield tokens, {}


def _limit_gemma4(read: SettingsReader, max_tokens: int) -> Iterator[Step]:
    from transformers.models.gemma4.image_processing_gemma4 import _SUPPORTED_SOFT_TOKENS

    for tokens in sorted(_SUPPORTED_SOFT_TOKENS, reverse=True):
        if tokens <= read("max_soft_tokens"):
            yield tokens, {"max_soft_tokens": tokens}


def _limit_glm(read: SettingsReader, max_tokens: int) -> Iterator[Step]:
    size = read.size()
    token = (read("patch_size") * read("merge_size")) ** 2 * read("temporal_patch_size")
    longest = min(size["longest_edge"], max_tokens * token)
    shortest = _lower_minimum(size["shortest_edge"], longest, token)
    yield longest // token, {"size": {"shortest_edge": shortest, "longest_edge": longest}}


def _limit_naflex(read: SettingsReader, max_tokens: int) -> Iterator[Step]:
    tokens = min(read("max_num_patches"), max_tokens)
    yield tokens, {"max_num_patches": tokens}


def _limit_lfm2(read: SettingsReader, max_tokens: int) -> Iterator[Step]:
    unsplit = read("max_image_tokens")
    if read("do_image_splitting"):
        tile = math.ceil(read("tile_size") // read("encoder_patch_size") / read("downsample_factor")) ** 2
        thumbnail = unsplit if read("use_thumbnail") else 0
        for tiles in range(read("max_tiles"), max(read("min_tiles"), 2) - 1, -1):
            yield max(unsplit, tiles * tile + thumbnail), {"max_tiles": tiles}
    tokens = min(unsplit, max_tokens)
    limits = {"max_image_tokens": tokens, "min_image_tokens": _lower_minimum(read("min_image_tokens"), tokens, 1)}
    yield tokens, {"do_image_splitting": False, "min_tiles": 1, "max_tiles": 1} | limits


def _lower_minimum(minimum: int, maximum: int, token: int) -> int:
    """Return a minimum that an image, enlarged with both sides rounded up, can reach within `maximum`."""
    return minimum if 4 * minimum <= maximum else token


def count_deepseek_views(read: SettingsReader) -> tuple[int, int]:
    """Return the tokens of the complete view and of a tile, for DeepSeek-OCR 2."""
    side = read.get_processor_setting("patch_size") * read.get_processor_setting("downsample_ratio")
    view, tile = (math.ceil(pixels / side) ** 2 for pixels in (read.size()["height"], read("tile_size")))
    return view, tile


INTERNVL = NativeLimit("`max_patches`", "tiles, and a view of several", _limit_internvl)
IDEFICS3 = NativeLimit("`size.longest_edge`", "a view, and squares of tiles", _limit_idefics3)
GEMMA4 = NativeLimit("`max_soft_tokens`", "70, 140, 280, 560 or 1,120", _limit_gemma4)
GLM = NativeLimit("`size.longest_edge`", "any", _limit_glm)
NAFLEX = NativeLimit("`max_num_patches`", "any", _limit_naflex)
LFM2 = NativeLimit("`max_tiles`, `max_image_tokens`", "a view, and tiles", _limit_lfm2)
DEEPSEEK_OCR2 = NativeLimit("`max_patches`", "tiles, and a view", _limit_deepseek_ocr2)
