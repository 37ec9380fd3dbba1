# SPDX-License-Identifier: Apache-2.0
"""Build prompts with a video, from pixels on, for models similar to Qwen2.5-VL and LLaVA-OneVision."""

from __future__ import annotations

import math
from typing import Any

import torch
from common import FIRST_TEXT_ID, VIDEO_ID, prompt


def inputs(model: Any, grid: tuple[int, int, int], device: torch.device) -> dict[str, Any]:
    """Return the forward's inputs for a prompt with text before and after a video.

    The video has a static background (bit for bit), a moving column, and noise in a quarter of the patches.

    Args:
        model: The model.
        grid: Grid of visual tokens as (frames, height, width).
        device: Device of the inputs.
    """
    config, merge = model.config.vision_config, model.config.vision_config.spatial_merge_size
    frames, height, width = grid[0], grid[1] * merge, grid[2] * merge
    size = config.in_channels * config.temporal_patch_size * config.patch_size**2
    g = torch.Generator(device).manual_seed(0)
    options = dict(generator=g, device=device)
    ground, thing = torch.randn(1, height * width, size, **options), torch.randn(size, **options)
    pixels = ground.repeat(frames, 1, 1)
    flickers = height * width // 4
    pixels[:, :flickers] += 0.1 * torch.randn(frames, flickers, size, **options)
    # Patches of a visual token (`merge` x `merge`) are adjacent.
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
    """Return the forward's inputs for LLaVA-OneVision: text before and after a video with similar successive frames."""
    vision = model.config.vision_config
    g = torch.Generator(device).manual_seed(0)
    steps = torch.randn(frames, 3, vision.image_size, vision.image_size, generator=g, device=device)
    side = -(-(vision.image_size // vision.patch_size) // 2)  # 2 x 2 pooling; a newline token follows
    ids = prompt(frames * side**2 + 1, device, VIDEO_ID, model.config.text_config.vocab_size)
    return {"input_ids": ids, "pixel_values_videos": (0.3 * steps).cumsum(0)[None]}
