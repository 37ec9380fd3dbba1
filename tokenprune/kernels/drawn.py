# SPDX-License-Identifier: Apache-2.0
"""Numbers drawn on the host in float32, whatever a process has made its default device and dtype."""

from __future__ import annotations

import torch


def normal(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """Return numbers of the standard normal distribution."""
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


def uniform(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """Return numbers between 0 and 1."""
    return torch.rand(*shape, generator=generator, dtype=torch.float32, device="cpu")
