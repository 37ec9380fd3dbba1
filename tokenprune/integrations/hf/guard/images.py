# SPDX-License-Identifier: Apache-2.0
"""A measure of text in an image: from pixels as a vision tower gets them, whatever they were normalised by.

An image is cut into blocks. A block with contrast is like text if many of its pixels have the block's lightest or
darkest value (paper), and the middle between the two is crossed often in its lines and in its columns. Wood, grass and
noise have no paper; edges, stripes and shadows are crossed in one direction or seldom. The measure is the share of such
blocks among those with contrast. docs/guides/guard.md has how well that tells documents from photographs.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

# A block's side, where the image comes whole: two patches of 14.
SIDE = 28
# Of the image's range of values: what a block needs to have contrast. Of the block's: what is near its extremes.
_CONTRAST, _NEAR = 0.3, 0.2
_PAPER = 0.5  # share of pixels near the lighter or near the darker extreme
_CROSSED = 1.5 / 27  # share of pairs of neighbours on two sides of the middle
# An image with few blocks of contrast is judged as if it had this share of them: two words on a wall are no document.
_LEAST = 0.25


@torch.no_grad()
def text_shares(blocks: Tensor, owner: Tensor, images: int) -> Tensor:
    """Return float32 `[images]` on the blocks' device: how much each looks like text, 0 to 1; 0 for an image of one
    value, or without blocks. Nothing waits for the device.

    blocks: grey `[K, H, W]`, in any scale. owner: long `[K]`, the image of each block.
    """
    values = blocks.float()
    flat = values.flatten(1)
    low, high = (bound.nan_to_num(0.0, 0.0, 0.0) for bound in flat.aminmax(dim=1))
    span = high - low
    full = _of_images(high, owner, images, "amax") - _of_images(low, owner, images, "amin")
    contrast = (span > _CONTRAST * full[owner]) & (span > 0)

    def least(of: Tensor, share: float) -> Tensor:
        return of.flatten(1).sum(1) > share * of.shape[1:].numel()

    dark, light = flat < (low + _NEAR * span)[:, None], flat > (high - _NEAR * span)[:, None]
    above = values > (low + span / 2)[:, None, None]
    lines, columns = above[:, :, 1:] != above[:, :, :-1], above[:, 1:] != above[:, :-1]
    text = (least(dark, _PAPER) | least(light, _PAPER)) & least(lines, _CROSSED) & least(columns, _CROSSED) & contrast

    def count(of: Tensor) -> Tensor:
        return torch.zeros(images, dtype=torch.float32, device=of.device).index_add_(0, owner, of.float())

    few = (_LEAST * count(torch.ones_like(text))).clamp(min=1)
    return count(text) / torch.maximum(count(contrast), few)


def _of_images(values: Tensor, owner: Tensor, images: int, how: str) -> Tensor:
    return values.new_zeros(images).scatter_reduce_(0, owner, values, how, include_self=False)


def blocks_of(planes: Tensor, side: int = SIDE) -> Tensor:
    """Cut `[N, C, H, W]` images into grey blocks `[N, blocks, side, side]`; what is left at the edges is left out."""
    grey = planes.mean(1)
    high, wide = (size // side * side for size in grey.shape[1:])
    return rearrange(grey[:, :high, :wide], "n (h a) (w b) -> n (h w) a b", a=side, b=side)
