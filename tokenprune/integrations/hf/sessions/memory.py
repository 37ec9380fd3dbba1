# SPDX-License-Identifier: Apache-2.0
"""The cache of a session, tables of its entries, and their compression by a policy."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from tokenprune.integrations.hf.cache.reduced_cache import get_reduction, restore
from tokenprune.integrations.hf.sessions.policies.base import Policy, PolicyView, check_choice

# Rows of a table. There is one POSITION row per axis. Text has frame and cell -1.
INDEX, FRAME, CELL, TOKEN, POSITION = range(5)


class Memory:
    """A growing cache, and a table of the entries of each layer with full attention.

    A table has shape (4 + axes, heads, entries), int32. `heads` is 1 if all heads hold the same entries. Layers with
    the same entries share one table. All tables have the same number of entries. Layers with a sliding window have no
    table, because they drop entries themselves.

    Args:
        config: Config of the decoder.
        axes: Number of position axes.
        device: Device of the tables.

    Attributes:
        cache: The cache of transformers.
        full_layers: Indices of the layers with full attention.
        sliding: Cache layers with a sliding window.
        tables: Table of each layer in `full_layers`.
        visual: Number of visual entries of each table.
    """

    def __init__(self, config: Any, axes: int, device: torch.device) -> None:
        self.cache: Any = DynamicCache(config=config)
        self.full_layers = [index for index, layer in enumerate(self.cache.layers) if not layer.is_sliding]
        self.sliding = [layer for layer in self.cache.layers if layer.is_sliding]
        self.tables = [torch.zeros(POSITION + axes, 1, 0, dtype=torch.int32, device=device)] * len(self.full_layers)
        self.visual = 0

    @property
    def held(self) -> int:
        """Number of entries of each layer with full attention, including text."""
        return self.tables[0].shape[-1]

    @property
    def bytes(self) -> int:
        """Bytes of all keys and values of the cache."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers if layer.is_initialized)

    def copy(self) -> Memory:
        """Return a memory that shares all tensors. A growing cache creates new tensors, so copies are independent."""
        memory = copy.copy(self)
        memory.cache = copy.copy(self.cache)
        memory.cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        memory.sliding = [layer for layer in memory.cache.layers if layer.is_sliding]
        memory.tables = list(self.tables)
        return memory

    def finish_forward(self, count: int) -> Tensor | None:
        """Return the indices of the tokens that a patched model cached, and turn its cache into an ordinary cache.

        Args:
            count: Number of tokens of the last forward.

        Returns:
            Indices, shape (cached tokens,), int64, or None if all tokens were cached.
        """
        reduction = get_reduction(self.cache)
        if reduction is None:
            return None
        (_, slots), *_ = reduction.slots  # all layers have the same slots, because cuts are before the decoder
        restore(self.cache)
        return slots[0, self.held :] - (reduction.length - count)

    def append(self, rows: Tensor) -> None:
        """Append the entries of a forward to the tables. `rows` has shape (4 + axes, entries), on any device."""
        rows = rows.to(self.tables[0])[:, None]
        grown: dict[int, Tensor] = {}
        for table in self.tables:
            if id(table) not in grown:
                grown[id(table)] = torch.cat([table, rows.expand(-1, table.shape[1], -1)], -1)
        self.tables = [grown[id(table)] for table in self.tables]
        self.visual += int((rows[FRAME] >= 0).sum())

    def restore(self, before: Memory) -> None:
        """Restore the cache to the state of the copy `before`."""
        for layer, old in zip(self.cache.layers, before.cache.layers, strict=True):
            vars(layer).update(vars(old))

    def compress(self, policy: Policy, keep: int, step: int, seed: int, rows: list[Tensor] | None = None) -> None:
        """Keep `keep` visual entries in each layer with full attention.

        Args:
            policy: Selects the entries.
            keep: Number of visual entries to keep.
            step: Number of earlier compressions.
            seed: Seed of the session.
            rows: Attention of the proxy question in each layer, shape (query heads, entries), if the policy needs it.

        Raises:
            SessionError: If the selection of the policy is not valid.
        """
        kept: Tensor | None = None
        for row, index in enumerate(self.full_layers):
            layer = self.cache.layers[index]
            if kept is None or not policy.shared:
                table, kept = self._select(policy, row, index, keep, step, seed, rows[row] if rows else None)
            layer.keys, layer.values = _gather(layer.keys[0], kept)[None], _gather(layer.values[0], kept)[None]
            self.tables[row] = table
        self.visual = keep
        for layer in self.sliding:  # sliding masks use differences of lengths, so all layers need the same length
            layer.cumulative_length = self.held

    def _select(
        self, policy: Policy, row: int, index: int, keep: int, step: int, seed: int, attention: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the new table of a layer, and the indices of its entries, shape (heads or 1, entries)."""
        table, layer = self.tables[row], self.cache.layers[index]
        text = table[FRAME] < 0  # (heads or 1, entries)
        order = text.long().argsort(dim=-1, stable=True)  # visual entries first, in order
        visual, text = order[:, : self.visual], order[:, self.visual :]
        visual_table = table.gather(-1, visual.expand(len(table), -1, -1)).long()
        view = PolicyView(
            keys=_gather(layer.keys[0], visual),
            values=_gather(layer.values[0], visual),
            frame=visual_table[FRAME],
            cell=visual_table[CELL],
            index=visual_table[INDEX],
            position=visual_table[POSITION:],
            layer=index,
            layers=len(self.cache.layers),
            step=step,
            seed=seed,
            proxy_attention=None if attention is None else _gather_attention(attention, visual),
        )
        chosen = policy.select(view, keep)
        check_choice(policy, chosen, view, keep)
        chosen = chosen.expand(max(len(visual), len(chosen)) if chosen.ndim > 1 else len(visual), -1)
        heads = len(chosen)
        kept = torch.cat([text.expand(heads, -1), visual.expand(heads, -1).gather(1, chosen)], 1).sort(1).values
        return table.expand(-1, heads, -1).gather(-1, kept.expand(len(table), -1, -1)), kept


def _gather(states: Tensor, indices: Tensor) -> Tensor:
    """Return the entries of `states`, shape (heads, entries, width), at `indices`, shape (heads or 1, kept)."""
    return states.gather(1, indices.expand(len(states), -1)[..., None].expand(-1, -1, states.shape[-1]))


def _gather_attention(attention: Tensor, visual: Tensor) -> Tensor:
    """Return attention, shape (query heads, entries), at the visual entries, shape (heads or 1, kept)."""
    return attention.gather(1, visual.repeat_interleave(len(attention) // len(visual), 0))
