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
    """Keep the patches that the vision tower's class token attends to most.

    The score is the attention of the class token in the last block that the model reads, the mean over heads; in towers
    without a class token, the mean attention that a patch receives. Tiles, and frames of a video, choose by themselves.

    Source: Zhang et al., "[CLS] Attention is All You Need for Training-Free Visual Token Pruning: Make VLM Inference
    Faster", version 1 of the paper that became VisPruner; the authors' answer on towers without a class token.

    Differs from the paper: the mean over heads is taken in float32; tiles share the budget in proportion to their
    patches, and newline tokens go first (the authors' code has neither unpadding nor newlines); tokens keep their
    positions of the full prompt.
    """

    def select(self, tokens: VisualTokens) -> Selection:
        tiles = Tiles.from_tokens(tokens)
        return Selection(tiles.top(compute_patch_attention(tokens), tiles.num_kept), counts=tokens.keep)
