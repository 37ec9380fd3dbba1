# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
from annotated_types import Ge, Gt, Le
from torch.nn.functional import normalize

from tokenprune.integrations.hf.sessions.policies.base import Policy, PolicyView
from tokenprune.integrations.hf.sessions.policies.registry import register_policy

if TYPE_CHECKING:
    from torch import Tensor

_NOVEL = 2.0  # larger than any score (a negative mean cosine)


@register_policy("infinipot_v")
@dataclass(frozen=True)
class InfiniPotV(Policy):
    """Keep the latest frames, older tokens that differ from them, and tokens with large values, per layer and KV head.

    A share `tar` of the kept tokens consists of the latest frames and of older tokens with low temporal redundancy: the
    mean cosine of their keys with the keys in the same cell of the latest frames is small. The rest are the tokens with
    the largest value norms.

    This is a reconstruction from the abstract and a description of the code, which has no licence and was not copied.

    Args:
        tar: Share of tokens selected by temporal redundancy, in [0, 1]. The rest is selected by value norms.
        recent: Share of the held frames that are the latest frames, in (0, 1]. At least one frame.

    Source:
        InfiniPot-V (arXiv 2506.15745, NeurIPS 2025).

    Differences from the paper:
        - Cells are matched by their index, because heads hold different cells after the first compression.
        - A token whose cell is missing in the latest frames counts as novel.
        - If the latest frames exceed the share `tar`, their newest tokens are kept.
        - Norms are computed in float32, and are not pooled.
        - The memory is compressed whenever it is full, because a stream has no last block.

    Examples:
        >>> tokenprune.sessions.policy("infinipot_v", tar=0.75).recent
        0.25
    """

    tar: Annotated[float, Ge(0), Le(1)] = 0.5
    recent: Annotated[float, Gt(0), Le(1)] = 0.25

    def select(self, view: PolicyView, keep: int) -> Tensor:
        heads = view.keys.shape[0]
        frame, cell = view.frame.expand(heads, -1), view.cell.expand(heads, -1)
        frames = frame.unique()
        late = frame >= frames[-max(1, int(len(frames) * self.recent))]  # (heads, entries)
        first = keep - round((1 - self.tar) * keep)  # selected by temporal redundancy
        late &= late.flip(1).cumsum(1).flip(1) <= first
        keys = normalize(view.keys.float(), dim=-1)
        novelty = torch.stack([_compute_novelty(*head) for head in zip(keys, cell, late, strict=True)])
        order = novelty.masked_fill(late, torch.inf).argsort(dim=1, descending=True, stable=True)
        norms = view.values.float().norm(dim=-1).scatter(1, order[:, :first], torch.inf)
        return norms.argsort(dim=1, descending=True, stable=True)[:, :keep].sort(1).values


def _compute_novelty(keys: Tensor, cell: Tensor, late: Tensor) -> Tensor:
    """Return the negative mean cosine of each key with the latest keys in its cell, shape (entries,)."""
    same = (cell[:, None] == cell[late]).float()  # (entries, late entries)
    count = same.sum(1)
    similarity = (keys @ keys[late].T * same).sum(1) / count.clamp(min=1)
    return torch.where(count > 0, -similarity, _NOVEL)
