# SPDX-License-Identifier: Apache-2.0
"""Static caches that hold fewer tokens than the caller thinks.

The slots of a static layer are all there from its first token on. Each group of layers has a table, long `[B, P]`: the
logical position of each slot, of the tokens that it holds and of those to come, which causality hides until they are
there. So nothing has to be counted while decoding, and a compiled step finds a constant.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.cache.reduced_cache import Reduced, Reduction, restore


class KeySpan(NamedTuple):
    """Columns of a group that are the keys that a layer attends to: from `start` to before `stop`, and empty slots
    after them up to `slots` in all."""

    start: int | None
    stop: int | None
    slots: int

    def select(self, columns: Tensor) -> Tensor:
        """long `[B, slots]`: the logical positions of a layer's keys, -1 = empty. columns: those of its group."""
        found = columns[:, self.start : self.stop]
        missing = self.slots - found.shape[1]
        return found if not missing else torch.nn.functional.pad(found, (0, missing), value=-1)


@dataclass
class StaticReduction(Reduction):
    """Logical positions that the layers of a static cache hold; `slots` are the groups' tables.

    capacity: how many tokens the cache was made for. full: the slots that layers were made for which hold fewer.
    """

    capacity: int = 0
    original_slots: dict[int, int] = field(default_factory=dict)

    def count_removed(self, layer: int) -> int:
        """Return how many tokens of the past `layer` does not hold."""
        return self.capacity - self.get_slots(layer).shape[1]

    def get_past_slots(self, layer: int, past: int) -> Tensor:
        return self.get_slots(layer)[:, : past - self.count_removed(layer)]


class ReducedStatic(Reduced):
    """Put in front of a static cache's own class: it tells the caller's lengths, as tensors where its own are."""

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return super().get_seq_length(layer_idx) + self.tokenprune_reduction.count_removed(layer_idx)

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.tokenprune_reduction.capacity, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.tokenprune_reduction.capacity

    def reset(self) -> None:
        super().reset()
        for layer, slots in self.tokenprune_reduction.original_slots.items():
            restore_slots(self.layers[layer], slots)
        restore(self)


def is_static(cache: Any) -> bool:
    """Return whether a cache has slots for a number of tokens that is fixed."""
    return any(map(_has_slots, map(type, getattr(cache, "layers", ()))))


@functools.cache
def _has_slots(kind: type) -> bool:
    return issubclass(kind, StaticLayer)  # abstract: an instance is looked up in Python each time


def needs_only_masks(arguments: dict[str, Any]) -> bool:
    """Return True if a forward with `arguments` goes on with a reduced cache and brings no images: nothing but its
    masks is another one. torch.compile traces this."""
    if not isinstance(arguments.get(compat.CACHE), ReducedStatic):
        return False
    # By name first: torch.compile would guard the shapes of all that is looked at.
    images = [name for name in arguments if name.startswith(("pixel_values", "mm_encoder_outputs"))]
    return all(arguments[name] is None for name in images)


# -- the slots of a layer


def limit_slots(layer: Any, slots: int) -> int | None:
    """Let a static layer that is not laid out yet have at most `slots`; return how many it was to have, None where
    nothing changed."""
    if layer.is_initialized or layer.max_cache_len <= slots:
        return None
    full, layer.max_cache_len = layer.max_cache_len, slots
    return full


def restore_slots(layer: Any, slots: int) -> None:
    """Let a layer, which was just emptied, be laid out anew with `slots`."""
    layer.max_cache_len, layer.is_initialized = slots, False
    layer.keys = layer.values = None


def find_span(layer: Any, held: int, width: int) -> KeySpan:
    """Return which columns of its group a static layer attends to, when `width` tokens come to the `held` that its
    group has (a sliding layer threw the oldest of them away)."""
    slots = layer.max_cache_len
    if not layer.is_sliding:
        return KeySpan(0, slots, slots)
    if held >= slots:
        return KeySpan(held + 1 - slots, held + width, slots - 1 + width)
    if held + width > slots:
        return KeySpan(0, held + width, held + width)
    return KeySpan(0, slots, slots)


def find_filled_span(layer: Any, held: int, width: int) -> KeySpan:
    """Return `find_span` without the slots of tokens to come."""
    start = find_span(layer, held, width).start or 0
    return KeySpan(start, held + width, held + width - start)


def slice_keys(keys: Tensor, held: int) -> Tensor:
    """Return those of a static layer's keys `[B, H, slots, D]` that are tokens. held: by its group."""
    return keys[:, :, : min(held, keys.shape[2])]
