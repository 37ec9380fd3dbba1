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

_NOVEL = 2.0  # above any score: minus a mean of cosines


@register_policy("infinipot_v")
@dataclass(frozen=True)
class InfiniPotV(Policy):
    """Keep the latest frames, what differs from them, and what has large values, in each layer and KV head by itself
    (InfiniPot-V, arXiv 2506.15745, NeurIPS 2025).

    A share `tar` of what stays are the visual tokens of the latest frames, and those older ones whose keys are least
    like the keys at the same cell of the latest frames (temporal redundancy: minus the mean cosine). The rest are those
    with the largest norms of their values.
    tar: share in [0, 1]; 0: by norms alone, 1: by redundancy alone. recent: share of the held frames that are the
    latest, in (0, 1]; at least one frame.
    A reconstruction: of the paper only the abstract was read, and its code, which has no licence, was described to us,
    not copied. Differs from that code: cells are matched by their number, since after a first compression heads hold
    different ones; a token whose cell the latest frames do not hold counts as unlike; where the latest frames would
    fill more than the share, the newest tokens of them stay; norms are taken in float32; there is no pooling of norms;
    and it compresses whenever the memory is over, as a stream has no last block.
    """

    tar: Annotated[float, Ge(0), Le(1)] = 0.5
    recent: Annotated[float, Gt(0), Le(1)] = 0.25

    def select(self, view: PolicyView, keep: int) -> Tensor:
        heads = view.keys.shape[0]
        frame, cell = view.frame.expand(heads, -1), view.cell.expand(heads, -1)
        frames = frame.unique()
        late = frame >= frames[-max(1, int(len(frames) * self.recent))]  # [H, n]
        first = keep - round((1 - self.tar) * keep)  # stay for the latest and what differs from them
        late &= late.flip(1).cumsum(1).flip(1) <= first
        keys = normalize(view.keys.float(), dim=-1)
        novelty = torch.stack([_novelty(*of_head) for of_head in zip(keys, cell, late, strict=True)])
        order = novelty.masked_fill(late, torch.inf).argsort(dim=1, descending=True, stable=True)
        norms = view.values.float().norm(dim=-1).scatter(1, order[:, :first], torch.inf)
        return norms.argsort(dim=1, descending=True, stable=True)[:, :keep].sort(1).values


def _novelty(keys: Tensor, cell: Tensor, late: Tensor) -> Tensor:
    """Return minus the mean cosine of each key `[n, D]` with those keys of `late` (bool `[n]`) that share its cell."""
    same = (cell[:, None] == cell[late]).float()  # [n, late]
    number = same.sum(1)
    likeness = (keys @ keys[late].T * same).sum(1) / number.clamp(min=1)
    return torch.where(number > 0, -likeness, _NOVEL)
