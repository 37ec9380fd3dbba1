# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Le

from tokenprune.budgets import Budget
from tokenprune.budgets.schedule import choose_layers, plan_cuts
from tokenprune.kernels.clusters import split_rows
from tokenprune.kernels.compact import partition
from tokenprune.kernels.masses import uniform_weights
from tokenprune.kernels.pairs import Products, normalize
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.multi_cut import TEXT_ATTENTION, sum_text_attention
from tokenprune.methods.registry import register
from tokenprune.selection.method import Method, Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_AFTER = (3 / 32, 7 / 32, 16 / 32)
_SIZES = (128.0, 86.0, 57.0, 35.0)  # before the decoder and after each of its three cuts
_TOKENS_PER_ROUND = 16  # of the search for dissimilar tokens
_ROWS_AT_ONCE = 128  # rows of products, if the table is too large


@register(
    "sinkpruner", site=Site.PRE_LLM, needs=("encoder_attention", "encoder_features"), paper="arXiv 2609.01004",
    merges=True, reconstruction=True,
)  # fmt: skip
@dataclass(frozen=True)
class SinkPruner(Pruner):
    """Merge sinks and keep salient and dissimilar tokens, then cut by the question.

    Sinks are tokens of very large norm; they are merged into one token. Half of the remaining budget goes to the tokens
    with the most tower attention, the other half to the tokens least similar to the kept ones. Three cuts inside the
    decoder then keep the tokens with the most attention from the text. `keep` is an average over all decoder layers.

    Args:
        sinks: Share of an image's tokens, those of largest norm, that are merged into one token. 0 merges none.
        stage2: False omits the cuts inside the decoder. The choice then does not depend on the question, works with a
            prefix cache, and `keep` applies to the decoder's input.

    Source:
        "SinkPruner: Sink-Free Visual Token Pruning for Multimodal Large Language Models" (arXiv 2609.01004). A
        reconstruction from two summaries of the paper that agree; neither the text nor code was available.

    Differences from the paper:
        - The number of tokens of each stage is not known. This implementation uses 128 : 86 : 57 : 35, and halves the
          first budget between attention and dissimilarity.
        - Norms are those of the tower's output before the projector. Sinks are found in the whole image, not per tile.
        - The mean of the sinks is computed after the projector, at the index of the largest sink.
        - "Layers 2, 6 and 15" are read as cuts at the input of layers 3, 7 and 16 of 32, as in SparseVLM.
        - Kept tokens keep their positions in the prompt.

    Examples:
        >>> model = tokenprune.patch(model, SinkPruner(stage2=False), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    query_free: ClassVar[Mapping[str, Any]] = {"stage2": False}

    sinks: Annotated[float, Ge(0), Le(0.5)] = 0.01
    stage2: bool = True

    @property
    def query_aware(self) -> bool:
        return self.stage2

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        if not self.stage2:
            return [(self, budget)]
        inside = choose_layers(_AFTER, layers, Budget(keep=1.0))
        first, *cuts = plan_cuts(layers, list(zip((0, *inside), _SIZES, strict=True)), budget)
        first_stage = dataclasses.replace(self, stage2=False)
        return [(first_stage, first.budget), *((_TextGuidedCut(cut.layer), cut.budget) for cut in cuts)]

    def select(self, tokens: VisualTokens) -> Selection:
        mask, device, max_tokens = tokens.mask, tokens.mask.device, max(tokens.keep)
        features = tokens.encoder_features.float()
        index = torch.arange(mask.shape[1], device=device).expand_as(mask)
        num_sinks = [self._count_sinks(count, keep) for count, keep in zip(tokens.counts, tokens.keep, strict=True)]
        norm = features.norm(dim=-1)
        is_sink = top_mask(norm, mask, to_device(num_sinks, device), max(num_sinks))
        is_carrier = top_mask(norm, mask, to_device([min(1, count) for count in num_sinks], device), 1)

        rest = mask & ~is_sink
        room = [keep - min(1, count) for keep, count in zip(tokens.keep, num_sinks, strict=True)]
        salient = top_mask(
            tokens.encoder_attention(-1).mean(1),
            rest,
            to_device([-(-count // 2) for count in room], device),
            max_tokens,
        )
        keep = is_carrier | pick_dissimilar(features, rest, salient, to_device(room, device), max(room))
        carrier_index = is_carrier.to(torch.uint8).argmax(1, keepdim=True).expand_as(index)
        return Selection(keep, torch.where(is_sink, carrier_index, torch.where(keep, index, -1)), counts=tokens.keep)

    def _count_sinks(self, count: int, keep: int) -> int:
        """Return the number of sinks that leaves enough other tokens to reach `keep` with the merged token."""
        if keep >= count or not self.sinks:
            return 0
        return min(math.ceil(self.sinks * count), count - keep + 1)


@dataclass(frozen=True)
class _TextGuidedCut(Pruner):
    """Keep the tokens with the most attention from the text after the image, each text token weighted equally."""

    query_aware: ClassVar[bool] = True
    never_nan: ClassVar[bool] = True
    name: ClassVar[str] = "sinkpruner"
    site: ClassVar[Site] = Site.IN_LLM
    needs: ClassVar[frozenset[str]] = TEXT_ATTENTION

    layer: int

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        return sum_text_attention(tokens, uniform_weights(tokens.text.mask)).mean(1)


def pick_dissimilar(
    x: torch.Tensor,
    mask: torch.Tensor,
    selected: torch.Tensor,
    num_kept: torch.Tensor,
    max_tokens: int,
    num_per_round: int = _TOKENS_PER_ROUND,
) -> torch.Tensor:
    """Add the tokens least similar to the selected tokens, in rounds, bool (S, N).

    Ties go to the lower index. Tokens with NaN count as similar to no token.

    Args:
        x: Tokens, (S, N, D).
        mask: Tokens that may be added, bool (S, N).
        selected: Tokens selected before, bool (S, N).
        num_kept: Number of tokens to reach, long (S,).
        max_tokens: Maximum of `num_kept`.
        num_per_round: Number of tokens added per round.
    """
    results = []
    for rows in split_rows(len(x), x.shape[1] ** 2):
        products, selected_part, candidates = Products(normalize(x[rows])), selected[rows], mask[rows]
        if not products.fits_in_memory:
            segments = zip(range(products.shape[0]), selected_part, candidates, num_kept[rows].tolist(), strict=True)
            results.append(
                torch.stack(
                    [_pick_dissimilar_by_rows(products, *segment_inputs, num_per_round) for segment_inputs in segments]
                )
            )
            continue
        similarity = products.table
        # Adding -inf is five times faster than masked_fill on the table.
        nearest = (
            similarity + torch.zeros_like(similarity[:, 0]).masked_fill_(~selected_part, -torch.inf)[:, None]
        ).amax(2)
        for _ in range(0, max_tokens, num_per_round):
            room = (num_kept[rows] - selected_part.sum(1)).clamp(min=0, max=num_per_round)
            new = top_mask(-nearest, candidates & ~selected_part, room, num_per_round)
            selected_part = selected_part | new
            new_indices = partition(new)[:, None, :num_per_round]  # new tokens come first
            new_similarity = similarity.gather(2, new_indices.expand(-1, similarity.shape[1], -1))
            nearest = torch.maximum(
                nearest, new_similarity.masked_fill(~new[:, None].gather(2, new_indices), -torch.inf).amax(2)
            )
        results.append(selected_part)
    return torch.cat(results)


def _pick_dissimilar_by_rows(
    products: Products,
    segment: int,
    selected: torch.Tensor,
    candidates: torch.Tensor,
    num_kept: int,
    num_per_round: int,
) -> torch.Tensor:
    """Run `pick_dissimilar` on one segment, and compute only the products of selected tokens, bool (N,)."""
    nearest = selected.new_full(selected.shape, -torch.inf, dtype=torch.float32)
    new = selected
    while True:
        for part in new.nonzero().flatten().split(_ROWS_AT_ONCE):
            torch.maximum(nearest, products.rows(segment, part).amax(0), out=nearest)
        free = candidates & ~selected
        room = min(num_per_round, num_kept - int(selected.sum()), int(free.sum()))
        if room <= 0:
            return selected
        new = top_mask(-nearest[None], free[None], to_device([room], candidates.device), num_per_round)[0]
        selected = selected | new
