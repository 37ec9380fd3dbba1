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
    """Keep of each frame of a video what is least like the frame and like all that came before (STC-Pruner).

    The streaming relative of `vidcom2`: every frame keeps equally many, chosen by what was seen up to its chunk alone.
    All is compared on the half of the channels that varies least over the first chunk. What does not divide goes to
    the first frames. A video of one frame is chosen from in the same way.

    chunk: frames that arrive at a time. The memory is the mean of the means of all chunks so far, this one among them:
    of tokens as they are, so that long ones count more, and of length 1 once it is made.

    Source: Wang et al., "Accelerating Streaming Video Large Language Models via Hierarchical Token Compression",
    STC-Pruner; the authors' code for what it leaves open (channels, bandwidths, chunks).

    Differs from the paper: the channels are those of the first chunk throughout (the code picks others in every chunk,
    and mixes them in the memory); the number of tokens is exact for the whole video.
    """

    chunk: Annotated[int, Ge(1)] = 1

    def choose(self, videos: Videos) -> torch.Tensor:
        mask, frames = videos.mask, videos.mask.shape[1]
        first = mask & (torch.arange(frames, device=mask.device) < self.chunk)[:, None]
        raw = select_stable_channels(videos.hidden, mask, first)
        memory, x = self._memory(frame_means(raw, mask), videos.sizes), normalize(raw)
        score = gaussian_similarity(x, frame_means(x, mask).unsqueeze(2)) + gaussian_similarity(x, memory.unsqueeze(2))
        equal = torch.ones(videos.sizes.shape, dtype=torch.float32, device=mask.device)
        return videos.top_per_frame(-score, split_budget(equal, videos.budget, videos.sizes))

    def _memory(self, means: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """Return float32 `[V, F, D]`, the direction of the mean of the chunks up to that of each frame. means: of the
        frames' tokens."""
        frames = means.shape[1]
        chunks = -(-frames // self.chunk)
        fill = (0, 0, 0, chunks * self.chunk - frames)
        weighted = torch.nn.functional.pad(means * sizes.unsqueeze(-1), fill).unflatten(1, (chunks, self.chunk)).sum(2)
        tokens = torch.nn.functional.pad(sizes, fill[2:]).unflatten(1, (chunks, self.chunk)).sum(2)
        of_chunks = weighted / tokens.clamp(min=1).unsqueeze(-1)
        so_far = of_chunks.cumsum(1) / torch.arange(1, chunks + 1, device=means.device)[:, None]
        return normalize(so_far).repeat_interleave(self.chunk, dim=1)[:, :frames]
