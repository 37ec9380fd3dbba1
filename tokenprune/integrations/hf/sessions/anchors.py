# SPDX-License-Identifier: Apache-2.0
"""Move a session's positions down: close the gaps that entries left, and turn the cached keys to match.

Keys are turned by the difference of two positions, which are whole numbers, in float32. Moving all entries and the next
position by as much changes no logits; closing a gap does, since it brings what is older than the gap nearer.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from tokenprune.errors import UnsupportedModelError
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.sessions.memory import FRAME, POSITION, Memory

_KINDS = ("default", "linear", "llama3")  # angles that are in proportion to the position, whatever the length


def why_fixed(adapter: Adapter, wanted: bool | None) -> str | None:
    """Return why positions of a model stay at the horizon, in words; None where they move down.

    wanted: as a caller says it; None: where its cached keys can be turned. Raises UnsupportedModelError where they
    cannot, and must.
    """
    if wanted is False:
        return "reanchor=False"
    reason = _unturned(adapter)
    if reason is not None and wanted:
        raise UnsupportedModelError(f"{reason}: leave out reanchor=True, and call reset() at the last position")
    return reason


def _unturned(adapter: Adapter) -> str | None:
    """Return why the cached keys of a model cannot be turned to other positions, in words; None if they can."""
    decoder, config = adapter.decoder, adapter.text_config
    rotary: Any = getattr(decoder, "rotary_emb", None)
    half = getattr(sys.modules.get(type(decoder).__module__), "rotate_half", None)
    kind = getattr(rotary, "rope_type", None)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if half is None or kind not in _KINDS or rotary.attention_scaling != 1 or not _halves(half, width):
        reason = f"its rotary positions are of kind {kind!r}"
    elif 2 * rotary.inv_freq.numel() != width:
        reason = "they turn a part of each key alone"
    else:
        return None
    return f"positions of {adapter.config.model_type!r} cannot be moved down: {reason}"


def _halves(half: Any, width: int) -> bool:
    """Return whether a function turns the second half of a vector against the first, not neighbours."""
    numbers = torch.arange(width, dtype=torch.float32, device="cpu")
    return torch.equal(half(numbers), _half(numbers))


def _half(states: Tensor) -> Tensor:
    first, second = states.chunk(2, -1)
    return torch.cat([-second, first], -1)


def reanchor(memory: Memory, adapter: Adapter) -> int:
    """Move all entries of a memory down, and return by how much the next position moves.

    Entries of one frame move together, and the newest of each head by as much as the next position. In the head with
    the widest span no gap between frames is left; other heads keep gaps after their oldest frames.
    """
    if not memory.held:
        return 0
    closed: dict[int, Tensor] = {id(table): _closed(table) for table in memory.tables}
    down = min(int(gaps[..., -1].min()) for gaps in closed.values())
    if down == 0:
        return 0
    tables: dict[int, Tensor] = {}
    turns: dict[int, tuple[Tensor, Tensor]] = {}
    for place, index in enumerate(memory.full):
        table, layer = memory.tables[place], memory.cache.layers[index]
        if id(table) not in tables:
            gaps = closed[id(table)]
            moved = gaps[:, -1:] - gaps - down  # the newest by `down`, older ones also by the gaps after them
            made = table.clone()
            made[POSITION:] += moved.to(made.dtype)
            tables[id(table)] = made
            turns[id(table)] = _turn(adapter, (made - table)[POSITION:], layer.keys)
        memory.tables[place] = tables[id(table)]
        cos, sin = turns[id(table)]
        keys = layer.keys[0].float()
        layer.keys = (keys * cos + _half(keys) * sin).to(layer.keys.dtype)[None]
    return down


def _closed(table: Tensor) -> Tensor:
    """Return long `[H, n]`: of each entry, the positions in front of its frame (or of it, if it is text) that no entry
    holds."""
    frame, positions = table[FRAME], table[POSITION:].long()
    low, high = positions.amin(0), positions.amax(0)
    begins = torch.ones_like(frame, dtype=torch.bool)
    begins[:, 1:] = (frame[:, 1:] != frame[:, :-1]) | (frame[:, 1:] < 0)
    group = begins.long().cumsum(1) - 1  # [H, n]
    count = int(group.max()) + 1
    lows = low.new_full((len(low), count), torch.iinfo(torch.long).max).scatter_reduce(1, group, low, "amin")
    highs = high.new_full((len(high), count), -1).scatter_reduce(1, group, high, "amax")
    above = torch.cat([highs.new_full((len(highs), 1), -1), highs.cummax(1).values[:, :-1]], 1)
    # Heads may hold entries of fewer frames than others: groups that a head lacks leave no gap.
    gaps = (lows - above - 1).clamp(min=0) * (highs >= 0)
    return gaps.cumsum(1).gather(1, group)


def _turn(adapter: Adapter, moved: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, float32 `[H or 1, n, D]`, that turn keys by so many positions, `[A, H or 1, n]`."""
    moved = moved.long()
    cos, sin = adapter.decoder.rotary_emb(keys.float(), moved if len(moved) > 1 else moved[0])
    return cos, sin
