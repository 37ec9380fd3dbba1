# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge

from tokenprune.kernels.clusters import split_rows
from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.pairs import normalize
from tokenprune.kernels.take import rank_in_group
from tokenprune.methods.registry import register
from tokenprune.methods.tiles import Tiles, compute_patch_attention, make_sortable
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register("prumerge", site=Site.PRE_LLM, paper="arXiv 2403.15388, ICCV 2025", merges=True)
@dataclass(frozen=True)
class PruMerge(Pruner):
    """Keep the patches with the most tower attention, and merge all others into one more token.

    In each tile or frame, the patches with the most attention from the class token in the last block that the model
    reads are kept. In towers without a class token, the attention is the mean that a patch receives. The best remaining
    patch is also kept and becomes the attention-weighted mean of all remaining patches.

    Args:
        merge: "rest" merges the remaining patches into one token. "clusters" merges each remaining patch into the most
            similar kept patch that has it among its nearest `neighbours`, weighted by attention. "none" drops the
            remaining patches.
        neighbours: Number of nearest patches of the same tile that a kept patch may absorb, by the keys of the block.
            Used by "clusters".
        exact: Keep exactly the budget. False keeps the patches above the upper fence of a box plot (third quartile plus
            1.5 times the interquartile range), and the token for the rest. The image then determines the number of
            tokens, and `keep` has no effect unless it keeps all tokens.

    Source:
        Shang et al., "LLaVA-PruMerge: Adaptive Token Reduction for Efficient Large Multimodal Models" (arXiv
        2403.15388), and the authors' code for the merged token and the 32 nearest patches.

    Differences from the paper:
        - The number of kept tokens is exact by default and includes the merged token.
        - Attention is taken per head from the block that the model reads, as in the paper. The authors' code treats
          queries and keys of the tower's last block as one wide head. The documentation page compares both.
        - "rest" omits the weighted sum over the 32 nearest patches that the authors' code adds to kept tokens, which
          changes their norm by a few percent. The merged token is a mean; in the authors' code it is a sum.
        - "clusters" computes means, and each patch joins at most one cluster, as in the paper.
        - Tokens are merged after the projector.
        - Kept tokens stay in order and keep their positions in the prompt.
        - Each image has its own number of tokens, which tiles share in proportion to their patches. Newline tokens are
          dropped first.

    Examples:
        >>> model = tokenprune.patch(model, PruMerge(merge="clusters"), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    merge: Literal["rest", "clusters", "none"] = "rest"
    neighbours: Annotated[int, Ge(1)] = 32
    exact: bool = True

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"encoder_attention"} | ({"encoder_keys"} if self.merge == "clusters" else set()))

    @property
    def chooses_count(self) -> bool:
        return not self.exact

    def compute_attention(self, tokens: VisualTokens) -> torch.Tensor:
        """Return the attention that ranks and weights patches, float (S, N)."""
        return compute_patch_attention(tokens)

    def select(self, tokens: VisualTokens) -> Selection:
        tiles, attention = Tiles.from_tokens(tokens), make_sortable(self.compute_attention(tokens))
        if self.exact or tokens.keep == tokens.counts:
            num_kept, counts = tiles.num_kept, tokens.keep
            num_rest = tiles.zero_non_patches((num_kept > 0) & (num_kept < tiles.sizes)).long() * (self.merge == "rest")
            picked = self._pick(tiles, attention, num_kept - num_rest)
        else:
            num_outliers = tiles.zero_non_patches(_count_outliers(tiles, attention))
            picked, counts = self._pick_adaptive(tiles, attention, num_outliers), None
            num_picked = tiles.count_selected(picked)
            # A tile without outliers keeps its best patch.
            has_rest = (num_picked < tiles.sizes) & ((self.merge == "rest") | (num_picked == 0))
            num_rest = tiles.zero_non_patches(has_rest).long()
        rest = tiles.top(attention, num_rest, tiles.is_patch & ~picked)
        keep = picked | rest
        weight = attention.clamp(min=0)
        itself = torch.arange(keep.shape[1], device=keep.device)
        if self.merge == "none":
            return Selection(keep, counts=counts)
        if self.merge == "clusters":
            target = self._find_clusters(tokens, tiles, keep)
        else:
            rest_index = torch.zeros_like(tiles.num_kept).scatter_add(1, tiles.index, itself * rest)
            target = torch.where(tiles.is_patch & (tiles.expand(num_rest) > 0), tiles.expand(rest_index), -1)
        return Selection(keep, torch.where(keep, itself, target), weight, counts)

    def _pick(self, tiles: Tiles, attention: torch.Tensor, num_kept: torch.Tensor) -> torch.Tensor:
        """Select the patches of each tile that remain unmerged, for an exact budget, bool (S, N).

        Args:
            tiles: Tiles of the images.
            attention: Score of each token, (S, N).
            num_kept: Number of unmerged patches per tile, long (S, T + 2).
        """
        return tiles.top(attention, num_kept)

    def _pick_adaptive(self, tiles: Tiles, attention: torch.Tensor, num_outliers: torch.Tensor) -> torch.Tensor:
        """Select the patches of each tile that remain unmerged, if the method chooses their number, bool (S, N).

        Args:
            tiles: Tiles of the images.
            attention: Score of each token, (S, N).
            num_outliers: Number of patches per tile with unusually high attention, long (S, T + 2).
        """
        return tiles.top(attention, num_outliers)

    def _find_clusters(self, tokens: VisualTokens, tiles: Tiles, keep: torch.Tensor) -> torch.Tensor:
        """Return the kept token that absorbs each token, long (S, N), or -1 if it is near no kept token."""
        keys = normalize(tokens.encoder_keys(-1))
        kept_indices = partition(keep)[:, : max(tokens.keep) if self.exact else None]
        best_similarity = torch.full(keep.shape, -torch.inf, dtype=torch.float32, device=keep.device)
        target = torch.full_like(kept_indices[:, :1], -1).repeat(1, keep.shape[1])
        for part in split_rows(kept_indices.shape[1], keep.numel()):
            indices = kept_indices[:, part]
            similarity = gather_tokens(keys, indices, 1) @ keys.transpose(1, 2)
            is_candidate = (
                tiles.index.gather(1, indices).unsqueeze(2) == tiles.index.unsqueeze(1)
            ) & tiles.is_patch.unsqueeze(1)
            is_candidate &= indices.unsqueeze(2) != torch.arange(keep.shape[1], device=keep.device)
            similarity = similarity.masked_fill(~(is_candidate & keep.gather(1, indices).unsqueeze(2)), -torch.inf)
            neighbors = similarity.topk(min(self.neighbours, keep.shape[1]), dim=2)
            similarity = torch.full_like(similarity, -torch.inf).scatter(2, neighbors.indices, neighbors.values)
            similarity_max, nearest = similarity.max(dim=1)
            target = torch.where(similarity_max > best_similarity, indices.gather(1, nearest), target)
            best_similarity = torch.maximum(best_similarity, similarity_max)
        return target


def _count_outliers(tiles: Tiles, attention: torch.Tensor) -> torch.Tensor:
    """Count the tokens of each tile with unusually high attention, long (S, T + 2) as in `Tiles`.

    Outliers exceed the third quartile of their tile by more than 1.5 interquartile ranges.
    """
    rank = rank_in_group(tiles.index, -attention)
    last = (tiles.sizes - 1).clamp(min=0).double()

    def quantile(share: float) -> torch.Tensor:
        index = last * share
        values = [
            torch.zeros_like(last).scatter_add(
                1, tiles.index, torch.where(rank == tiles.expand(rank_of_value.long()), attention.double(), 0.0)
            )
            for rank_of_value in (index.floor(), index.ceil())
        ]  # fmt: skip
        return values[0] + (values[1] - values[0]) * (index - index.floor())

    first, third = quantile(0.25), quantile(0.75)
    fence = third + 1.5 * (third - first)
    return tiles.count_selected(attention.double() > fence.gather(1, tiles.index))
