# SPDX-License-Identifier: Apache-2.0
"""Check that tokens can be left out of a cache."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.cache.layer_storage import is_quantized
from tokenprune.integrations.hf.cache.static_cache import ReducedStatic

_KNOWN_LAYERS = {
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
    compat.LINEAR_LAYER,
    compat.EMPTY_LAYER,
}


def check(cache: Cache) -> None:
    """Raise UnsupportedSetupError if tokens cannot be left out of this kind of cache."""
    for layer in getattr(cache, "layers", []):
        if type(layer) not in _KNOWN_LAYERS and not is_quantized(layer):
            kind = type(layer).__name__
            known = "dynamic, static or quantized ones" if isinstance(layer, CacheLayerMixin) else "keys and values"
            raise UnsupportedSetupError(
                f"cannot prune with cache layers of kind {kind}: only caches of {known} can hold fewer tokens per "
                "layer; use a DynamicCache, or unpatch the model first"
            )


def check_static(cache: Cache, past: int) -> None:
    """Raise UnsupportedSetupError where tokens cannot be left out of a static cache that holds `past` tokens."""
    sliding: list[Any] = [layer for layer in cache.layers if getattr(layer, "is_sliding", False)]
    if sliding and len(sliding) == len(cache.layers):
        raise UnsupportedSetupError(
            "cannot prune with a static cache all of whose layers are sliding: it does not know for how many tokens it "
            "was made; leave out cache_implementation, or use a dynamic cache"
        )
    filled = past and any(past >= layer.max_cache_len for layer in sliding)
    if filled and not isinstance(cache, ReducedStatic):
        raise UnsupportedSetupError(
            "cannot prune the images of a later turn on a static cache whose sliding layers are full already; put "
            "images into the first turn, or use a dynamic cache"
        )
