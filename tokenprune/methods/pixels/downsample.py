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
    """Hand the model a smaller image, or smaller frames of a video: the baseline that needs no library at all.

    `keep` is the share of the image's visual tokens, so both sides shrink by its square root; or a number, the most
    tokens of an image ("max visual tokens"), which leaves smaller images as they are. It acts through the processor:
    `tokenprune.patch(model, "downsample", keep=0.25, processor=processor)`, and saves work in the vision tower as well.

    videos: whether frames of videos shrink too; False leaves them as they are. Where a processor makes as many tokens
    of small frames as of large ones, a video raises UnsupportedSetupError.

    Source: the protocol of VTC-Bench, arXiv 2510.07143 (side factor k, keep 1 / k^2).

    Differs from the paper: any share is allowed, and it is one of the tokens that the model would see: an image that
    the processor would shrink or enlarge anyway still gives that share. Processors that make every image one fixed
    size would undo the resizing; their target size shrinks instead, to whole patches, and the tower interpolates its
    position table.
    """

    takes_tokens: ClassVar[bool] = True

    videos: bool = True

    def compute_shares(self, images: Sequence[Any], keep: float, per: str) -> list[float]:
        return [keep] * len(images)
