# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge

from tokenprune.kernels.pairs import normalize
from tokenprune.kernels.temporal import frame_means, gaussian_similarity, select_stable_channels, split_budget
from tokenprune.methods.registry import register
from tokenprune.selection.method import Site
from tokenprune.selection.sites.video import VideoPruner
from tokenprune.selection.videos import Videos


@register("stc", site=Site.PRE_LLM, needs=("frames",), paper="arXiv 2512.00891, CVPR 2026")
@dataclass(frozen=True)
class STC(VideoPruner):
    """Keep the tokens that differ most from their frame and the past (STC-Pruner).

    This is the streaming variant of `vidcom2`: every frame keeps the same number of tokens, selected by the frames up
    to the end of its chunk. Distances use the half of the channels with the lowest variance over the first chunk. The
    memory is the normalised mean of the means of all chunks so far, including the current one. The first frames get the
    remainder of an uneven division. Videos of one frame use the same rule.

    Args:
        chunk: Number of frames that arrive together.

    Source:
        Wang et al., "Accelerating Streaming Video Large Language Models via Hierarchical Token Compression" (arXiv
        2512.00891), STC-Pruner, and the authors' code for channels, bandwidths and chunks.

    Differences from the paper:
        - The channels of the first chunk are used throughout. The code selects channels per chunk and mixes them in the
          memory.
        - The number of tokens is exact for the whole video.

    Examples:
        >>> model, _ = tokenprune.demo_model("demo_qwen")
        >>> model = tokenprune.patch(model, STC(chunk=2), keep=0.25)
    """

    chunk: Annotated[int, Ge(1)] = 1

    def choose(self, videos: Videos) -> torch.Tensor:
        mask, frames = videos.mask, videos.mask.shape[1]
        first = mask & (torch.arange(frames, device=mask.device) < self.chunk)[:, None]
        raw = select_stable_channels(videos.hidden, mask, first)
        memory, x = self._compute_memory(frame_means(raw, mask), videos.sizes), normalize(raw)
        score = gaussian_similarity(x, frame_means(x, mask).unsqueeze(2)) + gaussian_similarity(x, memory.unsqueeze(2))
        equal = torch.ones(videos.sizes.shape, dtype=torch.float32, device=mask.device)
        return videos.top_per_frame(-score, split_budget(equal, videos.budget, videos.sizes))

    def _compute_memory(self, means: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """Return the unit mean of all chunks up to each frame, shape (videos, frames, channels), float32.

        Args:
            means: Mean of each frame's tokens, shape (videos, frames, channels).
            sizes: Tokens per frame, shape (videos, frames).
        """
        frames = means.shape[1]
        chunks = -(-frames // self.chunk)
        fill = (0, 0, 0, chunks * self.chunk - frames)
        weighted = torch.nn.functional.pad(means * sizes.unsqueeze(-1), fill).unflatten(1, (chunks, self.chunk)).sum(2)
        tokens = torch.nn.functional.pad(sizes, fill[2:]).unflatten(1, (chunks, self.chunk)).sum(2)
        chunk_means = weighted / tokens.clamp(min=1).unsqueeze(-1)
        running_mean = chunk_means.cumsum(1) / torch.arange(1, chunks + 1, device=means.device)[:, None]
        return normalize(running_mean).repeat_interleave(self.chunk, dim=1)[:, :frames]
