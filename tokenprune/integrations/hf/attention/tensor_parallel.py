# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel models: each process holds some of an attention module's heads, and scores need all of them."""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn

from tokenprune.integrations.shared.observation import Join


def heads_of_all_ranks(module: nn.Module) -> Join | None:
    """Return what joins the heads (axis 1) of all processes that share `module`, None if this one has them all.

    Without it every process would choose by its own heads, and they would keep different tokens.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    from torch.distributed.tensor import DTensor, Shard

    for weight in module.parameters():
        if isinstance(weight, DTensor):
            for axis, placement in enumerate(weight.placements):
                if isinstance(placement, Shard):
                    return _join_over(weight.device_mesh.get_group(axis))
    return None


def _join_over(group: distributed.ProcessGroup) -> Join:
    def join(own: Tensor) -> Tensor:
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(group.size())]
        distributed.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    return join
