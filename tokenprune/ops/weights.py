# SPDX-License-Identifier: Apache-2.0
"""Weights in a mean, in float32 whatever a process's default dtype: counts divided by counts take that one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def evenly(mask: Tensor) -> Tensor:
    """Return float32 weights, alike where a bool mask is True and 0 elsewhere, that add up to 1 along its last axis."""
    return mask.float() / mask.sum(-1, keepdim=True).clamp(min=1)
