# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenprune.kernels.temporal import previous_frame_similarity
from tokenprune.methods.pre_llm.uniform import spread_in_frames
from tokenprune.methods.registry import register
from tokenprune.selection.method import Site
from tokenprune.selection.sites.video import VideoPruner
from tokenprune.selection.videos import Videos

_FIRST_FRAME_SCORE = 4.0  # offset of first frames, above all distances (at most 2)


@register("evs", site=Site.PRE_LLM, needs=("frames",), paper="arXiv 2510.14624")
@dataclass(frozen=True)
class EVS(VideoPruner):
    """Keep the first frame of a video and the tokens that change most (EVS).

    The score of a token is 1 minus its cosine similarity to the same patch of the previous frame. The highest scores of
    the whole video are kept, so a static frame may lose all its tokens. The first frame has priority. If the budget is
    smaller than the first frame, and for videos of one frame, its tokens are spread evenly as in `uniform`.

    Source:
        NVIDIA, "Efficient Video Sampling: Pruning Temporally Redundant Tokens for Faster VLM Inference" (arXiv
        2510.14624), the form on embeddings, as in vLLM.

    Differences from the paper:
        - The number of tokens is exact and may be smaller than the first frame. The paper uses a percentile threshold.
        - The form on pixels is left out.
        - Tokens keep their positions in the full prompt.

    Examples:
        >>> model, _ = tokenprune.demo_model("demo_qwen")
        >>> model = tokenprune.patch(model, EVS(), keep=0.25)
    """

    def choose(self, videos: Videos) -> torch.Tensor:
        change = 1 - previous_frame_similarity(videos.hidden, videos.mask)
        return videos.top(torch.cat([score_first_frames(videos, self.name), change], dim=1))


def score_first_frames(videos: Videos, name: str) -> torch.Tensor:
    """Return scores for the tokens of the first frames, shape (videos, 1, patches), float32, above all other scores.

    If the budget is smaller than the first frame, evenly spread tokens get the highest scores, and the statistics get a
    note.

    Args:
        videos: Tokens by frame.
        name: Name of the method, for the note.
    """
    if any(keep < sizes[0] for keep, sizes in zip(videos.keep, videos.frames, strict=True)):
        videos.tokens.note(f"{name}: the budget is below one frame, so the first frame is thinned uniformly")
    num_kept = [[min(keep, sizes[0])] for keep, sizes in zip(videos.keep, videos.frames, strict=True)]
    return spread_in_frames(videos, num_kept)[:, :1].float() + _FIRST_FRAME_SCORE
