# SPDX-License-Identifier: Apache-2.0
"""Worker: put together the rows that the prompt awaits of images or videos."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenprune.integrations.vllm.settings.plan import Plan
from tokenprune.kernels.compact import partition
from tokenprune.kernels.transfer import to_device


@dataclass(frozen=True)
class AwaitedRows:
    """The rows `[B, R, W]` that the prompt awaits of B items that are alike. places: long `[B, R]`, where each stands
    in its item's full text. is_text: bool `[B, R]`, True for text that stands among them, whose own embedding is still
    to be put there; None: none does."""

    rows: Tensor
    indices: Tensor
    is_text: Tensor | None = None

    @classmethod
    def from_kept(cls, plan: Plan, rows: Tensor, kept: Tensor) -> AwaitedRows:
        """Return those of items of one plan that reduces. rows: `[B * n, W]`, of all placeholders. kept: bool
        `[B * n]`, the ones that stay. The device is asked for nothing: how many they are is known."""
        kept = kept.view(-1, sum(plan.counts))
        if not plan.between:
            order = partition(kept)[:, : plan.rows]
            places = order if plan.is_plain else to_device(plan.places, rows.device)[order]
            return cls(_taken(rows, order, kept.shape[1]), places)
        first, end = plan.span
        is_embed = plan.is_embed[first:end]
        source, is_text = to_device(is_embed.cumsum(0) - 1, rows.device), to_device(~is_embed, rows.device)
        order = partition(kept[:, source] | is_text)[:, : plan.rows]
        return cls(_taken(rows, source[order], kept.shape[1]), first + order, is_text[order])


def _taken(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """Return `[B, R, W]` of `rows` `[B * count, W]`. index: long `[B, R]`, within each item."""
    if len(index) > 1:
        index = index + torch.arange(0, len(rows), count, device=index.device)[:, None]
    return rows.index_select(0, index.flatten()).unflatten(0, index.shape)
