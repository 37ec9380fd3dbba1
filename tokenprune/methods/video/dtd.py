# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Le

from tokenprune.kernels.take import top_mask
from tokenprune.kernels.temporal import cosine, same_place
from tokenprune.methods.registry import register
from tokenprune.methods.video.evs import score_first_frames
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens
from tokenprune.selection.videos import Videos

_ALONE = -2.0  # below all cosines


@register("dtd", site=Site.PRE_LLM, needs=("frames",), paper="arXiv 2504.17343, ACM MM 2025")
@dataclass(frozen=True)
class DTD(Pruner):
    """Drop the tokens of a video that are alike to the one at their place a frame before; the video decides how many
    that are (DTD of TimeChat-Online).

    A token stays if its cosine to that one is at most a threshold, and the first frame stays whole. Later frames change
    nothing, so that a stream can be cut as it arrives: of a scene that does not move a frame costs nothing.

    `keep` is an upper bound for each video; without it there is none. Where more would stay, the most similar ones of
    the whole video go first, which is what `evs` keeps of as many tokens. `keep=1.0` drops nothing, as with every
    method.

    threshold: cosine in [-1, 1] above which a token is dropped; 0.5 and 0.25 are the authors'.
    against: "before" compares with the frame before, whether that token stayed or not; "kept" with the last one that
    stayed at the place, so that a slow change adds up to one that counts (ours).

    Source: "TimeChat-Online: 80% Visual Tokens are Naturally Redundant in Streaming Videos", the authors' code, its
    absolute form on features.

    Differs from the paper: each video of a prompt begins anew (the code compares its first frame with the last of the
    one before it); an upper bound; cosines are those of float32. The forms on pixels, and with a fixed share of each
    frame, are left out. The paper's text was not read.
    """

    asks_device: ClassVar[bool] = True
    by_content_count: ClassVar[bool] = True
    default_keep: ClassVar[int] = 1_000_000  # tokens a video: no bound

    threshold: Annotated[float, Ge(-1), Le(1)] = 0.5
    against: Literal["before", "kept"] = "before"

    def select(self, tokens: VisualTokens) -> Selection:
        videos = Videos.of(tokens, several_frames=True)
        if videos is None:
            return Selection(tokens.mask, counts=tokens.keep)
        alike = self._alike(videos.x, videos.mask)
        score = torch.cat([score_first_frames(videos, self.name), 1 - alike], dim=1)
        stays = torch.cat([videos.mask[:, :1], videos.mask[:, 1:] & (alike <= self.threshold)], dim=1)
        best = top_mask(score.flatten(1), stays.flatten(1), videos.budget, max(videos.keep))
        return Selection(videos.kept(best.view_as(stays)))

    def _alike(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """float32 `[V, F - 1, P]`: cosine of each token `[V, F, P, D]` to the one that it is compared with,
        `_ALONE` where there is none. mask: bool `[V, F, P]`."""
        if self.against == "before":
            return same_place(x, mask).masked_fill(~(mask[:, 1:] & mask[:, :-1]), _ALONE)
        alike = torch.full(mask[:, 1:].shape, _ALONE, dtype=torch.float32, device=x.device)
        last, seen = x[:, 0], mask[:, 0]
        for frame in range(1, x.shape[1]):
            real = mask[:, frame]
            found = cosine(x[:, frame], last).masked_fill(~(seen & real), _ALONE)
            last = torch.where((real & (found <= self.threshold)).unsqueeze(-1), x[:, frame], last)
            alike[:, frame - 1], seen = found, seen | real
        return alike
