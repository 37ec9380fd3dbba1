# SPDX-License-Identifier: Apache-2.0
"""Views of the decoder's cache for one call: of a cache that grows, and of a static one."""

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
    """The cache of a call, and its questions to it. Here: of a cache that grows, or of a call without a cache.

    past: the logical length before the call. reduction: what is missing in the cache then, None if nothing is. decode:
    what the cache remembers for a method that acts while decoding; a call may set another one. capacity: how many
    tokens a static cache was made for, None for one that grows.
    """

    capacity: int | None = None

    def __init__(self, cache: Cache | None) -> None:
        self.cache = cache
        self.reduction: Reduction | None = get_reduction(cache)
        self.decode: DecodeMemory | None = None if self.reduction is None else self.reduction.decode
        self.past = 0 if cache is None else int(cache.get_seq_length())

    def padding(self, mask: Any, length: int) -> Tensor | None:
        """Return bool `[B, length]`, True at padding among the call's tokens, or None if `mask`, the caller's, tells of
        none."""
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            return None
        return ~mask[:, -length:].bool()

    # -- keys of a layer. width: tokens of the call that it holds; shared: keys of another layer that it attends to

    def key_span(self, layer: int, width: int, shared: int | None) -> KeySpan:
        """Return which columns of its group `layer` will attend to."""
        if shared is not None:
            return KeySpan(-shared, None, shared)
        # No cache, or a layer that has not run yet: it will see this call's tokens only.
        cached = count_cached_slots(self.cache, layer) or 0
        if cached and self.reduction is not None:
            _check_cached(self.reduction, self.cache, layer, cached)
        keys = cached + width
        return KeySpan(-keys, None, keys)

    def known_span(self, layer: int, width: int, shared: int | None) -> KeySpan:
        """Return `key_span` without the slots of tokens to come."""
        return self.key_span(layer, width, shared)

    def past_keys(self, layer: int, width: int, read_keys: Callable[[int, Any], Tensor]) -> Tensor | None:
        """Return the keys `[B, H, K, D]` that `layer` will attend to beside the call's own; None without any. read_keys:
        returns all keys that a layer of a cache hands out."""
        count = count_cached_slots(self.cache, layer)
        return read_keys(layer, self.cache)[:, :, -count:] if count else None

    def count_filled(self, layer: int, width: int) -> int | None:
        """Return how many of the keys that `layer` hands out are tokens; None where all are."""
        return None

    # -- what a call changes

    def fit_slots(self, layer: int, slots: int) -> None:
        """Let `layer` of a static cache have at most `slots`, those that its group will fill."""

    def save(self, length: int, slots: Slots, ragged: bool) -> None:
        """Note on the cache what it holds after the call; for the arguments see `Reduction`."""
        if self.cache is None or not any(map(count_slots, self.cache.layers)):
            return  # layers that are checkpointed cache nothing
        self._attach(self.cache, length, slots, ragged)

    def _attach(self, cache: Cache, length: int, slots: Slots, ragged: bool) -> None:
        reduced_cache.attach(cache, Reduction(length, slots, ragged, self.decode))


class StaticView(CacheView):
    """A static cache: its slots are there before the tokens.

    capacity: how many tokens it was made for. full: the slots that layers were made for which hold fewer.
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
        """Return how many tokens of the past the group of `layer` has."""
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
        full = limit_slots(self.cache.layers[layer], slots)
        if full is not None:
            self.original_slots[layer] = full

    def _attach(self, cache: Cache, length: int, slots: Slots, ragged: bool) -> None:
        found = StaticReduction(length, slots, ragged, self.decode, self.capacity, self.original_slots)
        reduced_cache.attach(cache, found, ReducedStatic)


def build_view(cache: Any) -> CacheView:
    """Return the view of a cache, or of none."""
    return StaticView(cache) if cache is not None and is_static(cache) else CacheView(cache)


def _check_cached(reduction: Reduction, cache: Any, layer: int, cached: int) -> None:
    """Raise UnsupportedSetupError where it matters which keys another library took out of a layer's cache."""
    if getattr(cache.layers[layer], "is_sliding", False):
        return
    missing = reduction.get_slots(layer).shape[1] - cached
    if missing > 0 and (reduction.ragged or reduction.decode is not None):
        why = "methods that drop while decoding" if reduction.decode is not None else "rows of different lengths"
        raise UnsupportedSetupError(
            f"{missing} keys of decoder layer {layer} were taken out of the cache by something else than this "
            f"patch, which does not know which ones: {why} cannot be combined with compression of the cache; "
            "generate one row at a time, with methods that drop before or inside the decoder"
        )
