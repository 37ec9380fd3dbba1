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
    """Keep the tokens of a video that are least like their frame and like the whole video, more of a frame apart
    (VidCom2).

    All is compared on the half of the channels that varies least over the video. A frame whose tokens are unlike the
    video's mean gets up to twice its share, the others a little less; within a frame those tokens stay that are least
    like the mean of the frame and that of the video. A video of one frame is chosen from in the same way.

    Source: Liu et al., "Video Compression Commander: Plug-and-Play Inference Acceleration for Video Large Language
    Models", section on the method; the authors' code for what it leaves open (channels, bandwidths, temperature).

    Differs from the paper: the number of tokens is exact: what the rounded shares of frames are too many or too few by
    goes, or comes back, by the same score over the whole video, as in vLLM; tokens keep their positions of the full
    prompt.
    """

    def choose(self, videos: Videos) -> torch.Tensor:
        mask = videos.mask
        x = normalize(select_stable_channels(videos.hidden, mask, mask))
        counts = mask.sum((1, 2))
        of_video = gaussian_similarity(x, x.sum((1, 2))[:, None, None] / counts[:, None, None, None])
        score = of_video + gaussian_similarity(x, frame_means(x, mask).unsqueeze(2))

        sizes, real = videos.sizes, videos.sizes > 0
        apart = -of_video.masked_fill(~mask, 0).sum(2) / sizes.clamp(min=1)
        # In float64: the softmax is so sharp that a share in float32 would reach the half at which it is rounded.
        share = (apart.double().masked_fill(~real, -torch.inf) / _TEMPERATURE).softmax(1)
        share = (videos.budget.double() / counts)[:, None] * (1 + share - 1 / videos.num_frames.float()[:, None])
        numbers = (share.clamp(max=1) * sizes).round().long().clamp(min=1) * real
        keep = videos.top_per_frame(-score, numbers)
        return adjust_count(keep.flatten(1), -score.flatten(1), mask.flatten(1), videos.budget).view_as(mask)
