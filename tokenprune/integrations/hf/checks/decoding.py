# SPDX-License-Identifier: Apache-2.0
"""Check the set-ups in which a method can drop tokens while decoding."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import Cache

from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.integrations.hf.cache.layer_storage import is_offloaded, is_quantized
from tokenprune.integrations.hf.sequence.masks import sliding_layers
from tokenprune.sites.decode import DecodeMethod


def check(method: Any, others: int) -> None:
    """Raise OptionError if `method` cannot act while decoding in this model. others: methods of that site beside it."""
    if not isinstance(method, DecodeMethod):
        raise OptionError(f"{method.name}: a method at the site DECODE must derive from tokenprune.extend.DecodeMethod")
    if others:
        raise OptionError(f"{method.name}: only one of the composed methods can act while decoding")


def check_setup(method: DecodeMethod, config: Any, batch: int) -> None:
    """Raise UnsupportedSetupError where a sliding window hides how long each row is."""
    sliding = any(layer >= method.layer for layer in sliding_layers(config))
    if method.mode == "evict" and sliding and batch > 1 and "flash" in config._attn_implementation:
        raise UnsupportedSetupError(
            f"{method.name}: mode='evict' with several rows, sliding-window layers and flash attention at once: flash "
            "kernels cannot leave out single slots of a window; use mode='mask', one row at a time, or sdpa"
        )


def check_cache(method: DecodeMethod, cache: Cache) -> None:
    """Raise UnsupportedSetupError where a method would take keys out of a cache that does not hold them as they are."""
    if method.mode != "evict":
        return
    quantized = any(is_quantized(layer) for layer in cache.layers)
    if quantized or is_offloaded(cache):
        kind = "a quantized" if quantized else "an offloaded"
        raise UnsupportedSetupError(
            f"{method.name}: mode='evict' takes keys out of the cache while decoding, which cannot be done with {kind} "
            "one; use mode='mask', which hides them, or a dynamic cache"
        )
