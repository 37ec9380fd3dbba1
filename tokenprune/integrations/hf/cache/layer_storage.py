# SPDX-License-Identifier: Apache-2.0
"""Read the states that one layer of a cache stores: in full, quantized, or on the host between two steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from tokenprune.integrations.hf import compat

# Of abstract classes, of which an instance would be looked up in Python each time.
_quantizes: Callable[[type], bool] = functools.cache(lambda kind: issubclass(kind, compat.QUANTIZED_LAYERS))


def is_quantized(layer: Any) -> bool:
    """Return whether a layer of a cache stores its keys and values quantized."""
    return _quantizes(type(layer))


def is_offloaded(cache: Any) -> bool:
    """Return whether layers of a cache lie on the host while they are not used."""
    return getattr(cache, "offloading", False)


def count_slots(layer: Any) -> int:
    """Return how many physical slots a layer of a cache hands out beside the tokens of a call.

    A sliding layer that records its past holds more of them until it is cropped: those that it would otherwise have
    thrown away, so that drafts can be taken back.
    """
    if _quantizes(type(layer)):
        return layer.cumulative_length
    keys = getattr(layer, "keys", None)
    held = 0 if keys is None or 0 in keys.shape else keys.shape[-2]
    asked = type(layer) is not DynamicLayer  # most are
    records = asked and getattr(layer, "record_past", False) and getattr(layer, "is_sliding", False)
    return min(held, layer.sliding_window - 1) if records else held


def count_layer_bytes(layer: Any, slots: int) -> int:
    """Return the bytes of the `slots` that a layer hands out, as they are stored: scales and zero points of quantized
    ones count, what is kept until the next crop only does not."""
    if _quantizes(type(layer)):
        parts = (layer.keys, layer.values, layer._quantized_keys, layer._quantized_values)
        return sum(_bytes(part) for part in parts)
    held = layer.keys.shape[-2]
    return (layer.keys.nbytes + layer.values.nbytes) * slots // held if held else 0


def _bytes(value: Any) -> int:
    """Bytes of all tensors of a (nested) value; a tensor may itself be made of others, as quantized ones are."""
    if isinstance(value, Tensor):
        parts = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
        return sum(_bytes(getattr(value, name)) for name in parts) if parts else value.nbytes
    if isinstance(value, dict):
        return sum(_bytes(part) for part in value.values())
    return sum(_bytes(part) for part in value) if isinstance(value, (tuple, list)) else 0


def read_keys(cache: Cache, layer: int) -> Tensor:
    """Return the keys `[B, H, K, D]` that a layer holds, on the device of its call and in its dtype."""
    return _states(cache, layer, "keys")


def read_values(cache: Cache, layer: int) -> Tensor:
    """Return the values `[B, H, K, D]` that a layer holds, on the device of its call and in its dtype."""
    return _states(cache, layer, "values")


def _states(cache: Cache, index: int, name: str) -> Tensor:
    layer: Any = cache.layers[index]
    states = getattr(layer, name)
    if is_quantized(layer):
        return _dequantized(layer, getattr(layer, f"_quantized_{name}"), states)
    if is_offloaded(cache):
        # The layer may be on its way back already.
        torch.cuda.default_stream(layer.device).wait_stream(cache.prefetch_stream)
        return states.to(layer.device)
    return states


def _dequantized(layer: Any, quantized: Any, last: Tensor) -> Tensor:
    """last: the states that a layer still has in full."""
    states = layer._dequantize(quantized)
    # A layer that keeps some in full changes the rows of the others (for beams) when it quantizes anew.
    if (rows := getattr(layer, "_pending_beam_idx", None)) is not None:
        states = states.index_select(0, rows.to(states.device))
    return torch.cat([states, last], dim=-2) if last.numel() else states
