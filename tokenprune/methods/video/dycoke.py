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
_REFERENCE_STEP = (0, 1, 2, 1)  # distance from each frame of a window to its reference frame
_FIRST_FRAME_SCORE = 2.0  # score of kept tokens of first frames, above all other scores


@register("dycoke", site=Site.PRE_LLM, needs=("frames",), paper="arXiv 2411.15024, CVPR 2025")
@dataclass(frozen=True)
class DyCoke(VideoPruner):
    """Keep every fourth frame and the changed tokens of the others (DyCoke).

    Frames are processed in windows of four. The first frame of a window is kept. The second is compared with the first,
    the fourth with the third, and the third with the first, patch by patch; the tokens with the lowest cosine
    similarity are kept. These frames share the rest of the budget equally, and earlier frames get the remainder. A
    video of one frame is one first frame.

    The paper's scheme keeps at least a quarter of the tokens. Below it, only tokens of the first frames are kept,
    evenly spread as in `uniform`, and the statistics contain a note.

    Source:
        Tao et al., "DyCoke: Dynamic Compression of Tokens for Fast Video Large Language Models" (arXiv 2411.15024),
        section on temporal token merging. Paper and code drop tokens in this step.

    Differences from the paper:
        - The budget is given, and the share kept of the compared frames follows from it. The paper sets that share.
        - Frames after the last complete window form a shorter window. The authors' code drops an odd last frame, keeps
          the last window's third frame completely, and needs five frames.
        - Budgets below a quarter are supported.
        - The second stage, which selects cached tokens at each decoding step by the newest attention, is left out.

    Examples:
        >>> model, _ = tokenprune.demo_model("demo_qwen")
        >>> model = tokenprune.patch(model, DyCoke(), keep=0.5)
    """

    def choose(self, videos: Videos) -> torch.Tensor:
        device, frames = videos.mask.device, videos.mask.shape[1]
        num_kept = [_count_per_frame(keep, sizes) for keep, sizes in zip(videos.keep, videos.frames, strict=True)]
        first_counts = [[n if t % _WINDOW == 0 else 0 for t, n in enumerate(frame_counts)] for frame_counts in num_kept]
        if any(keep < sum(sizes[::_WINDOW]) for keep, sizes in zip(videos.keep, videos.frames, strict=True)):
            videos.tokens.note(
                f"{self.name}: the budget is below one frame in four, so the first frame of each window is thinned "
                "uniformly and all other frames are dropped"
            )
        reference = [t - _REFERENCE_STEP[t % _WINDOW] for t in range(frames)]
        change = -cosine_similarity(videos.hidden, videos.hidden.index_select(1, to_device(reference, device)))
        score = torch.where(spread_in_frames(videos, first_counts), _FIRST_FRAME_SCORE, change)
        counts = [[*frame_counts, *[0] * (frames - len(frame_counts))] for frame_counts in num_kept]
        return videos.top_per_frame(score, to_device(counts, device))


def _count_per_frame(keep: int, sizes: list[int]) -> list[int]:
    """Return the number of tokens that each frame of a video keeps. `sizes` are the tokens per frame."""
    is_first = torch.arange(len(sizes), device="cpu") % _WINDOW == 0
    capacity = torch.tensor(sizes, device="cpu")
    num_first = int(capacity[is_first].sum())
    is_eligible = is_first if keep < num_first else ~is_first
    kept_counts = split_budget(
        is_eligible[None].float(),
        torch.tensor([keep if keep < num_first else keep - num_first], device="cpu"),
        (capacity * is_eligible)[None],
    )
    return (kept_counts[0] + (capacity * is_first if keep >= num_first else 0)).tolist()
