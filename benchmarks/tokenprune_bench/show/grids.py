# SPDX-License-Identifier: Apache-2.0
"""The shape of each image or frame of a prompt, in visual tokens."""

from __future__ import annotations

import math
from typing import Any

from tokenprune.errors import UnsupportedSetupError
from tokenprune_bench.profiling.model import Model

Grid = tuple[int, int]


def grids_of(subject: Model, inputs: dict[str, Any], images: int, video: bool) -> list[Grid]:
    """Return (height, width) in tokens of each image or frame of the one prompt, in the order of its tokens."""
    family, count = subject.model.config.model_type, subject.visual_tokens(inputs)
    found, pixels = subject.adapter.grids("video" if video else "image", inputs), inputs.get("pixel_values")
    if not video:
        if pixels is None:
            raise UnsupportedSetupError(f"{family!r} takes images in a form that `show` does not know")
        # [1, tiles, 3, H, W] or [tiles, 3, H, W]: its tokens are those of several crops, and overlap in the image.
        if (found is None or images == 1) and (pixels.ndim > 4 or (pixels.ndim == 4 and len(pixels) != images)):
            raise UnsupportedSetupError(f"{family!r} cuts an image into tiles; `show` draws images that are one grid")
        side = math.isqrt(count // images)
        found = found or [(1, side, side)] * images
    behind = 0
    if video and found is None:  # frames of one square each, and what follows the last (a newline)
        frames, behind = sum(subject.adapter.video_frames(inputs) or []), subject.adapter.family.after_video
        side = math.isqrt((count - behind) // frames) if frames else 0
        found = [(frames, side, side)]
    grids = [(height, width) for times, height, width in found or [] for _ in range(times)]
    if not grids or sum(height * width for height, width in grids) != count - behind:
        raise UnsupportedSetupError(f"the {count} visual tokens of {family!r} form no grids that `show` knows of")
    return grids
