# SPDX-License-Identifier: Apache-2.0
"""Grid of each image or frame of a prompt, in visual tokens."""

from __future__ import annotations

import math
from typing import Any

from tokenprune.errors import UnsupportedSetupError
from tokenprune_bench.profiling.model import Model

Grid = tuple[int, int]


def get_grids(subject: Model, inputs: dict[str, Any], images: int, video: bool) -> list[Grid]:
    """Return (height, width) in tokens of each image or frame of one prompt, in the order of its tokens."""
    family, count = subject.model.config.model_type, subject.visual_tokens(inputs)
    grids_in_time, pixels = subject.adapter.grids("video" if video else "image", inputs), inputs.get("pixel_values")
    if not video:
        if pixels is None:
            raise UnsupportedSetupError(f"`show` does not support the image inputs of {family!r}.")
        # (1, tiles, 3, H, W) or (tiles, 3, H, W): the tokens belong to several overlapping crops.
        if (grids_in_time is None or images == 1) and (pixels.ndim > 4 or (pixels.ndim == 4 and len(pixels) != images)):
            raise UnsupportedSetupError(f"{family!r} cuts images into tiles, which `show` does not support.")
        side = math.isqrt(count // images)
        grids_in_time = grids_in_time or [(1, side, side)] * images
    num_after = 0
    if video and grids_in_time is None:  # square frames, and a newline token after the last frame
        frames, num_after = sum(subject.adapter.video_frames(inputs) or []), subject.adapter.family.after_video
        side = math.isqrt((count - num_after) // frames) if frames else 0
        grids_in_time = [(frames, side, side)]
    grids = [(height, width) for times, height, width in grids_in_time or [] for _ in range(times)]
    if not grids or sum(height * width for height, width in grids) != count - num_after:
        raise UnsupportedSetupError(f"The {count} visual tokens of {family!r} do not form a grid that `show` supports.")
    return grids
