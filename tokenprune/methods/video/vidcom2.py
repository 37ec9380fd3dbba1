# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenprune.kernels.pairs import normalize
from tokenprune.kernels.take import adjust_count
from tokenprune.kernels.temporal import frame_means, gaussian_similarity, select_stable_channels
from tokenprune.methods.registry import register
from tokenprune.selection.method import Site
from tokenprune.selection.sites.video import VideoPruner
from tokenprune.selection.videos import Videos

_TEMPERATURE = 0.01


@register("vidcom2", site=Site.PRE_LLM, needs=("frames",), paper="arXiv 2505.14454, EMNLP 2025")
@dataclass(frozen=True)
class VidCom2(VideoPruner):
    """Keep the tokens that differ most from their frame and the video (VidCom2).

    Distances use the half of the channels with the lowest variance over the video. A frame that differs from the
    video's mean gets up to twice its share of the budget, and the others slightly less. Within a frame, the score of a
    token is its difference from the mean of the frame and from the mean of the video. Videos of one frame use the same
    rule.

    Source:
        Liu et al., "Video Compression Commander: Plug-and-Play Inference Acceleration for Video Large Language Models"
        (arXiv 2505.14454), section on the method, and the authors' code for channels, bandwidths and temperature.

    Differences from the paper:
        - The number of tokens is exact. The rounding error of the frames' shares is corrected by the same score over
          the whole video, as in vLLM.
        - Tokens keep their positions in the full prompt.

    Examples:
        >>> model, _ = tokenprune.demo_model("demo_qwen")
        >>> model = tokenprune.patch(model, VidCom2(), keep=0.25)
    """

    def choose(self, videos: Videos) -> torch.Tensor:
        mask = videos.mask
        x = normalize(select_stable_channels(videos.hidden, mask, mask))
        counts = mask.sum((1, 2))
        video_similarity = gaussian_similarity(x, x.sum((1, 2))[:, None, None] / counts[:, None, None, None])
        score = video_similarity + gaussian_similarity(x, frame_means(x, mask).unsqueeze(2))

        sizes, is_valid = videos.sizes, videos.sizes > 0
        difference = -video_similarity.masked_fill(~mask, 0).sum(2) / sizes.clamp(min=1)
        # Use float64: the softmax is so sharp that float32 shares could round to the wrong count.
        share = (difference.double().masked_fill(~is_valid, -torch.inf) / _TEMPERATURE).softmax(1)
        share = (videos.budget.double() / counts)[:, None] * (1 + share - 1 / videos.num_frames.float()[:, None])
        num_kept = (share.clamp(max=1) * sizes).round().long().clamp(min=1) * is_valid
        keep = videos.top_per_frame(-score, num_kept)
        return adjust_count(keep.flatten(1), -score.flatten(1), mask.flatten(1), videos.budget).view_as(mask)
