# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge

from tokenprune.kernels.clusters import in_parts
from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.pairs import unit
from tokenprune.kernels.take import rank_in_group
from tokenprune.methods.registry import register
from tokenprune.methods.tiles import Tiles, compute_patch_attention, make_sortable
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register("prumerge", site=Site.PRE_LLM, paper="arXiv 2403.15388, ICCV 2025", merges=True)
@dataclass(frozen=True)
class PruMerge(Pruner):
    """Keep the patches that the vision tower attends to most, and let one more token stand for all others (PruMerge).

    Of each tile (or frame), those stay that the class token attends to most in the last block that the model reads; in
    towers without one, those that receive most attention. The best of the others stays too, and becomes the mean of all
    others, weighted by attention.

    merge: "rest" is that; "clusters" has every other patch join, weighted by attention, that kept one among whose
    nearest it is, the most similar one if several are, by the keys of the same block; "none" drops the others.
    neighbours: int >= 1, how many patches of its tile are nearest to a kept one, for "clusters".
    exact: False keeps as many as have more attention than the upper fence of a box plot of all (the third quartile, and
    one and a half times the distance from the first to it), and the token for the rest: the image decides how many
    stay, whatever `keep` says, unless that is all of them.

    Source: Shang et al., "LLaVA-PruMerge: Adaptive Token Reduction for Efficient Large Multimodal Models"; the authors'
    code for the token that stands for the rest, and the nearest 32.

    Differs from the paper: an exact number by default, which counts the token for the rest; attention is that of the
    block that the model reads, head by head, as the paper says (the authors' code takes queries and keys of the tower's
    last block as one wide head, which a model like LLaVA-1.5 does not run to its end; on the shipped models one wide
    head is no better, and which of two blocks is better depends on the model, see the page); "rest" leaves out what the
    code adds to kept tokens, a sum over the 32 nearest weighted by attention, a few hundredths of their length, and its
    token for the rest is a mean where the code has a sum; "clusters" are means, and no patch is in two of them, as the
    paper says; merged after the projector; tokens stay in order, and keep their positions of the full prompt; each
    image has its own number, its tiles share it in proportion to their patches, and newline tokens go first.
    """

    merge: Literal["rest", "clusters", "none"] = "rest"
    neighbours: Annotated[int, Ge(1)] = 32
    exact: bool = True

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"encoder_attention"} | ({"encoder_keys"} if self.merge == "clusters" else set()))

    @property
    def by_content_count(self) -> bool:
        return not self.exact

    def compute_attention(self, tokens: VisualTokens) -> torch.Tensor:
        """Return float `[S, N]`, the attention by which patches are ranked and weighted."""
        return compute_patch_attention(tokens)

    def select(self, tokens: VisualTokens) -> Selection:
        tiles, attention = Tiles.from_tokens(tokens), make_sortable(self.compute_attention(tokens))
        if self.exact or tokens.keep == tokens.counts:
            number, counts = tiles.num_kept, tokens.keep
            extra = tiles.zero_non_patches((number > 0) & (number < tiles.sizes)).long() * (self.merge == "rest")
            picked = self._picked(tiles, attention, number - extra)
        else:
            picked, counts = (
                self._adaptive(tiles, attention, tiles.zero_non_patches(_count_outliers(tiles, attention))),
                None,
            )
            found = tiles.count_selected(picked)
            # Without any a tile has at least its best one.
            extra = tiles.zero_non_patches((found < tiles.sizes) & ((self.merge == "rest") | (found == 0))).long()
        rest = tiles.top(attention, extra, tiles.is_patch & ~picked)
        keep = picked | rest
        weight = attention.clamp(min=0)
        itself = torch.arange(keep.shape[1], device=keep.device)
        if self.merge == "none":
            return Selection(keep, counts=counts)
        if self.merge == "clusters":
            into = self._clusters(tokens, tiles, keep)
        else:
            at = torch.zeros_like(tiles.num_kept).scatter_add(1, tiles.index, itself * rest)
            into = torch.where(tiles.is_patch & (tiles.expand(extra) > 0), tiles.expand(at), -1)
        return Selection(keep, torch.where(keep, itself, into), weight, counts)

    def _picked(self, tiles: Tiles, attention: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """bool `[S, N]`: which stay for themselves, `number`, long `[S, T + 2]`, of each tile."""
        return tiles.top(attention, number)

    def _adaptive(self, tiles: Tiles, attention: torch.Tensor, outliers: torch.Tensor) -> torch.Tensor:
        """bool `[S, N]`: which stay for themselves where `outliers` of each tile have much attention."""
        return tiles.top(attention, outliers)

    def _clusters(self, tokens: VisualTokens, tiles: Tiles, keep: torch.Tensor) -> torch.Tensor:
        """long `[S, N]`: the kept token that each joins, -1 where it is among the nearest of none."""
        keys = unit(tokens.encoder_keys(-1))
        place = partition(keep)[:, : max(tokens.keep) if self.exact else None]
        best = torch.full(keep.shape, -torch.inf, dtype=torch.float32, device=keep.device)
        into = torch.full_like(place[:, :1], -1).repeat(1, keep.shape[1])
        for part in in_parts(place.shape[1], keep.numel()):
            at = place[:, part]
            alike = gather_tokens(keys, at, 1) @ keys.transpose(1, 2)
            others = (tiles.index.gather(1, at).unsqueeze(2) == tiles.index.unsqueeze(1)) & tiles.is_patch.unsqueeze(1)
            others &= at.unsqueeze(2) != torch.arange(keep.shape[1], device=keep.device)
            alike = alike.masked_fill(~(others & keep.gather(1, at).unsqueeze(2)), -torch.inf)
            near = alike.topk(min(self.neighbours, keep.shape[1]), dim=2)
            alike = torch.full_like(alike, -torch.inf).scatter(2, near.indices, near.values)
            likest, which = alike.max(dim=1)
            into = torch.where(likest > best, at.gather(1, which), into)
            best = torch.maximum(best, likest)
        return into


def _count_outliers(tiles: Tiles, attention: torch.Tensor) -> torch.Tensor:
    """long `[S, T + 2]`: how many tokens of each tile have more attention than the upper fence of a box plot."""
    rank = rank_in_group(tiles.index, -attention)
    last = (tiles.sizes - 1).clamp(min=0).double()

    def quantile(share: float) -> torch.Tensor:
        at = last * share
        values = [
            torch.zeros_like(last).scatter_add(
                1, tiles.index, torch.where(rank == tiles.expand(place.long()), attention.double(), 0.0)
            )
            for place in (at.floor(), at.ceil())
        ]  # fmt: skip
        return values[0] + (values[1] - values[0]) * (at - at.floor())

    first, third = quantile(0.25), quantile(0.75)
    fence = third + 1.5 * (third - first)
    return tiles.count_selected(attention.double() > fence.gather(1, tiles.index))
