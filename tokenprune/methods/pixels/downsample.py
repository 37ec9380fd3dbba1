# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tokenprune.methods.registry import register
from tokenprune.selection.method import Site
from tokenprune.selection.sites.pixels import ResizeMethod


@register("downsample", site=Site.PRE_ENCODER, paper="arXiv 2510.07143 (as a baseline)")
@dataclass(frozen=True)
class Downsample(ResizeMethod):
    """Downsample images and videos before the vision tower.

    `keep` is the share of an image's visual tokens, so both sides shrink by its square root, or a maximum number of
    tokens, which leaves smaller images unchanged. The method acts through the processor and also saves work in the
    vision tower.

    Args:
        videos: Also shrink the frames of videos. Processors that make the same number of tokens of small and large
            frames raise UnsupportedSetupError for videos.

    Source:
        The protocol of VTC-Bench (arXiv 2510.07143), with side factor k and keep 1 / k^2.

    Differences from the paper:
        - Any share is allowed. It refers to the tokens that the model would see, also if the processor resizes the
          image itself.
        - Processors with a fixed image size would undo the resizing. Their target size shrinks instead, to complete
          patches, and the tower interpolates its position table.

    Examples:
        >>> model = tokenprune.patch(model, Downsample(), keep=0.25, processor=processor)
        >>> processor(images=image, text="<image> Describe.", return_tensors="pt")["pixel_values"].shape
        torch.Size([1, 3, 112, 112])
    """

    takes_tokens: ClassVar[bool] = True

    videos: bool = True

    def compute_shares(self, images: Sequence[Any], keep: float, per: str) -> list[float]:
        return [keep] * len(images)
