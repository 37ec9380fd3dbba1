# SPDX-License-Identifier: Apache-2.0
"""Towers that merge in a known way, and the exact form of virtual token unmerging.

The exact form follows the paper (DyMU, arXiv 2504.17040, equation 10). A rotary embedding rotates the pair (x1, x2) of
a query or key at position t by the angle theta t, where each pair has its own theta. The score of positions m and n is

    sum over pairs of  (q1 k1 + q2 k2) cos(theta (t_m - t_n)) + (q1 k2 - q2 k1) sin(theta (t_m - t_n)).

The products depend only on the merged tokens of m and n, so there are W x W of them. The angles differ between
positions and pairs, so the sum is taken over L x L positions, one pair at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.integrations.hf.attention.virtual_unmerging import Unmerged, VirtualUnmerging
from tokenprune.integrations.hf.attention_observer import Tap
from tokenprune.integrations.hf.sequence.masks import build_causal_mask
from tokenprune.integrations.shared.attachment import get_attachment
from tokenprune.methods.encoder.tome import ToMe


@dataclass(frozen=True)
class Merging(ToMe):
    """Minimal merging method with the `vtu` option."""

    vtu: str = "expanded"


@torch.no_grad()
def naive_decoder(
    decoder: Any, embeds: Tensor, positions: Tensor, groups: list[list[int]]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Run one row as specified and return the last hidden states `[L, D]` and the keys and values of each layer."""
    owner = torch.empty(len(embeds), dtype=torch.long)
    for group_index, group in enumerate(groups):
        owner[group] = group_index
    x = torch.stack([embeds[group].mean(0) for group in groups])
    positions = positions[None] if positions.ndim == 1 else positions[:, None]  # position ids with three axes
    cos, sin = (part[0] for part in decoder.rotary_emb(embeds[None], positions))
    all_keys, all_values = [], []
    for layer in decoder.layers:
        attention = layer.self_attn
        h, heads = layer.input_layernorm(x), attention.config.num_attention_heads
        q, k, v = (
            p(h).view(len(h), -1, attention.head_dim) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        keys = torch.stack([rotate_by_loop(k[owner[n]], cos[n], sin[n]) for n in range(len(embeds))])
        values = torch.stack([v[owner[n]] for n in range(len(embeds))])
        out = torch.empty(len(embeds), heads, attention.head_dim)
        for m in range(len(embeds)):
            query = rotate_by_loop(q[owner[m]], cos[m], sin[m])
            for head in range(heads):
                shared = head // attention.num_key_value_groups
                weights = (keys[: m + 1, shared] @ query[head] * attention.scaling).softmax(0)
                out[m, head] = weights @ values[: m + 1, shared]
        x = x + attention.o_proj(torch.stack([out[group].mean(0).flatten() for group in groups]))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        all_keys.append(keys.transpose(0, 1))
        all_values.append(values.transpose(0, 1))
    return decoder.norm(x)[owner], all_keys, all_values


def rotate_by_loop(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for j in range(half):
        out[..., j] = x[..., j] * cos[j] - x[..., j + half] * sin[j]
        out[..., j + half] = x[..., j + half] * cos[j] + x[..., j] * sin[j]
    return out


@contextmanager
def exact_attention(model: Any) -> Iterator[None]:
    """Compute the attention of a model patched with `vtu="expanded"` by equation 10 within this context.

    For decoders that rotate one half of a head against the other, by one angle per position and pair, with sdpa or
    eager attention and a dynamic cache.
    """
    (part,) = (candidate for candidate in get_attachment(model).engine.parts if isinstance(candidate, VirtualUnmerging))
    with ExitStack() as stack:
        for module in part.modules:
            tap = _Exact(module, part)
            tap.attach()
            stack.callback(tap.detach)
            stack.callback(module.register_forward_pre_hook(tap.enter, with_kwargs=True).remove)
        yield


class _Exact(Tap):
    def __init__(self, module: nn.Module, part: VirtualUnmerging) -> None:
        super().__init__(module)
        self.part = part
        self.rotary: tuple[Tensor, Tensor] = ()

    def enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.rotary = kwargs["position_embeddings"]

    def compute(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None] | None:
        state = self.part.state()
        if state is None:
            return None
        return _attend(state, self.rotary, self.module, query, key, value, attention_mask, **kwargs)


def _attend(
    state: Unmerged,
    rotary: tuple[Tensor, Tensor],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention of L queries, with the signature of a transformers attention function.

    query: `[B, H, L, Dh]`; key, value: `[B, Hkv, P + L, Dh]`, rotated, the last L from this call; mask: bool or
    additive `[B or 1, 1 or H, L, P + L]`, None for a causal mask. Returns `[B, L, H, Dh]`.
    """
    assert kwargs.get("s_aux") is None and kwargs.get("softcap") is None
    length, past = query.shape[2], key.shape[2] - query.shape[2]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    groups = query.shape[1] // key.shape[1]
    q, k, v = query.float(), *(x.float().repeat_interleave(groups, dim=1) for x in (key, value))
    cos, sin = (x.float().expand(query.shape[0], -1, -1).unsqueeze(1) for x in rotary)  # `[B, 1, L, Dr]`
    merged, slot = state.layout.index.to(query.device), state.slot.to(query.device)
    q_merged, k_merged = (_unrotated(x, cos, sin, merged, slot) for x in (q, k[:, :, past:]))
    scores = rotary_scores(q_merged, k_merged, cos, sin, slot)
    scores = torch.cat([q @ k[:, :, :past].transpose(2, 3), scores], dim=-1) * scaling
    if attention_mask is None:
        positions = torch.arange(key.shape[2], device=key.device).expand(len(key), -1)
        attention_mask = build_causal_mask(positions[:, -length:], positions, "sdpa", query.dtype)
    attention_mask = attention_mask[..., : past + length]
    if attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + attention_mask.float()
    weights = nn.functional.dropout(scores.softmax(dim=-1), dropout, module.training)
    # Positions that share a merged token share its value.
    columns = slot[:, None, None, :].expand_as(weights[..., past:])
    shared = weights.new_zeros(*weights.shape[:3], merged.shape[1]).scatter_add(3, columns, weights[..., past:])
    output = weights[..., :past] @ v[:, :, :past] + shared @ _tokens(v[:, :, past:], merged)
    return output.transpose(1, 2).to(query.dtype).contiguous(), None


def _tokens(x: Tensor, index: Tensor) -> Tensor:
    """Gather `[B, H, L, D]` -> `[B, H, W, D]`; index: long `[B, W]`."""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _unrotated(x: Tensor, cos: Tensor, sin: Tensor, merged: Tensor, slot: Tensor) -> Tensor:
    """Undo the rotation: `[B, H, L, Dh]` queries or keys -> `[B, H, W, Dh]` of the merged tokens."""
    angles = _tokens(cos, merged), _tokens(sin, merged)
    # Some rotary embeddings also scale the rotated channels.
    unrotated = rotate(_tokens(x, merged), angles[0], -angles[1], scale=1 / (angles[0] ** 2 + angles[1] ** 2))
    # Families differ in the channels they rotate, and some layers rotate none; the angles do not show this. Check it:
    # the token of a group, rotated to each of its positions, must give the input again.
    half, turned = cos.shape[-1] // 2, cos.shape[-1]
    error = (rotate(_tokens(unrotated, slot), cos, sin) - x)[..., :turned]
    assert (_pair_norms(error, half) <= 0.05 * _pair_norms(x[..., :turned], half) + 1e-6).all(), "other angles"
    return unrotated


def _pair_norms(x: Tensor, half: int) -> Tensor:
    return torch.hypot(x[..., :half], x[..., half:])


def rotate(x: Tensor, cos: Tensor, sin: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """Rotate queries or keys `[B, H, N, Dh]` by angles `[B, 1, N, Dr]`. Channels after Dr do not change."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([(turned * cos + torch.cat([-second, first], dim=-1) * sin) * scale, rest], dim=-1)


def rotary_scores(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, slot: Tensor) -> Tensor:
    """Return `[B, H, L, L]`: for each pair of positions, the product of the rotated query and key of their tokens.

    query, key: `[B, H, W, Dh]`, not rotated. cos, sin: `[B, 1, L, Dr]`. slot: long `[B, L]`, the token of each
    position.
    """
    batch, heads, width, _ = query.shape
    rows = slot[:, None, :, None].expand(batch, heads, -1, width)
    columns = slot[:, None, None, :].expand(batch, heads, slot.shape[1], -1)

    def expand(products: Tensor) -> Tensor:
        return products.gather(2, rows).gather(3, columns)

    def outer(x: Tensor, y: Tensor) -> Tensor:
        return x[..., :, None] * y[..., None, :]

    turned, half = cos.shape[-1], cos.shape[-1] // 2
    scores = expand(query[..., turned:] @ key[..., turned:].transpose(2, 3))
    for pair in range(half):
        q1, q2, k1, k2 = (x[..., channel] for x in (query, key) for channel in (pair, pair + half))
        c, s = cos[..., pair], sin[..., pair]
        scores = scores + expand(outer(q1, k1) + outer(q2, k2)) * (outer(c, c) + outer(s, s))
        scores = scores + expand(outer(q1, k2) - outer(q2, k1)) * (outer(s, c) - outer(c, s))
    return scores


# The library's attention and equation 10 of the paper.
FORMS = {"expanded": lambda model: nullcontext(), "exact": exact_attention}
