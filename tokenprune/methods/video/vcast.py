# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenprune.kernels.temporal import cosine_similarity, curvature, frame_means, split_budget
from tokenprune.methods.registry import register
from tokenprune.selection.method import Site
from tokenprune.selection.sites.video import VideoPruner
from tokenprune.selection.videos import Videos

_TEMPERATURE, _EPS = 0.7, 1e-6


@register("vcast", site=Site.PRE_LLM, needs=("frames",), paper="arXiv 2603.27650")
@dataclass(frozen=True)
class VCast(VideoPruner):
    """Keep of each frame of a video what stands out, and more of the frames at which the video turns (V-CAST).

    The means of the frames are a path; how sharply it turns at a frame, as a softmax, is the frame's share of the
    budget, beside one token that each gets if there are enough. In a frame those tokens stay that point away from its
    mean or are long: 1 - cosine to the mean, plus the norm scaled to 0 .. 1 within the frame. A video of one frame is
    chosen from by the same score.

    Source: Lin et al., "V-CAST: Video Curvature-Aware Spatio-Temporal Pruning for Efficient Video Large Language
    Models"; the authors' code for what it leaves open (temperature, score, one token a frame).

    Differs from the paper: what does not divide among frames goes to the largest fractions, one token each (the code
    gives all of it to one frame), and what a full frame cannot take goes to the others in proportion; fewer tokens
    than frames may be kept.
    """

    def choose(self, videos: Videos) -> torch.Tensor:
        mask = videos.mask
        means = frame_means(videos.hidden, mask)
        turn = curvature(means, videos.num_frames).masked_fill(videos.sizes == 0, -torch.inf)
        numbers = split_budget((turn / _TEMPERATURE).softmax(1), videos.budget, videos.sizes, least=1)

        length = videos.hidden.norm(dim=-1)
        low = length.masked_fill(~mask, torch.inf).amin(2, keepdim=True)
        high = length.masked_fill(~mask, -torch.inf).amax(2, keepdim=True)
        score = 1 - cosine_similarity(videos.hidden, means.unsqueeze(2)) + (length - low) / (high - low + _EPS)
        return videos.top_per_frame(score, numbers)
