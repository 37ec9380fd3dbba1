# SPDX-License-Identifier: Apache-2.0
"""Random float32 tensors on the CPU, independent of the process's default device and dtype."""

from __future__ import annotations

import torch


def normal(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """Return samples of the standard normal distribution."""
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


def uniform(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """Return samples of the uniform distribution on [0, 1)."""
    return torch.rand(*shape, generator=generator, dtype=torch.float32, device="cpu")
