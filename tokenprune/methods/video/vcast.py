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
    """Keep salient tokens of each frame and more at turns of the video (V-CAST).

    The means of the frames form a path. The budget is shared by a softmax of the path's curvature at each frame, after
    one token per frame if possible. Within a frame, the score of a token is 1 minus its cosine to the frame's mean,
    plus its norm rescaled to [0, 1]. Videos of one frame use the same score.

    Source:
        Lin et al., "V-CAST: Video Curvature-Aware Spatio-Temporal Pruning for Efficient Video Large Language Models"
        (arXiv 2603.27650), and the authors' code for temperature, score, and the token per frame.

    Differences from the paper:
        - The remainder of the split goes to the frames with the largest fractions, one token each. The code gives it to
          one frame. Tokens that do not fit into a frame go to the others in proportion.
        - Fewer tokens than frames may be kept.

    Examples:
        >>> model, _ = tokenprune.demo_model("demo_qwen")
        >>> model = tokenprune.patch(model, VCast(), keep=0.25)
    """

    def choose(self, videos: Videos) -> torch.Tensor:
        mask = videos.mask
        means = frame_means(videos.hidden, mask)
        turn = curvature(means, videos.num_frames).masked_fill(videos.sizes == 0, -torch.inf)
        num_kept = split_budget((turn / _TEMPERATURE).softmax(1), videos.budget, videos.sizes, min_tokens=1)

        norm = videos.hidden.norm(dim=-1)
        low = norm.masked_fill(~mask, torch.inf).amin(2, keepdim=True)
        high = norm.masked_fill(~mask, -torch.inf).amax(2, keepdim=True)
        score = 1 - cosine_similarity(videos.hidden, means.unsqueeze(2)) + (norm - low) / (high - low + _EPS)
        return videos.top_per_frame(score, num_kept)
