# SPDX-License-Identifier: Apache-2.0
"""The cache of a session, a table of the entries that each layer holds, and the compression by a policy."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from tokenprune.integrations.hf.cache.reduced_cache import get_reduction, restore
from tokenprune.integrations.hf.sessions.policies.base import Policy, PolicyView, check_choice

# Rows of a table; those from POSITION on are one for each axis of positions. Of text, frame and cell are -1.
INDEX, FRAME, CELL, TOKEN, POSITION = range(5)


class Memory:
    """A growing cache, and for each layer with full attention an int32 table `[4 + A, H, n]` of its n entries.

    H is 1 where all heads hold the same entries, and layers that hold the same share one table. All these layers hold
    as many entries, `visual` of which are of images. Layers with a sliding window bound themselves and have no table.
    """

    def __init__(self, config: Any, axes: int, device: torch.device) -> None:
        self.cache: Any = DynamicCache(config=config)
        self.full = [index for index, layer in enumerate(self.cache.layers) if not layer.is_sliding]
        self.sliding = [layer for layer in self.cache.layers if layer.is_sliding]
        self.tables = [torch.zeros(POSITION + axes, 1, 0, dtype=torch.int32, device=device)] * len(self.full)
        self.visual = 0

    @property
    def held(self) -> int:
        """The number of entries of each layer with full attention, text included."""
        return self.tables[0].shape[-1]

    @property
    def bytes(self) -> int:
        """The bytes of all keys and values that the cache hands out."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers if layer.is_initialized)

    def copy(self) -> Memory:
        """Return a memory that shares all tensors; neither changes those of the other, since a cache that grows makes
        new ones."""
        made = copy.copy(self)
        made.cache = copy.copy(self.cache)
        made.cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        made.sliding = [layer for layer in made.cache.layers if layer.is_sliding]
        made.tables = list(self.tables)
        return made

    def entered(self, count: int) -> Tensor | None:
        """Return which of the `count` tokens of the last forward are in the cache (long `[m]`), None for all, where the
        model is patched; the cache is an ordinary one again, whose masks are of what it holds."""
        reduction = get_reduction(self.cache)
        if reduction is None:
            return None
        (_, slots), *_ = reduction.slots  # one for all layers: cuts are at the decoder's entry
        restore(self.cache)
        return slots[0, self.held :] - (reduction.length - count)

    def append(self, rows: Tensor) -> None:
        """Note the entries that a forward has added. rows: `[4 + A, n]`, on the host or the device."""
        rows = rows.to(self.tables[0])[:, None]
        grown: dict[int, Tensor] = {}
        for table in self.tables:
            if id(table) not in grown:
                grown[id(table)] = torch.cat([table, rows.expand(-1, table.shape[1], -1)], -1)
        self.tables = [grown[id(table)] for table in self.tables]
        self.visual += int((rows[FRAME] >= 0).sum())

    def take_back(self, before: Memory) -> None:
        """Have the cache hold what it held when `before` was copied of it."""
        for layer, old in zip(self.cache.layers, before.cache.layers, strict=True):
            vars(layer).update(vars(old))

    def compress(self, policy: Policy, keep: int, step: int, seed: int, rows: list[Tensor] | None = None) -> None:
        """Leave `keep` visual entries in each layer with full attention; raises SessionError for a policy that chooses
        otherwise. rows: a proxy's attention in each of them, `[Hq, n]`, if the policy needs it."""
        kept: Tensor | None = None
        for place, index in enumerate(self.full):
            layer = self.cache.layers[index]
            if kept is None or not policy.shared:
                table, kept = self._choose(policy, place, index, keep, step, seed, rows[place] if rows else None)
            layer.keys, layer.values = _gather(layer.keys[0], kept)[None], _gather(layer.values[0], kept)[None]
            self.tables[place] = table
        self.visual = keep
        for layer in self.sliding:  # masks there take differences of lengths: let all layers agree on one
            layer.cumulative_length = self.held

    def _choose(
        self, policy: Policy, place: int, index: int, keep: int, step: int, seed: int, row: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the table of what stays in a layer, and its places: long `[H or 1, m]`."""
        table, layer = self.tables[place], self.cache.layers[index]
        text = table[FRAME] < 0  # [H or 1, n]
        order = text.long().argsort(dim=-1, stable=True)  # visual entries first, in order
        visual, text = order[:, : self.visual], order[:, self.visual :]
        shown = table.gather(-1, visual.expand(len(table), -1, -1)).long()
        view = PolicyView(
            keys=_gather(layer.keys[0], visual),
            values=_gather(layer.values[0], visual),
            frame=shown[FRAME],
            cell=shown[CELL],
            index=shown[INDEX],
            position=shown[POSITION:],
            layer=index,
            layers=len(self.cache.layers),
            step=step,
            seed=seed,
            proxy_attention=None if row is None else _of_visual(row, visual),
        )
        chosen = policy.select(view, keep)
        check_choice(policy, chosen, view, keep)
        chosen = chosen.expand(max(len(visual), len(chosen)) if chosen.ndim > 1 else len(visual), -1)
        heads = len(chosen)
        kept = torch.cat([text.expand(heads, -1), visual.expand(heads, -1).gather(1, chosen)], 1).sort(1).values
        return table.expand(-1, heads, -1).gather(-1, kept.expand(len(table), -1, -1)), kept


def _gather(states: Tensor, places: Tensor) -> Tensor:
    """Return the entries of `[H, n, D]` at `places`, long `[H or 1, m]`."""
    return states.gather(1, places.expand(len(states), -1)[..., None].expand(-1, -1, states.shape[-1]))


def _of_visual(row: Tensor, visual: Tensor) -> Tensor:
    """Return attention `[Hq, n]` at the visual entries, long `[H or 1, m]`, each KV head's for its query heads."""
    return row.gather(1, visual.repeat_interleave(len(row) // len(visual), 0))
