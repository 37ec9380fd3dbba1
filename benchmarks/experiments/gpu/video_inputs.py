# SPDX-License-Identifier: Apache-2.0
"""Prompts with a video, from pixels on, for models of Qwen2.5-VL's kind."""

from __future__ import annotations

import math
from typing import Any

import torch
from common import FIRST_TEXT_ID, VIDEO_ID, prompt


def inputs(model: Any, grid: tuple[int, int, int], device: torch.device) -> dict[str, Any]:
    """Return what the forward of a prompt is called with: text on either side of a video. grid: of visual tokens, as
    (frames, height, width).

    Over a ground that stands still, to the bit, a column moves; a quarter of the places flickers.
    """
    config, merge = model.config.vision_config, model.config.vision_config.spatial_merge_size
    frames, height, width = grid[0], grid[1] * merge, grid[2] * merge
    size = config.in_channels * config.temporal_patch_size * config.patch_size**2
    g = torch.Generator(device).manual_seed(0)
    made = dict(generator=g, device=device)
    ground, thing = torch.randn(1, height * width, size, **made), torch.randn(size, **made)
    pixels = ground.repeat(frames, 1, 1)
    flickers = height * width // 4
    pixels[:, :flickers] += 0.1 * torch.randn(frames, flickers, size, **made)
    # Patches lie in the order of visual tokens, `merge` by `merge` of them together.
    unit = torch.arange(height * width, device=device) // merge**2
    for frame in range(frames):
        pixels[frame, unit % grid[2] == frame % grid[2]] = thing
    tokens = math.prod(grid)
    ids = prompt(tokens, device, VIDEO_ID, max(FIRST_TEXT_ID + 1, model.config.text_config.vocab_size))
    return {
        "input_ids": ids, "pixel_values_videos": pixels.flatten(0, 1).to(model.dtype),
        "video_grid_thw": torch.tensor([[frames, height, width]], device=device),
        "mm_token_type_ids": 2 * (ids == VIDEO_ID).long(),
    }  # fmt: skip


def of_frames(model: Any, frames: int, device: torch.device) -> dict[str, Any]:
    """Return what the forward of a prompt is called with in a model of LLaVA-OneVision's kind: text on either side of a
    video whose frames differ little from one to the next."""
    vision = model.config.vision_config
    g = torch.Generator(device).manual_seed(0)
    steps = torch.randn(frames, 3, vision.image_size, vision.image_size, generator=g, device=device)
    side = -(-(vision.image_size // vision.patch_size) // 2)  # tokens are pooled two by two, and a newline ends them
    ids = prompt(frames * side**2 + 1, device, VIDEO_ID, model.config.text_config.vocab_size)
    return {"input_ids": ids, "pixel_values_videos": (0.3 * steps).cumsum(0)[None]}
