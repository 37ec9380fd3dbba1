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
    """Keep every k-th frame of a video: the baseline of a lower frame rate.

    The budget is spent on complete frames at equal distances. The rest of the budget goes to the last of these frames,
    with tokens spread evenly as in `uniform`, so that the count is exact. A budget below one frame thins the middle
    frame.

    Source:
        None. A baseline.

    Examples:
        >>> model, _ = tokenprune.demo_model("demo_qwen")
        >>> model = tokenprune.patch(model, Frames(), keep=0.25)
    """

    def choose(self, videos: Videos) -> torch.Tensor:
        counts = [_count_per_frame(keep, sizes) for keep, sizes in zip(videos.keep, videos.frames, strict=True)]
        return spread_in_frames(videos, counts)


def _count_per_frame(keep: int, sizes: list[int]) -> list[int]:
    """Return the number of tokens that each frame keeps. `sizes` are the tokens per frame."""
    for num_frames in range(1, len(sizes) + 1):
        chosen = sample_evenly(len(sizes), num_frames)
        if sum(sizes[frame] for frame in chosen) >= keep:
            break
    counts, remaining = [0] * len(sizes), keep
    for frame in chosen:
        counts[frame] = min(remaining, sizes[frame])
        remaining -= counts[frame]
    return counts
