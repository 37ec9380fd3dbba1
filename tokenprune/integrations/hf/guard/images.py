# SPDX-License-Identifier: Apache-2.0
"""Measure how much an image looks like text, from the normalised pixels that the vision tower gets.

An image is split into blocks. A block with contrast looks like text if many pixels have its lightest or its darkest
value (the paper), and its mean brightness is crossed often along both rows and columns. Wood, grass and noise have no
paper. Edges, stripes and shadows are crossed rarely, or along one axis only. The measure is the share of text blocks
among the blocks with contrast. docs/guides/guard.md shows how well it separates documents from photographs.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

# Side of a block in pixels: two patches of 14.
SIDE = 28
# Smallest range of a block with contrast, as a share of the range of its image.
_CONTRAST = 0.3
# Distance from the extremes of a block that counts as paper, as a share of the range of the block.
_PAPER_RANGE = 0.2
_PAPER = 0.5  # smallest share of paper pixels
_CROSSED = 1.5 / 27  # smallest share of neighbouring pixels on different sides of the mean brightness
# Smallest share of blocks with contrast that an image is divided by: a photo with two words is not a document.
_MIN_CONTRAST_SHARE = 0.25


@torch.no_grad()
def compute_text_shares(blocks: Tensor, owner: Tensor, num_images: int) -> Tensor:
    """Compute how much each image looks like text, without synchronising with the device.

    Args:
        blocks: Grey blocks, shape (blocks, height, width), in any scale.
        owner: Image index of each block, shape (blocks,), int64.
        num_images: Number of images.

    Returns:
        Values from 0 to 1, shape (images,), float32, on the device of the blocks. 0 for an image of a single value or
        without blocks.
    """
    values = blocks.float()
    flat = values.flatten(1)
    low, high = (bound.nan_to_num(0.0, 0.0, 0.0) for bound in flat.aminmax(dim=1))
    span = high - low
    image_low = _reduce_per_image(low, owner, num_images, "amin")
    image_span = _reduce_per_image(high, owner, num_images, "amax") - image_low
    contrast = (span > _CONTRAST * image_span[owner]) & (span > 0)

    def exceeds(mask: Tensor, share: float) -> Tensor:
        return mask.flatten(1).sum(1) > share * mask.shape[1:].numel()

    dark, light = flat < (low + _PAPER_RANGE * span)[:, None], flat > (high - _PAPER_RANGE * span)[:, None]
    above = values > (low + span / 2)[:, None, None]
    lines, columns = above[:, :, 1:] != above[:, :, :-1], above[:, 1:] != above[:, :-1]
    has_paper = exceeds(dark, _PAPER) | exceeds(light, _PAPER)
    text = has_paper & exceeds(lines, _CROSSED) & exceeds(columns, _CROSSED) & contrast

    def count(mask: Tensor) -> Tensor:
        return torch.zeros(num_images, dtype=torch.float32, device=mask.device).index_add_(0, owner, mask.float())

    min_contrast = (_MIN_CONTRAST_SHARE * count(torch.ones_like(text))).clamp(min=1)
    return count(text) / torch.maximum(count(contrast), min_contrast)


def _reduce_per_image(values: Tensor, owner: Tensor, num_images: int, how: str) -> Tensor:
    return values.new_zeros(num_images).scatter_reduce_(0, owner, values, how, include_self=False)


def split_blocks(planes: Tensor, side: int = SIDE) -> Tensor:
    """Split images into grey blocks. Pixels beyond the last full block are dropped.

    Args:
        planes: Images, shape (images, channels, height, width).
        side: Side of a block in pixels.

    Returns:
        Blocks, shape (images, blocks, side, side).
    """
    grey = planes.mean(1)
    height, width = (size // side * side for size in grey.shape[1:])
    return rearrange(grey[:, :height, :width], "n (h a) (w b) -> n (h w) a b", a=side, b=side)
