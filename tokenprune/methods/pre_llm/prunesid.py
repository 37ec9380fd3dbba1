# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from tokenprune.kernels.coverage import alike
from tokenprune.kernels.pairs import Relation
from tokenprune.kernels.suppress import unsuppressed
from tokenprune.kernels.take import rank_in_group
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.methods.scores import compute_saliency
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register("prunesid", site=Site.PRE_LLM, paper="arXiv 2603.09480, ICLR 2026")
@dataclass(frozen=True)
class PruneSID(Pruner):
    """Group the visual tokens by principal components, and keep of each group the most typical ones that are unlike
    each other (PruneSID).

    A token belongs to the component in which it is largest. Within a group the one with the highest score stays and
    removes those more similar to it than a threshold, and so on. Groups share what is kept by how many such tokens they
    have, at least one each; where that is not enough, the best of the removed ones come back. The choice knows nothing
    of the question.

    form: "qwen" scores a token by its size in its component, "llava" by the attention that it gets in the vision
    tower's last block; the two have the authors' numbers of groups and thresholds for these models.

    Source: "Prune Redundancy, Preserve Essence: Vision Token Compression in VLMs via Synergistic Importance-Diversity",
    and the authors' code, whose two forms differ; both by description.

    Differs from the paper: components come from an exact decomposition (the code's is randomised, so that two runs
    differ); both forms look at projected tokens (the LLaVA code at the tower's); there are no more groups than tokens
    to keep, and no lower bound of what is kept; the class token is not kept; tokens stay in order and keep their
    positions. The variant that sets the budget by content is left out, because a constant of it is not published.
    """

    asks_device: ClassVar[bool] = True
    fallback_options: ClassVar[Mapping[str, Any]] = {"form": "qwen"}

    form: Literal["qwen", "llava"] = "qwen"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"encoder_attention"} if self.form == "llava" else set())

    def select(self, tokens: VisualTokens) -> Selection:
        keep = torch.zeros_like(tokens.mask)
        attention = compute_saliency(tokens) if self.form == "llava" else None
        for segment, (count, num_kept) in enumerate(zip(tokens.counts, tokens.keep, strict=True)):
            saliency = None if attention is None else attention[segment, :count]
            keep[segment, :count] = self._prune_image(tokens.hidden[segment, :count], num_kept, saliency)
        return Selection(keep, counts=tokens.keep)

    def _prune_image(self, x: torch.Tensor, num_kept: int, saliency: torch.Tensor | None) -> torch.Tensor:
        """bool `[N]`: what stays of one image's tokens `[N, D]`."""
        count, is_qwen = len(x), self.form == "qwen"
        x = x.float().masked_fill(~x.isfinite().all(1, keepdim=True), 0)
        num_groups = min(max(num_kept // 4, 4 if is_qwen else 1), num_kept)
        size, group = project_to_components(x, num_groups).max(1)
        score = size if saliency is None else saliency
        mask = torch.ones(1, count, dtype=torch.bool, device=x.device)
        pairs = alike(x[None], mask)
        upper_sum = pairs.of_rows(lambda rows, segment, start: rows.triu(start).sum(1)).sum(dtype=torch.float64).float()
        if is_qwen:  # the code's mean of the upper half counts the lower one as zeros
            threshold = max(18 * num_kept / count, 1) * upper_sum / count**2
        else:
            diagonal = pairs.diagonal().sum()
            threshold = num_kept / 32 * 2 * (upper_sum - diagonal) / max(1, count * (count - 1))
        conflicts = Relation(pairs, lambda similarity, other: (similarity > threshold) & (other == group), group[None])
        is_distinct = unsuppressed(conflicts, score[None], mask)
        membership = torch.stack([mask[0], is_distinct[0]]).long()
        num_members, num_distinct = (
            membership.new_zeros(2, num_groups).scatter_add_(1, group.expand(2, -1), membership).tolist()
        )
        quota = to_device(compute_quotas(num_members, num_distinct, num_kept), x.device)
        return rank_in_group(group[None], is_distinct.byte(), score[None])[0] < quota[group]


def project_to_components(x: torch.Tensor, num_components: int) -> torch.Tensor:
    """float32 `[N, number]`: size of each token `[N, D]` in each of the first principal components of their sigmoids,
    each token less its own mean; 0 in components that there are not. Waits for the device."""
    x = x.double().sigmoid()
    x = x - x.mean(1, keepdim=True)
    wide = x.shape[0] <= x.shape[1]
    values, vectors = torch.linalg.eigh(x @ x.T if wide else x.T @ x)
    values, vectors = values.flip(0)[:num_components], vectors.flip(1)[:, :num_components]
    if not wide:
        vectors = x @ vectors / values.clamp(min=1e-300).sqrt()
    is_present = values > 1e-12 * values[:1].clamp(min=1e-300)
    projection = torch.where(is_present, vectors.abs(), 0).float()
    return torch.nn.functional.pad(projection, (0, num_components - projection.shape[1]))


def compute_quotas(num_members: list[int], num_distinct: list[int], num_kept: int) -> list[int]:
    """Return how many tokens each group keeps, `wanted` in all.

    members: tokens of each group; left: how many of them were not removed.
    """
    cap = 5 * math.ceil(num_kept / 64)
    max_kept = [min(cap, size, distinct) for size, distinct in zip(num_members, num_distinct, strict=True)]
    while sum(max_kept) < num_kept:
        max_kept = [min(value + 1, size) for value, size in zip(max_kept, num_members, strict=True)]
    min_kept = [min(1, size) for size in num_members]
    remaining, total = num_kept - sum(min_kept), sum(num_distinct)
    ends = [round(value / total * remaining) for value in itertools.accumulate(num_distinct)]
    extra = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    quota = [min(value + add, top) for value, add, top in zip(min_kept, extra, max_kept, strict=True)]
    for group in sorted(range(len(num_distinct)), key=lambda group: -num_distinct[group]):
        quota[group] += min(num_kept - sum(quota), max_kept[group] - quota[group])
    return quota
