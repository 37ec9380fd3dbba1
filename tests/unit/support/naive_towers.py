# SPDX-License-Identifier: Apache-2.0
"""Blocks of CLIP and SigLIP towers in plain loops over one image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class InputImage:
    """Hidden states of one image, and the patches that each of its tokens merges."""

    def __init__(self, tower: Any, pixels: Tensor) -> None:
        embedded = tower.embeddings(pixels[None])
        self.protected = int(hasattr(tower, "pre_layrnorm"))
        self.x = (tower.pre_layrnorm(embedded) if self.protected else embedded)[0]
        self.groups = [[index] for index in range(len(self.x))]

    def attend(self, block: Any, proportional: bool = True) -> Tensor:
        """Add the attention and return its keys, as the mean over the heads."""
        attention, h = block.self_attn, block.layer_norm1(self.x)
        q, k, v = (
            p(h).view(len(h), attention.num_heads, attention.head_dim).transpose(0, 1)
            for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        logits = q @ k.transpose(1, 2) * attention.head_dim**-0.5
        if proportional:
            logits = logits + self.weight().log()
        self.x = self.x + attention.out_proj((logits.softmax(-1) @ v).transpose(0, 1).flatten(1))
        return k.mean(0)

    def weight(self) -> Tensor:
        return torch.tensor([float(len(group)) for group in self.groups])

    def finish(self, block: Any, merged: list[list[int]]) -> None:
        """Merge the groups `joined` and add the MLP."""
        weight = self.weight()
        self.x = torch.stack([(self.x[m] * weight[m, None]).sum(0) / weight[m].sum() for m in merged])
        self.groups = [[i for member in members for i in self.groups[member]] for members in merged]
        self.x = self.x + block.mlp(block.layer_norm2(self.x))

    def grid(self) -> Tensor:
        """Return the hidden state of each patch."""
        grid = self.x.new_empty(sum(map(len, self.groups)), self.x.shape[1])
        for feature, group in zip(self.x, self.groups, strict=True):
            grid[group] = feature
        return grid
