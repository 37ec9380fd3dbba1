# SPDX-License-Identifier: Apache-2.0
"""Views of the decoder's cache for one call: a growing cache, or a static cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, StaticLayer

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.cache import reduced_cache
from tokenprune.integrations.hf.cache.layer_storage import count_slots
from tokenprune.integrations.hf.cache.reduced_cache import DecodeMemory, Reduction, count_cached_slots, get_reduction
from tokenprune.integrations.hf.cache.static_cache import (
    KeySpan,
    ReducedStatic,
    StaticReduction,
    find_filled_span,
    find_span,
    is_static,
    limit_slots,
    slice_keys,
)
from tokenprune.integrations.hf.sequence import masks

# Logical positions of the slots of each group of layers; see `Reduction`.
Slots = list[tuple[int, Tensor]]


class CacheView:
    """The cache of a call. This class serves growing caches and calls without a cache.

    Attributes:
        cache: The cache, or None.
        past: Logical length before the call.
        reduction: Positions that the cache holds, or None if it is complete.
        decode: State of a method that drops tokens during decoding, or None. A call may replace it.
        capacity: Capacity of a static cache, or None.
    """

    capacity: int | None = None

    def __init__(self, cache: Cache | None) -> None:
        self.cache = cache
        self.reduction: Reduction | None = get_reduction(cache)
        self.decode: DecodeMemory | None = None if self.reduction is None else self.reduction.decode
        self.past = 0 if cache is None else int(cache.get_seq_length())

    def padding(self, mask: Any, length: int) -> Tensor | None:
        """Return the padding mask of the call's tokens, shape (batch, length), bool, or None if the caller's `mask` has
        none."""
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            return None
        return ~mask[:, -length:].bool()

    # -- keys of a layer
    # width: Number of the call's tokens in the layer.
    # shared: Number of another layer's keys that it attends to, or None.

    def key_span(self, layer: int, width: int, shared: int | None) -> KeySpan:
        """Return the keys that `layer` will attend to."""
        if shared is not None:
            return KeySpan(-shared, None, shared)
        # Without a cache, or before the first run of a layer, it sees only the tokens of this call.
        cached = count_cached_slots(self.cache, layer) or 0
        if cached and self.reduction is not None:
            _check_cached(self.reduction, self.cache, layer, cached)
        keys = cached + width
        return KeySpan(-keys, None, keys)

    def known_span(self, layer: int, width: int, shared: int | None) -> KeySpan:
        """Return `key_span` without the slots of later tokens."""
        return self.key_span(layer, width, shared)

    def past_keys(self, layer: int, width: int, read_keys: Callable[[int, Any], Tensor]) -> Tensor | None:
        """Return the cached keys that `layer` will attend to, or None without any.

        Args:
            layer: Index of the layer.
            width: Number of tokens of the call that the layer holds.
            read_keys: Returns all keys of a layer of a cache.

        Returns:
            Keys, shape (batch, heads, keys, channels).
        """
        count = count_cached_slots(self.cache, layer)
        return read_keys(layer, self.cache)[:, :, -count:] if count else None

    def count_filled(self, layer: int, width: int) -> int | None:
        """Return the number of keys of `layer` that are tokens, or None if all are."""
        return None

    # -- changes by a call

    def fit_slots(self, layer: int, slots: int) -> None:
        """Limit `layer` of a static cache to the slots that its group will fill."""

    def save(self, length: int, slots: Slots, ragged: bool) -> None:
        """Store a `Reduction` with these values on the cache after the call."""
        if self.cache is None or not any(map(count_slots, self.cache.layers)):
            return  # layers with gradient checkpointing cache no tokens
        self._attach(self.cache, length, slots, ragged)

    def _attach(self, cache: Cache, length: int, slots: Slots, ragged: bool) -> None:
        reduced_cache.attach(cache, Reduction(length, slots, ragged, self.decode))


class StaticView(CacheView):
    """View of a static cache, whose slots are allocated in advance.

    Attributes:
        original_slots: See `StaticReduction`.
    """

    capacity: int
    cache: Cache
    reduction: StaticReduction | None

    def __init__(self, cache: Cache) -> None:
        super().__init__(cache)
        if isinstance(cache, ReducedStatic):
            self.capacity, self.original_slots = (
                cache.tokenprune_reduction.capacity,
                cache.tokenprune_reduction.original_slots,
            )
        else:
            self.capacity = max(layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticLayer))
            self.original_slots = {}

    def padding(self, mask: Any, length: int) -> Tensor | None:
        return masks.read_padding(mask, self.past, length)

    def _held(self, layer: int) -> int:
        """Return the number of cached tokens of the group of `layer`."""
        return self.past if self.reduction is None else self.past - self.reduction.count_removed(layer)

    def key_span(self, layer: int, width: int, shared: int | None) -> KeySpan:
        return find_span(self.cache.layers[layer], self._held(layer), width)

    def known_span(self, layer: int, width: int, shared: int | None) -> KeySpan:
        return find_filled_span(self.cache.layers[layer], self._held(layer), width)

    def past_keys(self, layer: int, width: int, read_keys: Callable[[int, Any], Tensor]) -> Tensor | None:
        count = self.known_span(layer, width, None).slots - width
        return slice_keys(read_keys(layer, self.cache), self._held(layer))[:, :, -count:] if count else None

    def count_filled(self, layer: int, width: int) -> int:
        return self.known_span(layer, width, None).slots

    def fit_slots(self, layer: int, slots: int) -> None:
        original = limit_slots(self.cache.layers[layer], slots)
        if original is not None:
            self.original_slots[layer] = original

    def _attach(self, cache: Cache, length: int, slots: Slots, ragged: bool) -> None:
        reduction = StaticReduction(length, slots, ragged, self.decode, self.capacity, self.original_slots)
        reduced_cache.attach(cache, reduction, ReducedStatic)


def build_view(cache: Any) -> CacheView:
    """Return the view of a cache, or of a call without a cache."""
    return StaticView(cache) if cache is not None and is_static(cache) else CacheView(cache)


def _check_cached(reduction: Reduction, cache: Any, layer: int, cached: int) -> None:
    """Raise UnsupportedSetupError if another library has removed keys from a layer, and their positions are needed."""
    if getattr(cache.layers[layer], "is_sliding", False):
        return
    missing = reduction.get_slots(layer).shape[1] - cached
    if missing > 0 and (reduction.ragged or reduction.decode is not None):
        what = (
            "Methods that drop tokens during decoding" if reduction.decode is not None else "Rows of different lengths"
        )
        raise UnsupportedSetupError(
            f"{what} do not support other compression of the cache, which removed {missing} keys of decoder layer "
            f"{layer}. Generate one row at a time, with methods that act before or inside the decoder."
        )
