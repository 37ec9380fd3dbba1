# SPDX-License-Identifier: Apache-2.0
"""Static caches with dropped tokens.

A static layer allocates all slots at its first token. Each group of layers has a table with the logical position of
each slot, shape (batch, slots), int64, including later tokens, which causality hides. The table is constant during
decoding, so a decoding step can be compiled.
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
    """Keys that a layer attends to: the group's columns from `start` to `stop`, padded by empty slots to `slots`."""

    start: int | None
    stop: int | None
    slots: int

    def select(self, columns: Tensor) -> Tensor:
        """Return the logical positions of the keys, shape (batch, slots), int64, -1 for empty slots."""
        selected = columns[:, self.start : self.stop]
        missing = self.slots - selected.shape[1]
        return selected if not missing else torch.nn.functional.pad(selected, (0, missing), value=-1)


@dataclass
class StaticReduction(Reduction):
    """Logical positions of the slots of a static cache.

    Attributes:
        capacity: Number of tokens that the cache was created for.
        original_slots: Original number of slots of the layers that got fewer slots.
    """

    capacity: int = 0
    original_slots: dict[int, int] = field(default_factory=dict)

    def count_removed(self, layer: int) -> int:
        """Return the number of cached tokens that `layer` does not hold."""
        return self.capacity - self.get_slots(layer).shape[1]

    def get_past_slots(self, layer: int, past: int) -> Tensor:
        return self.get_slots(layer)[:, : past - self.count_removed(layer)]


class ReducedStatic(Reduced):
    """Mixin for static caches. It reports logical lengths, as tensors if the original class does."""

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
    """Return True if a cache has a fixed number of slots."""
    return any(map(_has_slots, map(type, getattr(cache, "layers", ()))))


@functools.cache
def _has_slots(kind: type) -> bool:
    return issubclass(kind, StaticLayer)  # isinstance with an abstract class would run Python code for each instance


def needs_only_masks(arguments: dict[str, Any]) -> bool:
    """Return True for a forward with a reduced static cache and without images, which needs only other masks.

    torch.compile traces this function.
    """
    if not isinstance(arguments.get(compat.CACHE), ReducedStatic):
        return False
    # Arguments are filtered by name first, because torch.compile guards the shapes of all values that are read.
    images = [name for name in arguments if name.startswith(("pixel_values", "mm_encoder_outputs"))]
    return all(arguments[name] is None for name in images)


# -- the slots of a layer


def limit_slots(layer: Any, slots: int) -> int | None:
    """Limit the slots of a static layer that is not allocated yet. Return its original number, or None if unchanged."""
    if layer.is_initialized or layer.max_cache_len <= slots:
        return None
    original, layer.max_cache_len = layer.max_cache_len, slots
    return original


def restore_slots(layer: Any, slots: int) -> None:
    """Make an emptied layer allocate `slots` again."""
    layer.max_cache_len, layer.is_initialized = slots, False
    layer.keys = layer.values = None


def find_span(layer: Any, num_held: int, width: int) -> KeySpan:
    """Return the keys that a static layer attends to.

    Args:
        layer: The cache layer. A sliding layer has overwritten its oldest tokens.
        num_held: Number of cached tokens of the layer's group.
        width: Number of tokens of the call.
    """
    slots = layer.max_cache_len
    if not layer.is_sliding:
        return KeySpan(0, slots, slots)
    if num_held >= slots:
        return KeySpan(num_held + 1 - slots, num_held + width, slots - 1 + width)
    if num_held + width > slots:
        return KeySpan(0, num_held + width, num_held + width)
    return KeySpan(0, slots, slots)


def find_filled_span(layer: Any, num_held: int, width: int) -> KeySpan:
    """Return `find_span` without the slots of later tokens."""
    start = find_span(layer, num_held, width).start or 0
    return KeySpan(start, num_held + width, num_held + width - start)


def slice_keys(keys: Tensor, num_held: int) -> Tensor:
    """Return the filled slots of a static layer's keys, shape (batch, heads, slots, channels)."""
    return keys[:, :, : min(num_held, keys.shape[2])]
