# SPDX-License-Identifier: Apache-2.0
"""Base of the methods that drop tokens of videos by comparing frames."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenprune.selection.method import Pruner, Selection
from tokenprune.selection.tokens import VisualTokens
from tokenprune.selection.videos import Videos


@dataclass(frozen=True)
class VideoPruner(Pruner):
    """Base of the methods that drop tokens of videos by comparing frames; a subclass implements `choose`.

    Register it with `needs=("frames",)`. It sees those videos alone of which something has to go; images beside them,
    and tokens after the last frame (the newline of LLaVA-OneVision), stay.
    """

    def choose(self, videos: Videos) -> torch.Tensor:
        """Return which tokens stay, bool `[V, F, P]`: of each video exactly `videos.budget`, and none of padding."""
        raise NotImplementedError(f"{type(self).__name__} implements neither choose() nor select()")

    def select(self, tokens: VisualTokens) -> Selection:
        """Return which visual tokens stay."""
        videos = Videos.from_tokens(tokens)
        keep = tokens.mask if videos is None else videos.to_token_mask(self.choose(videos))
        return Selection(keep, counts=tokens.keep)
