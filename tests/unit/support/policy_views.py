# SPDX-License-Identifier: Apache-2.0
"""Inputs of session policies, without a model."""

from __future__ import annotations

import torch

from tokenprune.integrations.hf.sessions.policies.base import PolicyView


def view_of(
    frames: int, cells: int, *, heads: int = 2, seed: int = 0, step: int = 0, first: int = 0, session_seed: int = 0
) -> PolicyView:
    """Build a view of complete frames with a text token between each two."""
    g = torch.Generator().manual_seed(seed)
    n = frames * cells
    frame = torch.arange(first, first + frames).repeat_interleave(cells)[None]
    cell = torch.arange(cells).repeat(frames)[None]
    index = frame * (cells + 1) + cell
    keys, values = torch.randn(2, heads, n, 8, generator=g)
    attention = torch.rand(2 * heads, n, generator=g)
    return PolicyView(keys, values, frame, cell, index, index[None], 1, 4, step, session_seed, attention / n)
