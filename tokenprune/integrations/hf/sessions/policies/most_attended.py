# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tokenprune.integrations.hf.sessions.policies.base import Policy, PolicyView

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MostAttended(Policy):
    """Keep the visual entries with the most `proxy_attention`, averaged over the query heads of each KV head.

    Ties go to the earlier entry.

    Args:
        heads: "each" selects per KV head. "mean" selects the same entries for all heads of a layer.

    Examples:
        >>> MostAttended(heads="mean").heads
        'mean'
    """

    heads: Literal["each", "mean"] = "each"

    def select(self, view: PolicyView, keep: int) -> Tensor:
        attention = view.proxy_attention
        assert attention is not None
        scores = attention.unflatten(0, (view.keys.shape[0], -1)).mean(1)
        if self.heads == "mean":
            scores = scores.mean(0, keepdim=True)
        chosen = scores.argsort(dim=1, descending=True, stable=True)[:, :keep].sort(1).values
        return chosen[0] if self.heads == "mean" else chosen
