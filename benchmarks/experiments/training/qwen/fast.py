# SPDX-License-Identifier: Apache-2.0
"""The model's computation for batches of equal grids: the same values as its forward, in fewer steps.

Every function reads the weights of the Hugging Face modules, so no conversion is needed. tests/training compares both.
Matrix products may run in bfloat16 (autocast). The residual stream and the norms are float32.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F

from qwen_model import CELL, MERGE, PATCH, WINDOW

HALF = True  # whether training computes matrix products in bfloat16


def rms(x: torch.Tensor, norm: torch.nn.Module) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def to_patches(frames: torch.Tensor) -> torch.Tensor:
    """Convert pairs of frames, bytes (B, 2, H, W, 3), to the processor's patches, float32 (B, H*W/64, 3*2*8*8)."""
    b, t, height, width, c = frames.shape
    h, w = height // CELL, width // CELL
    x = frames.reshape(b, t, h, MERGE, PATCH, w, MERGE, PATCH, c).permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return x.reshape(b, h * w * MERGE * MERGE, c * t * PATCH * PATCH).float().div_(127.5).sub_(1)


@lru_cache(maxsize=512)
def layout(h: int, w: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return window indices of patches (padded), their inverse, the key mask and patch coordinates of an h x w grid."""
    side = WINDOW // CELL
    H, W = -(-h // side) * side, -(-w // side) * side
    indices = torch.full((H, W), -1)
    indices[:h, :w] = torch.arange(h * w).reshape(h, w)
    cells = indices.reshape(H // side, side, W // side, side).permute(0, 2, 1, 3).reshape(-1, side * side)
    patches = torch.where(cells[..., None] >= 0, cells[..., None] * 4 + torch.arange(4), -1).flatten(1)  # [windows, 64]
    inside = patches.flatten() >= 0
    back = torch.empty(h * w * 4, dtype=torch.long)
    back[patches.flatten()[inside]] = inside.nonzero().flatten()
    mask = None if bool(inside.all()) else (patches >= 0)
    rows = torch.arange(2 * h).reshape(h, 1, 2, 1).expand(h, w, 2, 2).flatten()
    columns = torch.arange(2 * w).reshape(1, w, 1, 2).expand(h, w, 2, 2).flatten()
    return patches.clamp(min=0), back, mask, torch.stack([rows, columns], 1)


def attend(q, k, v, mask=None):
    """Return attention, shape (B, heads, n, width). On a CPU, its gradient is faster than the fused kernel's."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e4)
    return scores.float().softmax(-1).to(v.dtype) @ v


def vision_full(x, block, cos, sin):
    b, n, d = x.shape
    attention = block.attn
    qkv = F.linear(rms(x, block.norm1), attention.qkv.weight, attention.qkv.bias)
    q, k, v = qkv.view(b, n, 3, attention.num_heads, -1).unbind(2)
    q, k = (rotate(t, cos, sin).to(v.dtype).transpose(1, 2) for t in (q, k))
    attended = attend(q, k, v.transpose(1, 2)).transpose(1, 2).reshape(b, n, d)
    return vision_rest(x, attended, block)


def vision_windows(x, block, cos, sin, patches, back, mask):
    b, n, d = x.shape
    attention = block.attn
    qkv = F.linear(rms(x, block.norm1), attention.qkv.weight, attention.qkv.bias)
    q, k, v = qkv.view(b, n, 3, attention.num_heads, -1).unbind(2)
    windows, size = patches.shape
    q, k = (rotate(t, cos, sin).to(v.dtype) for t in (q, k))
    q, k, v = (
        t[:, patches.flatten()].reshape(b * windows, size, attention.num_heads, -1).transpose(1, 2) for t in (q, k, v)
    )
    attended = attend(q, k, v, mask)
    attended = attended.transpose(1, 2).reshape(b, windows * size, d)[:, back]
    return vision_rest(x, attended, block)


def vision_rest(x, attended, block):
    x = x + F.linear(attended, block.attn.proj.weight, block.attn.proj.bias)
    y, mlp = rms(x, block.norm2), block.mlp
    gate = F.silu(F.linear(y, mlp.gate_proj.weight, mlp.gate_proj.bias))
    y = F.linear(gate * F.linear(y, mlp.up_proj.weight, mlp.up_proj.bias), mlp.down_proj.weight, mlp.down_proj.bias)
    return x + y


def decoder_layer(x, layer, cos, sin, mask):
    b, n, d = x.shape
    attention, y = layer.self_attn, rms(x, layer.input_layernorm)
    heads, width = attention.num_heads, attention.head_dim
    q = F.linear(y, attention.q_proj.weight, attention.q_proj.bias).view(b, n, heads, width)
    k = F.linear(y, attention.k_proj.weight, attention.k_proj.bias).view(b, n, -1, width)
    v = F.linear(y, attention.v_proj.weight, attention.v_proj.bias).view(b, n, -1, width)
    q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
    k, v = (t.repeat_interleave(heads // t.shape[2], 2).transpose(1, 2) for t in (k, v))
    attended = attend(q.transpose(1, 2), k, v, mask)
    x = x + F.linear(attended.transpose(1, 2).reshape(b, n, d), attention.o_proj.weight)
    y, mlp = rms(x, layer.post_attention_layernorm), layer.mlp
    gate = F.silu(F.linear(y, mlp.gate_proj.weight))
    return x + F.linear(gate * F.linear(y, mlp.up_proj.weight), mlp.down_proj.weight)


_functions = {"full": vision_full, "windows": vision_windows, "decoder": decoder_layer}


def compile_all() -> None:
    """Compile the functions between matrix products with inductor (needs a C++ compiler)."""
    torch._dynamo.config.cache_size_limit = 64
    for name, function in list(_functions.items()):
        _functions[name] = torch.compile(function, dynamic=True)


def tower(visual, patches: torch.Tensor, h: int, w: int) -> torch.Tensor:
    """Return visual tokens, float32 (B, h*w, 192), of patches, (B, h*w*4, 384), with equal grids."""
    gather, back, mask, coordinates = layout(h, w)
    angle = (coordinates[..., None].float() * visual.rotary_pos_emb.inv_freq).flatten(1)
    angle = torch.cat([angle, angle], -1)[None, :, None]
    cos, sin = angle.cos(), angle.sin()
    x = F.linear(patches, visual.patch_embed.proj.weight.flatten(1)).float()
    if mask is not None:
        mask = mask.repeat(len(x), 1)[:, None, None]
    for i, block in enumerate(visual.blocks):
        if i in visual.fullatt_block_indexes:
            x = _functions["full"](x, block, cos, sin)
        else:
            x = _functions["windows"](x, block, cos, sin, gather, back, mask)
    merger = visual.merger
    y = rms(x, merger.ln_q).view(len(x), h * w, -1)
    return merger.mlp(y).float()


def decode(language, embeds: torch.Tensor, position: torch.Tensor, mask: torch.Tensor, states: list | None = None):
    """Return final hidden states, shape (B, L, d).

    Args:
        language: The decoder.
        embeds: Input embeddings.
        position: Position ids, shape (3, B, L).
        mask: Boolean attention mask, shape (B, 1, L, L).
        states: List that collects the hidden states of each layer.
    """
    cos, sin = language.rotary_emb(embeds, position)
    cos, sin = cos[:, :, None], sin[:, :, None]
    x = embeds
    for layer in language.layers:
        x = _functions["decoder"](x, layer, cos, sin, mask)
        if states is not None:
            states.append(x)
    return rms(x, language.norm)
