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
from tokenprune.budgets.schedule import place, profile
from tokenprune.kernels.clusters import in_parts
from tokenprune.kernels.compact import partition
from tokenprune.kernels.masses import evenly
from tokenprune.kernels.pairs import Products, unit
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.multi_cut import TEXT_ATTENTION, sum_text_attention
from tokenprune.methods.registry import register
from tokenprune.selection.method import Method, Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_AFTER = (3 / 32, 7 / 32, 16 / 32)
_SIZES = (128.0, 86.0, 57.0, 35.0)  # before the decoder, and at its three cuts
_A_ROUND = 16  # tokens that a round of the search for different ones takes
_ROWS = 128  # of products at a time, where there are too many for a table


@register(
    "sinkpruner", site=Site.PRE_LLM, needs=("encoder_attention", "encoder_features"), paper="arXiv 2609.01004",
    merges=True, reconstruction=True,
)  # fmt: skip
@dataclass(frozen=True)
class SinkPruner(Pruner):
    """Gather the sinks of the vision tower, tokens of huge norm, in one, keep of the rest what the tower attends to and
    what differs most, and cut inside the decoder by what the question attends to.

    keep: tokens averaged over the decoder's layers, those before the first cut inside it included.
    sinks: share in [0, 1) of an image's tokens, those of largest norm, that become one; 0 gathers none.
    stage2: False leaves out the cuts inside the decoder: the choice then knows nothing of the question and is safe with
    a prefix cache, and `keep` is what enters the decoder.

    Source: "SinkPruner: Sink-Free Visual Token Pruning for Multimodal Large Language Models", from two summaries of the
    paper that agree.

    Differs from the paper: neither its text nor code was to be had, so this is a reconstruction. Its tables of how many
    tokens stay at each stage are not known: here 128 : 86 : 57 : 35, of which the tower's attention and the search for
    different ones have half each. The norm is that of the tower's output before the projector, sinks are found in each
    image as a whole (not in its tiles), and their mean is taken after the projector, at the place of the largest.
    "Layers 2, 6 and 15" are taken for the input of 3, 7 and 16 of 32, as in SparseVLM. Positions are kept.
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
        inside = place(_AFTER, layers, Budget(keep=1.0))
        first, *cuts = profile(layers, list(zip((0, *inside), _SIZES, strict=True)), budget)
        alone = dataclasses.replace(self, stage2=False)
        return [(alone, first.budget), *((_TextGuidedCut(cut.layer), cut.budget) for cut in cuts)]

    def select(self, tokens: VisualTokens) -> Selection:
        mask, device, most = tokens.mask, tokens.mask.device, max(tokens.keep)
        features = tokens.encoder_features.float()
        index = torch.arange(mask.shape[1], device=device).expand_as(mask)
        high = [self._high(count, keep) for count, keep in zip(tokens.counts, tokens.keep, strict=True)]
        norm = features.norm(dim=-1)
        sink = top_mask(norm, mask, to_device(high, device), max(high))
        carrier = top_mask(norm, mask, to_device([min(1, one) for one in high], device), 1)

        rest = mask & ~sink
        room = [keep - min(1, one) for keep, one in zip(tokens.keep, high, strict=True)]
        salient = top_mask(
            tokens.encoder_attention(-1).mean(1), rest, to_device([-(-one // 2) for one in room], device), most
        )
        keep = carrier | pick_dissimilar(features, rest, salient, to_device(room, device), max(room))
        # Where all stay there is nothing to gather, and no carrier.
        into = carrier.to(torch.uint8).argmax(1, keepdim=True).expand_as(index)
        return Selection(keep, torch.where(sink, into, torch.where(keep, index, -1)), counts=tokens.keep)

    def _high(self, count: int, keep: int) -> int:
        """Return the number of sinks among `count` tokens that leaves enough others to keep `keep` with the token the
        sinks become."""
        if keep >= count or not self.sinks:
            return 0
        return min(math.ceil(self.sinks * count), count - keep + 1)


@dataclass(frozen=True)
class _TextGuidedCut(Pruner):
    """Keeps what the text after the image attends to most, each token of it alike. layer: where it cuts."""

    query_aware: ClassVar[bool] = True
    never_nan: ClassVar[bool] = True
    name: ClassVar[str] = "sinkpruner"
    site: ClassVar[Site] = Site.IN_LLM
    needs: ClassVar[frozenset[str]] = TEXT_ATTENTION

    layer: int

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        return sum_text_attention(tokens, evenly(tokens.text.mask)).mean(1)


def pick_dissimilar(
    x: torch.Tensor, mask: torch.Tensor, taken: torch.Tensor, number: torch.Tensor, most: int, at_once: int = _A_ROUND
) -> torch.Tensor:
    """bool `[S, N]`: `taken`, and of the others of `mask` round by round the `at_once` that are least like any taken by
    cosine, until there are `number` (long `[S]`, at most `most`).

    x: `[S, N, D]`; mask, taken: bool `[S, N]`. Of equals the first; NaN is like nothing.
    """
    found = []
    for rows in in_parts(len(x), x.shape[1] ** 2):
        products, chosen, left = Products(unit(x[rows])), taken[rows], mask[rows]
        if not products.fits:
            each = zip(range(products.shape[0]), chosen, left, number[rows].tolist(), strict=True)
            found.append(torch.stack([_pick_dissimilar_by_rows(products, *one, at_once) for one in each]))
            continue
        alike = products.table
        # Adding takes a fifth of the time of filling.
        nearest = (alike + torch.zeros_like(alike[:, 0]).masked_fill_(~chosen, -torch.inf)[:, None]).amax(2)
        for _ in range(0, most, at_once):
            room = (number[rows] - chosen.sum(1)).clamp(min=0, max=at_once)
            new = top_mask(-nearest, left & ~chosen, room, at_once)
            chosen = chosen | new
            at = partition(new)[:, None, :at_once]  # the new ones, then others
            fresh = alike.gather(2, at.expand(-1, alike.shape[1], -1))
            nearest = torch.maximum(nearest, fresh.masked_fill(~new[:, None].gather(2, at), -torch.inf).amax(2))
        found.append(chosen)
    return torch.cat(found)


def _pick_dissimilar_by_rows(
    products: Products, segment: int, chosen: torch.Tensor, left: torch.Tensor, number: int, at_once: int
) -> torch.Tensor:
    """bool `[N]`: `different` of one segment, of whose products those of what is taken alone are made."""
    nearest = chosen.new_full(chosen.shape, -torch.inf, dtype=torch.float32)
    new = chosen
    while True:
        for some in new.nonzero().flatten().split(_ROWS):
            torch.maximum(nearest, products.rows(segment, some).amax(0), out=nearest)
        free = left & ~chosen
        room = min(at_once, number - int(chosen.sum()), int(free.sum()))
        if room <= 0:
            return chosen
        new = top_mask(-nearest[None], free[None], to_device([room], left.device), at_once)[0]
        chosen = chosen | new
