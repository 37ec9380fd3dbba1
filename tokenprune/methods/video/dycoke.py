# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenprune.kernels.temporal import cosine_similarity, split_budget
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.pre_llm.uniform import spread_in_frames
from tokenprune.methods.registry import register
from tokenprune.selection.method import Site
from tokenprune.selection.sites.video import VideoPruner
from tokenprune.selection.videos import Videos

_WINDOW = 4
_BEFORE = (0, 1, 2, 1)  # a frame of a window is compared with the one so many frames before it
_FIRST = 2.0  # above all distances of the others


@register("dycoke", site=Site.PRE_LLM, needs=("frames",), paper="arXiv 2411.15024, CVPR 2025")
@dataclass(frozen=True)
class DyCoke(VideoPruner):
    """Keep one frame in four of a video whole, and of the three others what changed (DyCoke's temporal merging).

    The second frame of every four is compared with the first, the fourth with the third, and the third with the first,
    place by place; of a compared frame the tokens of lowest cosine stay. The first frames of the windows stay whole and
    the others share the rest of the budget alike; what does not divide goes to the earlier ones. So a quarter of the
    tokens is the least that the paper can keep; below that the first frames are all that is kept, and they are thinned
    alike, their tokens spread evenly like those of `uniform`, and the statistics note it. A video of one frame is one
    such frame.

    Source: Tao et al., "DyCoke: Dynamic Compression of Tokens for Fast Video Large Language Models", section on
    temporal token merging (which drops, in paper and code).

    Differs from the paper: the number of tokens is asked for, and the share of the compared frames follows from it (the
    paper sets that share); frames after the last whole window are treated as in one (the authors' code drops an odd
    last frame, leaves the last window's third frame whole, and needs five frames); below the least share see above. The
    paper's second stage is left out: it keeps the whole cache and lets each step of decoding read the tokens that the
    newest attention favours.
    """

    def choose(self, videos: Videos) -> torch.Tensor:
        device, frames = videos.mask.device, videos.mask.shape[1]
        numbers = [_numbers(keep, sizes) for keep, sizes in zip(videos.keep, videos.frames, strict=True)]
        firsts = [[n if t % _WINDOW == 0 else 0 for t, n in enumerate(of_video)] for of_video in numbers]
        if any(keep < sum(sizes[::_WINDOW]) for keep, sizes in zip(videos.keep, videos.frames, strict=True)):
            videos.tokens.note(
                f"{self.name}: the first frames of its windows are more than is to be kept: they are thinned as by "
                "uniform, and all others dropped"
            )
        before = [t - _BEFORE[t % _WINDOW] for t in range(frames)]
        change = -cosine_similarity(videos.hidden, videos.hidden.index_select(1, to_device(before, device)))
        score = torch.where(spread_in_frames(videos, firsts), _FIRST, change)
        counts = [[*of_video, *[0] * (frames - len(of_video))] for of_video in numbers]
        return videos.top_per_frame(score, to_device(counts, device))


def _numbers(keep: int, sizes: list[int]) -> list[int]:
    """Return how many tokens each frame of a video keeps. sizes: how many it has."""
    first = torch.arange(len(sizes), device="cpu") % _WINDOW == 0
    most = torch.tensor(sizes, device="cpu")
    whole = int(most[first].sum())
    takes = first if keep < whole else ~first
    shared = split_budget(
        takes[None].float(), torch.tensor([keep if keep < whole else keep - whole], device="cpu"), (most * takes)[None]
    )
    return (shared[0] + (most * first if keep >= whole else 0)).tolist()
