# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenprune.kernels.clusters import find_roots
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.temporal import previous_frame_similarity
from tokenprune.methods.pre_llm.uniform import spread_in_frames
from tokenprune.methods.registry import register
from tokenprune.methods.video.merging import VideoMerger, flat_indices
from tokenprune.selection.method import Site
from tokenprune.selection.videos import Videos


@register("framefusion", site=Site.PRE_LLM, needs=("frames",), paper="arXiv 2501.01986, ICCV 2025", merges=True)
@dataclass(frozen=True)
class FrameFusion(VideoMerger):
    """Merge video tokens into similar tokens of the previous frame (FrameFusion).

    The budget decides the number of merges, and the tokens with the highest cosine similarity merge first. A run of
    merged tokens at one patch becomes the mean of the run and the token before it, at the position of that token.
    Tokens of the first frame do not merge into others. If the budget is smaller than the first frame, and for videos of
    one frame, evenly spread patches are kept as in `uniform` and all other patches are dropped.

    Source:
        Fu et al., "FrameFusion: Combining Similarity and Importance for Video Token Reduction on Large Vision Language
        Models" (arXiv 2501.01986), the merging step.

    Differences from the paper:
        - One merge at the decoder's input with a given budget. The paper merges before each layer until few tokens are
          similar enough.
        - The later pruning by attention is left out.

    Examples:
        >>> model, _ = tokenprune.demo_model("demo_qwen")
        >>> model = tokenprune.patch(model, FrameFusion(), keep=0.5)
    """

    def merge(self, videos: Videos) -> tuple[torch.Tensor, torch.Tensor | None]:
        mask = videos.mask
        sizes = [frames[0] for frames in videos.frames]
        if any(keep < size for keep, size in zip(videos.keep, sizes, strict=True)):
            videos.tokens.note(f"{self.name}: the budget is below one frame, so patches are thinned uniformly")
        similarity = torch.nn.functional.pad(previous_frame_similarity(videos.hidden, mask), (0, 0, 1, 0))
        has_previous = mask & torch.nn.functional.pad(mask[:, :-1], (0, 0, 1, 0))
        num_merges = videos.sizes.sum(1) - videos.budget
        merges = top_mask(similarity.flatten(1), has_previous.flatten(1), num_merges, has_previous[0].numel())
        merges = merges.view_as(has_previous)
        index, num_patches = flat_indices(mask), mask.shape[2]
        root = find_roots(torch.where(merges, index - num_patches, index).flatten(1), mask.shape[1]).view_as(mask)
        # If a budget is below one frame, all tokens of a patch merge. Keep evenly spread patches.
        num_first = [[min(keep, size)] for keep, size in zip(videos.keep, sizes, strict=True)]
        first = spread_in_frames(videos, num_first)
        kept = first.flatten(1).gather(1, root.flatten(1)).view_as(mask) | (root >= num_patches)
        return torch.where(mask & kept, root, -1), None
