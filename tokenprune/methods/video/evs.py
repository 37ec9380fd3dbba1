# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenprune.kernels.temporal import same_place
from tokenprune.methods.pre_llm.uniform import spread_in_frames
from tokenprune.methods.registry import register
from tokenprune.selection.method import Site
from tokenprune.selection.sites.video import VideoPruner
from tokenprune.selection.videos import Videos

_FIRST = 4.0  # above all distances, which are at most 2


@register("evs", site=Site.PRE_LLM, needs=("frames",), paper="arXiv 2510.14624")
@dataclass(frozen=True)
class EVS(VideoPruner):
    """Keep the tokens of a video that changed most since the frame before, and its first frame whole (EVS).

    A token's score is 1 - cosine to the token at the same place one frame before; the highest scores of the whole video
    stay, so that a frame in which nothing moves may lose all its tokens. The first frame comes before all others; where
    less than that is to be kept, and so of a video of one frame, its tokens are spread evenly like those of `uniform`.

    Source: NVIDIA, "Efficient Video Sampling: Pruning Temporally Redundant Tokens for Faster VLM Inference", the form
    on embeddings, as vLLM has it.

    Differs from the paper: the number of tokens is exact (the paper has a threshold at a percentile), and may be less
    than the first frame has; no form on pixels; tokens keep their positions of the full prompt.
    """

    def choose(self, videos: Videos) -> torch.Tensor:
        return videos.top(
            torch.cat([score_first_frames(videos, self.name), 1 - same_place(videos.x, videos.mask)], dim=1)
        )


def score_first_frames(videos: Videos, name: str) -> torch.Tensor:
    """float32 `[V, 1, P]`: scores of the tokens of the first frames, above those of all others, 1 - cosine; where less
    than a frame is to be kept those are highest that are spread evenly, and the statistics say so."""
    if any(keep < sizes[0] for keep, sizes in zip(videos.keep, videos.frames, strict=True)):
        videos.tokens.note(f"{name}: less than a frame is to be kept: the first is thinned as by uniform")
    numbers = [[min(keep, sizes[0])] for keep, sizes in zip(videos.keep, videos.frames, strict=True)]
    return spread_in_frames(videos, numbers)[:, :1].float() + _FIRST
