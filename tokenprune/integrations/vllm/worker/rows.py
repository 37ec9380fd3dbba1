# SPDX-License-Identifier: Apache-2.0
"""Worker: put together the rows that the prompt awaits of one image or video."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tokenprune.integrations.vllm.setting.plan import Plan
from tokenprune.kernels.compact import partition
from tokenprune.ops.transfer import to_device


@dataclass(frozen=True)
class AwaitedRows:
    """The rows `[R, W]` that an item's prompt awaits. places: long `[R]`, where each stands in the item's full text.
    is_text: bool `[R]`, True for text that stands among them, whose own embedding is still to be put there; None: none
    does."""

    rows: Tensor
    places: Tensor
    is_text: Tensor | None = None

    @classmethod
    def kept(cls, plan: Plan, rows: Tensor, kept: Tensor) -> AwaitedRows:
        """Return those of a plan that reduces. rows: `[n, W]`, of all its placeholders. kept: bool `[n]`, the ones that
        stay. The device is asked for nothing: how many they are is known."""
        if not plan.between:
            order = _first(kept, plan.rows)
            places = order if plan.is_plain else to_device(plan.places, rows.device)[order]
            return cls(rows.index_select(0, order), places)
        first, end = plan.span
        is_embed = plan.is_embed[first:end]
        source, is_text = to_device(is_embed.cumsum(0) - 1, rows.device), to_device(~is_embed, rows.device)
        order = _first(kept[source] | is_text, plan.rows)
        return cls(rows[source[order]], first + order, is_text[order])


def _first(stays: Tensor, number: int) -> Tensor:
    """Return the places of the `number` entries that are True, in order."""
    return partition(stays[None])[0, :number]
