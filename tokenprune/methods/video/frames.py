# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenprune.methods.pre_llm.uniform import sample_evenly, spread_in_frames
from tokenprune.methods.registry import register
from tokenprune.selection.method import Site
from tokenprune.selection.sites.video import VideoPruner
from tokenprune.selection.videos import Videos


@register("frames", site=Site.PRE_LLM, needs=("frames",), paper="none (baseline)")
@dataclass(frozen=True)
class Frames(VideoPruner):
    """Keep every k-th frame of a video whole: the baseline of a lower frame rate.

    As many frames at even distances as the budget pays for. What is left of it when they are whole is spent on one more
    of these frames, the last, whose tokens are spread evenly like those of `uniform`; so the number is exact, and a
    budget below one frame thins the middle frame.
    """

    def choose(self, videos: Videos) -> torch.Tensor:
        numbers = [_numbers(keep, sizes) for keep, sizes in zip(videos.keep, videos.frames, strict=True)]
        return spread_in_frames(videos, numbers)


def _numbers(keep: int, sizes: list[int]) -> list[int]:
    """Return how many tokens each frame keeps. sizes: how many it has."""
    for number in range(1, len(sizes) + 1):
        chosen = sample_evenly(len(sizes), number)
        if sum(sizes[frame] for frame in chosen) >= keep:
            break
    numbers, left = [0] * len(sizes), keep
    for frame in chosen:
        numbers[frame] = min(left, sizes[frame])
        left -= numbers[frame]
    return numbers
