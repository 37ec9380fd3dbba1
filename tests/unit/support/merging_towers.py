# SPDX-License-Identifier: Apache-2.0
"""Towers that merge in a known way, for tests of virtual unmerging."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exact_attention import exact_attention
from tokenprune.methods.encoder.tome import ToMe

# As the library computes attention, and the paper's equation 10.
FORMS = {"expanded": lambda model: nullcontext(), "exact": exact_attention}


@dataclass(frozen=True)
class Merging(ToMe):
    """Minimal merging method with the option."""

    vtu: str = "expanded"


@torch.no_grad()
def naive_decoder(
    decoder: Any, embeds: Tensor, positions: Tensor, groups: list[list[int]]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """One row, written from the spec: the last hidden states `[L, D]`, and each layer's keys and values."""
    owner = torch.empty(len(embeds), dtype=torch.long)
    for number, group in enumerate(groups):
        owner[group] = number
    x = torch.stack([embeds[group].mean(0) for group in groups])
    positions = positions[None] if positions.ndim == 1 else positions[:, None]  # of three axes
    cos, sin = (part[0] for part in decoder.rotary_emb(embeds[None], positions))
    all_keys, all_values = [], []
    for layer in decoder.layers:
        at = layer.self_attn
        h, heads = layer.input_layernorm(x), at.config.num_attention_heads
        q, k, v = (p(h).view(len(h), -1, at.head_dim) for p in (at.q_proj, at.k_proj, at.v_proj))
        if hasattr(at, "q_norm"):
            q, k = at.q_norm(q), at.k_norm(k)
        keys = torch.stack([by_hand(k[owner[n]], cos[n], sin[n]) for n in range(len(embeds))])
        values = torch.stack([v[owner[n]] for n in range(len(embeds))])
        out = torch.empty(len(embeds), heads, at.head_dim)
        for m in range(len(embeds)):
            query = by_hand(q[owner[m]], cos[m], sin[m])
            for head in range(heads):
                shared = head // at.num_key_value_groups
                weights = (keys[: m + 1, shared] @ query[head] * at.scaling).softmax(0)
                out[m, head] = weights @ values[: m + 1, shared]
        x = x + at.o_proj(torch.stack([out[group].mean(0).flatten() for group in groups]))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        all_keys.append(keys.transpose(0, 1))
        all_values.append(values.transpose(0, 1))
    return decoder.norm(x)[owner], all_keys, all_values


def by_hand(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for j in range(half):
        out[..., j] = x[..., j] * cos[j] - x[..., j + half] * sin[j]
        out[..., j + half] = x[..., j + half] * cos[j] + x[..., j] * sin[j]
    return out
