# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from tokenprune.kernels.coverage import cosine_products
from tokenprune.kernels.pairs import Relation
from tokenprune.kernels.suppress import non_maximum_suppression
from tokenprune.kernels.take import rank_in_group
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.methods.scores import compute_saliency
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register("prunesid", site=Site.PRE_LLM, paper="arXiv 2603.09480, ICLR 2026")
@dataclass(frozen=True)
class PruneSID(Pruner):
    """Keep typical distinct tokens of each principal component.

    A token belongs to the component with its largest coefficient. Within a group, the token with the highest score is
    kept and removes the tokens whose similarity exceeds a threshold, and so on. Groups share the budget by their number
    of distinct tokens, with at least one token each. If too few distinct tokens remain, the best removed tokens are
    restored. The choice does not depend on the question.

    Args:
        form: "qwen" scores a token by its coefficient, "llava" by its attention in the tower's last block. Each form
            uses the authors' number of groups and thresholds for that model.

    Source:
        "Prune Redundancy, Preserve Essence: Vision Token Compression in VLMs via Synergistic Importance-Diversity"
        (arXiv 2603.09480), from descriptions of the paper and of both forms of the authors' code.

    Differences from the paper:
        - Components are from an exact decomposition. The authors' code uses a randomized one, so two runs differ.
        - Both forms use projected tokens. The authors' LLaVA code uses the tower's output.
        - The number of groups never exceeds the number of kept tokens, and the budget has no lower bound.
        - The class token is not kept.
        - Kept tokens stay in order and keep their positions in the prompt.
        - The variant that sets the budget by content is not implemented, because one of its constants is not published.

    Examples:
        >>> model = tokenprune.patch(model, PruneSID(form="llava"), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    syncs_device: ClassVar[bool] = True
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
        """Return the kept tokens of one image, bool (N,). x: (N, D). saliency: float (N,) or None."""
        count, is_qwen = len(x), self.form == "qwen"
        x = x.float().masked_fill(~x.isfinite().all(1, keepdim=True), 0)
        num_groups = min(max(num_kept // 4, 4 if is_qwen else 1), num_kept)
        size, group = project_to_components(x, num_groups).max(1)
        score = size if saliency is None else saliency
        mask = torch.ones(1, count, dtype=torch.bool, device=x.device)
        pairs = cosine_products(x[None], mask)
        upper_rows = pairs.reduce_rows(lambda rows, segment, start: rows.triu(start).sum(1))
        upper_sum = upper_rows.sum(dtype=torch.float64).float()
        if is_qwen:  # the authors' mean includes the zeros below the diagonal
            threshold = max(18 * num_kept / count, 1) * upper_sum / count**2
        else:
            diagonal = pairs.diagonal().sum()
            threshold = num_kept / 32 * 2 * (upper_sum - diagonal) / max(1, count * (count - 1))
        conflicts = Relation(pairs, lambda similarity, other: (similarity > threshold) & (other == group), group[None])
        is_distinct = non_maximum_suppression(conflicts, score[None], mask)
        membership = torch.stack([mask[0], is_distinct[0]]).long()
        group_counts = membership.new_zeros(2, num_groups).scatter_add_(1, group.expand(2, -1), membership)
        num_members, num_distinct = group_counts.tolist()
        quota = to_device(compute_quotas(num_members, num_distinct, num_kept), x.device)
        return rank_in_group(group[None], is_distinct.byte(), score[None])[0] < quota[group]


def project_to_components(x: torch.Tensor, num_components: int) -> torch.Tensor:
    """Return the absolute coefficients of each token on the first principal components, float32 (N, num_components).

    Tokens pass through a sigmoid and are centered by their own mean. Components beyond the rank are 0. The device is
    synchronized.
    """
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
    """Return the number of tokens that each group keeps, `num_kept` in total.

    Args:
        num_members: Number of tokens of each group.
        num_distinct: Number of distinct tokens of each group.
        num_kept: Number of tokens to keep.
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
