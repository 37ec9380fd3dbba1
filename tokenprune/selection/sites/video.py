# SPDX-License-Identifier: Apache-2.0
"""Base class of methods that drop video tokens by comparing frames."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenprune.selection.method import Pruner, Selection
from tokenprune.selection.tokens import VisualTokens
from tokenprune.selection.videos import Videos


@dataclass(frozen=True)
class VideoPruner(Pruner):
    """Base class of methods that drop video tokens by comparing frames. A subclass implements `choose`.

    Register it with `needs=("frames",)`. It receives only the videos that lose tokens. Images are kept, and so are
    tokens after the last frame (the newline of LLaVA-OneVision).

    Examples:
        >>> class Changes(VideoPruner):
        ...     def choose(self, videos):
        ...         change = videos.hidden.diff(dim=1, prepend=0 * videos.hidden[:, :1])
        ...         return videos.top(change.norm(dim=-1))
        >>> from tokenprune.testing import visual_tokens
        >>> hidden = torch.tensor([[[1.0], [1.0], [1.0], [5.0]]])
        >>> tokens = visual_tokens(hidden, keep=[1], grids=[(2, 1, 2)], modality="video", frames=[[2, 2]])
        >>> Changes().select(tokens).keep
        tensor([[False, False, False,  True]])
    """

    def choose(self, videos: Videos) -> torch.Tensor:
        """Return the mask of kept tokens, shape (V, F, P), bool: `videos.budget` tokens of each video, no padding."""
        raise NotImplementedError(f"{type(self).__name__} implements neither choose() nor select()")

    def select(self, tokens: VisualTokens) -> Selection:
        videos = Videos.from_tokens(tokens)
        keep = tokens.mask if videos is None else videos.to_token_mask(self.choose(videos))
        return Selection(keep, counts=tokens.keep)
