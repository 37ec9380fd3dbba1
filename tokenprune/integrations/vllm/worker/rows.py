# SPDX-License-Identifier: Apache-2.0
"""Worker: assemble the rows of images and videos for their placeholders in the prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenprune.integrations.vllm.settings.plan import Plan
from tokenprune.kernels.compact import partition
from tokenprune.kernels.transfer import to_device


@dataclass(frozen=True)
class AwaitedRows:
    """The rows of B equal items for their placeholders in the prompt.

    Attributes:
        rows: Rows, shape (B, R, width).
        indices: Index of each row in the item's unpruned text, shape (B, R), int64.
        is_text: Mask of rows that are text within the item, shape (B, R), bool. Their embeddings are inserted later.
            None if there is no such text.
    """

    rows: Tensor
    indices: Tensor
    is_text: Tensor | None = None

    @classmethod
    def from_kept(cls, plan: Plan, rows: Tensor, kept: Tensor) -> AwaitedRows:
        """Return the rows of items of one plan. Does not synchronize with the device, because the plan has all counts.

        Args:
            rows: Rows of all placeholders, shape (B * tokens, width).
            kept: Mask of the kept rows, shape (B * tokens,), bool.
        """
        kept = kept.view(-1, sum(plan.counts))
        if not plan.between:
            order = partition(kept)[:, : plan.rows]
            indices = order if plan.is_plain else to_device(plan.places, rows.device)[order]
            return cls(_select(rows, order, kept.shape[1]), indices)
        first, end = plan.span
        is_embed = plan.is_embed[first:end]
        source, is_text = to_device(is_embed.cumsum(0) - 1, rows.device), to_device(~is_embed, rows.device)
        order = partition(kept[:, source] | is_text)[:, : plan.rows]
        return cls(_select(rows, source[order], kept.shape[1]), first + order, is_text[order])


def _select(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """Select rows of each item.

    Args:
        rows: Rows of all items, shape (B * count, width).
        index: Indices within each item, shape (B, R), int64.
        count: Number of rows of an item.

    Returns:
        Rows, shape (B, R, width).
    """
    if len(index) > 1:
        index = index + torch.arange(0, len(rows), count, device=index.device)[:, None]
    return rows.index_select(0, index.flatten()).unflatten(0, index.shape)
