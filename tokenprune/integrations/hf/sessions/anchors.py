# SPDX-License-Identifier: Apache-2.0
"""Move the positions of a session down: close the gaps between entries, and rotate the cached keys to match.

Keys are rotated in float32 by the difference of two integer positions. Logits do not change if all entries and the next
position move by the same amount. They change if a gap is closed, because older entries move closer to newer ones.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from tokenprune.errors import UnsupportedModelError
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.sessions.memory import FRAME, POSITION, Memory

_KINDS = ("default", "linear", "llama3")  # rotation angles are proportional to the position


def check_reanchor(adapter: Adapter, reanchor: bool | None) -> str | None:
    """Return the reason why positions cannot move down at the horizon, or None if they can.

    Args:
        adapter: Adapter of the model.
        reanchor: The `reanchor=` argument of `session`. None: move down if the model supports it.

    Raises:
        UnsupportedModelError: If `reanchor` is True, and the model does not support it.
    """
    if reanchor is False:
        return "reanchor=False"
    reason = _check_rotary(adapter)
    if reason is not None and reanchor:
        raise UnsupportedModelError(f"{reason}. Leave out reanchor=True, and call reset() at the last position.")
    return reason


def _check_rotary(adapter: Adapter) -> str | None:
    """Return the reason why the cached keys of a model cannot be rotated, or None if they can."""
    decoder, config = adapter.decoder, adapter.text_config
    rotary: Any = getattr(decoder, "rotary_emb", None)
    rotate_half = getattr(sys.modules.get(type(decoder).__module__), "rotate_half", None)
    kind = getattr(rotary, "rope_type", None)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if (
        rotate_half is None
        or kind not in _KINDS
        or rotary.attention_scaling != 1
        or not _rotates_halves(rotate_half, width)
    ):
        reason = f"its rotary positions are of kind {kind!r}"
    elif 2 * rotary.inv_freq.numel() != width:
        reason = "they rotate only a part of each key"
    else:
        return None
    return f"positions of {adapter.config.model_type!r} cannot be moved down: {reason}"


def _rotates_halves(rotate_half: Any, width: int) -> bool:
    """Return whether a function pairs the two halves of a vector, not neighbouring elements."""
    values = torch.arange(width, dtype=torch.float32, device="cpu")
    return torch.equal(rotate_half(values), _rotate_half(values))


def _rotate_half(states: Tensor) -> Tensor:
    first, second = states.chunk(2, -1)
    return torch.cat([-second, first], -1)


def reanchor(memory: Memory, adapter: Adapter) -> int:
    """Move all entries of a memory down.

    Entries of one frame move together, and the newest entry of each head moves as far as the next position. The head
    with the widest span has no gap between frames afterwards. Other heads keep gaps after their oldest frames.

    Returns:
        The distance by which the next position moves.
    """
    if not memory.held:
        return 0
    gaps_of: dict[int, Tensor] = {id(table): _count_gaps(table) for table in memory.tables}
    down = min(int(gaps[..., -1].min()) for gaps in gaps_of.values())
    if down == 0:
        return 0
    tables: dict[int, Tensor] = {}
    rotations: dict[int, tuple[Tensor, Tensor]] = {}
    for row, index in enumerate(memory.full_layers):
        table, layer = memory.tables[row], memory.cache.layers[index]
        if id(table) not in tables:
            gaps = gaps_of[id(table)]
            moved = gaps[:, -1:] - gaps - down  # older entries move less, by the gaps that are closed after them
            new_table = table.clone()
            new_table[POSITION:] += moved.to(new_table.dtype)
            tables[id(table)] = new_table
            rotations[id(table)] = _compute_rotation(adapter, (new_table - table)[POSITION:], layer.keys)
        memory.tables[row] = tables[id(table)]
        cos, sin = rotations[id(table)]
        keys = layer.keys[0].float()
        layer.keys = (keys * cos + _rotate_half(keys) * sin).to(layer.keys.dtype)[None]
    return down


def _count_gaps(table: Tensor) -> Tensor:
    """Count the unused positions before the frame of each entry, or before a text entry, shape (heads, entries)."""
    frame, positions = table[FRAME], table[POSITION:].long()
    low, high = positions.amin(0), positions.amax(0)
    is_first = torch.ones_like(frame, dtype=torch.bool)
    is_first[:, 1:] = (frame[:, 1:] != frame[:, :-1]) | (frame[:, 1:] < 0)
    group = is_first.long().cumsum(1) - 1  # (heads, entries)
    count = int(group.max()) + 1
    lows = low.new_full((len(low), count), torch.iinfo(torch.long).max).scatter_reduce(1, group, low, "amin")
    highs = high.new_full((len(high), count), -1).scatter_reduce(1, group, high, "amax")
    previous = torch.cat([highs.new_full((len(highs), 1), -1), highs.cummax(1).values[:, :-1]], 1)
    # A head can hold fewer frames than another head: its missing groups are not gaps.
    gaps = (lows - previous - 1).clamp(min=0) * (highs >= 0)
    return gaps.cumsum(1).gather(1, group)


def _compute_rotation(adapter: Adapter, moved: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines that rotate keys by `moved` positions.

    Args:
        adapter: Adapter of the model.
        moved: Distances, shape (axes, heads or 1, entries).
        keys: Any keys, for the device.

    Returns:
        Two float32 tensors, shape (heads or 1, entries, head width).
    """
    moved = moved.long()
    cos, sin = adapter.decoder.rotary_emb(keys.float(), moved if len(moved) > 1 else moved[0])
    return cos, sin
