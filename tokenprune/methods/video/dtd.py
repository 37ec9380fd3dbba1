# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Le

from tokenprune.kernels.take import top_mask
from tokenprune.kernels.temporal import cosine_similarity, previous_frame_similarity
from tokenprune.methods.registry import register
from tokenprune.methods.video.evs import score_first_frames
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens
from tokenprune.selection.videos import Videos

_NO_REFERENCE = -2.0  # similarity of a token without a reference, below all cosines


@register("dtd", site=Site.PRE_LLM, needs=("frames",), paper="arXiv 2504.17343, ACM MM 2025")
@dataclass(frozen=True)
class DTD(Pruner):
    """Drop video tokens that repeat the same patch of an earlier frame (DTD of TimeChat-Online).

    A token is kept if its cosine similarity to the same patch of the previous frame is at most `threshold`. The first
    frame is kept completely, so a static scene costs no tokens after it. Later frames do not affect the selection, so a
    stream can be pruned as it arrives.

    The video decides the number of kept tokens. `keep` is an upper bound per video; without it there is no bound. If
    more tokens pass the threshold, the most similar tokens of the whole video are dropped first, as in `evs`.

    Args:
        threshold: Cosine in [-1, 1] above which a token is dropped. The authors use 0.5 and 0.25.
        against: "before" compares with the previous frame. "kept" compares with the last kept token of the same patch,
            so that slow changes accumulate (an addition).

    Source:
        "TimeChat-Online: 80% Visual Tokens are Naturally Redundant in Streaming Videos" (arXiv 2504.17343), the feature
        form with an absolute threshold in the authors' code. The paper's text was not available.

    Differences from the paper:
        - Each video of a prompt starts with a complete frame. The code compares it with the last frame of the previous
          video.
        - The upper bound `keep` is an addition.
        - Cosines are computed in float32.
        - The forms on pixels and with a fixed share per frame are left out.

    Examples:
        >>> model, _ = tokenprune.demo_model("demo_qwen")
        >>> model = tokenprune.patch(model, DTD(threshold=0.25))
    """

    syncs_device: ClassVar[bool] = True
    chooses_count: ClassVar[bool] = True
    default_keep: ClassVar[int] = 1_000_000  # tokens per video: no bound

    threshold: Annotated[float, Ge(-1), Le(1)] = 0.5
    against: Literal["before", "kept"] = "before"

    def select(self, tokens: VisualTokens) -> Selection:
        videos = Videos.from_tokens(tokens, several_frames=True)
        if videos is None:
            return Selection(tokens.mask, counts=tokens.keep)
        similarity = self._compute_similarity(videos.hidden, videos.mask)
        score = torch.cat([score_first_frames(videos, self.name), 1 - similarity], dim=1)
        passes = torch.cat([videos.mask[:, :1], videos.mask[:, 1:] & (similarity <= self.threshold)], dim=1)
        best = top_mask(score.flatten(1), passes.flatten(1), videos.budget, max(videos.keep))
        return Selection(videos.to_token_mask(best.view_as(passes)))

    def _compute_similarity(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the cosine of each token to its reference, shape (videos, frames - 1, patches), float32.

        Args:
            x: Tokens, shape (videos, frames, patches, channels).
            mask: False for padding, shape (videos, frames, patches). Tokens without a reference get `_NO_REFERENCE`.
        """
        if self.against == "before":
            return previous_frame_similarity(x, mask).masked_fill(~(mask[:, 1:] & mask[:, :-1]), _NO_REFERENCE)
        similarity = torch.full(mask[:, 1:].shape, _NO_REFERENCE, dtype=torch.float32, device=x.device)
        reference, has_reference = x[:, 0], mask[:, 0]
        for frame in range(1, x.shape[1]):
            valid = mask[:, frame]
            frame_similarity = cosine_similarity(x[:, frame], reference)
            frame_similarity = frame_similarity.masked_fill(~(has_reference & valid), _NO_REFERENCE)
            is_kept = valid & (frame_similarity <= self.threshold)
            reference = torch.where(is_kept.unsqueeze(-1), x[:, frame], reference)
            similarity[:, frame - 1], has_reference = frame_similarity, has_reference | valid
        return similarity
