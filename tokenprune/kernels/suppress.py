# SPDX-License-Identifier: Apache-2.0
"""Suppression: what stays when each token that stays removes those near it."""

from __future__ import annotations

import torch
from torch import Tensor


def unsuppressed(near: Tensor, score: Tensor, mask: Tensor) -> Tensor:
    """bool `[S, N]`: go through the tokens by falling score; one that is still there stays, and removes all behind it
    that it is near.

    near: bool `[S, N, N]`, whether the first removes the second; score: float `[S, N]`, of equal ones the lower index
    comes first, NaN comes last; mask: bool `[S, N]`, False at padding. Takes N steps; nothing here asks the device.
    """
    score = score.float().nan_to_num(nan=-torch.inf)
    order = torch.where(mask, score, -torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order)
    rank.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    there, rows = mask.clone(), torch.arange(len(mask), device=mask.device)
    for step in range(order.shape[1]):
        one = order[:, step]
        there &= ~(near[rows, one] & there[rows, one].unsqueeze(1) & (rank > step))
    return there
