# SPDX-License-Identifier: Apache-2.0
"""Checks of values that the host reads without waiting for a device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def reads_fast(x: Tensor) -> bool:
    """Return True if the host reads the values of `x` without waiting for a device, and outside of torch.compile."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


# The next two functions repeat the condition of `reads_fast`, as a forward calls them dozens of times.
def is_all_true(mask: Tensor) -> bool:
    """Return True if the host reads a bool mask fast and all entries are True, so that a pass can be skipped."""
    return mask.device.type == "cpu" and not torch.compiler.is_compiling() and bool(mask.numpy().all())


def is_all_finite(x: Tensor) -> bool:
    """Return True if the host reads `x` fast and all entries are finite, so that a pass can be skipped."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return x.numel() == 0 or math.isfinite(torch.linalg.vector_norm(x, torch.inf).item())
