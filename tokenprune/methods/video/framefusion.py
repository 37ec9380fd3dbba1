# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenprune.kernels.clusters import roots
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.temporal import same_place
from tokenprune.methods.pre_llm.uniform import spread_in_frames
from tokenprune.methods.registry import register
from tokenprune.methods.video.merging import VideoMerger, flat_indices
from tokenprune.selection.method import Site
from tokenprune.selection.videos import Videos


@register("framefusion", site=Site.PRE_LLM, needs=("frames",), paper="arXiv 2501.01986, ICCV 2025", merges=True)
@dataclass(frozen=True)
class FrameFusion(VideoMerger):
    """Merge the tokens of a video that are most similar to the one at their place in the frame before.

    As many tokens merge as the budget asks for, those of the highest cosine; a run of them at one place becomes the
    mean with the token before the run, and stands where that one stood. The first frame never merges into anything;
    where less than it is to be kept, and so of a video of one frame, its places are spread evenly like those of
    `uniform`, and the other places go.

    Source: Fu et al., "FrameFusion: Combining Similarity and Importance for Video Token Reduction on Large Vision
    Language Models", the merging step.

    Differs from the paper: one merge at the decoder's entry, with a budget, in place of one before each layer until few
    tokens are similar enough; no pruning by attention after it.
    """

    def merge(self, videos: Videos) -> tuple[torch.Tensor, torch.Tensor | None]:
        mask = videos.mask
        sizes = [frames[0] for frames in videos.frames]
        if any(keep < size for keep, size in zip(videos.keep, sizes, strict=True)):
            videos.tokens.note(f"{self.name}: less than a frame is to be kept: places are thinned like by uniform")
        similarity = torch.nn.functional.pad(same_place(videos.x, mask), (0, 0, 1, 0))
        later = mask & torch.nn.functional.pad(mask[:, :-1], (0, 0, 1, 0))
        number = videos.sizes.sum(1) - videos.budget
        merges = top_mask(similarity.flatten(1), later.flatten(1), number, later[0].numel()).view_as(later)
        spot, places = flat_indices(mask), mask.shape[2]
        root = roots(torch.where(merges, spot - places, spot).flatten(1), mask.shape[1]).view_as(mask)
        # Of a whole video of one place's tokens those of the places that stay.
        numbers = [[min(keep, size)] for keep, size in zip(videos.keep, sizes, strict=True)]
        first = spread_in_frames(videos, numbers)
        stays = first.flatten(1).gather(1, root.flatten(1)).view_as(mask) | (root >= places)
        return torch.where(mask & stays, root, -1), None
