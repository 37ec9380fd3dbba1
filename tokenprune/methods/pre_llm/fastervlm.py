# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass

from tokenprune.methods.registry import register
from tokenprune.methods.tiles import Tiles, compute_patch_attention
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register("fastervlm", site=Site.PRE_LLM, needs=("encoder_attention",), paper="arXiv 2412.01818v1")
@dataclass(frozen=True)
class FasterVLM(Pruner):
    """Keep the patches with the most class-token attention.

    The score is the class token's attention to a patch in the last block that the model reads, averaged over heads. In
    towers without a class token, it is the mean attention that the patch receives. Each tile, or frame of a video, is
    pruned by itself.

    Source:
        Zhang et al., "[CLS] Attention is All You Need for Training-Free Visual Token Pruning: Make VLM Inference
        Faster" (arXiv 2412.01818v1; version 2 is VisPruner). Towers without a class token follow the authors' answer to
        a question.

    Differences from the paper:
        - The mean over heads is computed in float32.
        - Tiles share the budget in proportion to their patches, and newline tokens are dropped first. The authors' code
          supports neither unpadding nor newlines.
        - Kept tokens keep their positions in the prompt.

    Examples:
        >>> model = tokenprune.patch(model, FasterVLM(), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    def select(self, tokens: VisualTokens) -> Selection:
        tiles = Tiles.from_tokens(tokens)
        return Selection(tiles.top(compute_patch_attention(tokens), tiles.num_kept), counts=tokens.keep)
