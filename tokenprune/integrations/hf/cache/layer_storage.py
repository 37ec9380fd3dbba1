# SPDX-License-Identifier: Apache-2.0
"""Read the keys and values of a cache layer: plain, quantized, or offloaded to the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from tokenprune.integrations.hf import compat

# Cached, because isinstance with an abstract class runs Python code for each instance.
_quantizes: Callable[[type], bool] = functools.cache(lambda kind: issubclass(kind, compat.QUANTIZED_LAYERS))


def is_quantized(layer: Any) -> bool:
    """Return True if a cache layer stores quantized keys and values."""
    return _quantizes(type(layer))


def is_offloaded(cache: Any) -> bool:
    """Return True if a cache offloads unused layers to the host."""
    return getattr(cache, "offloading", False)


def count_slots(layer: Any) -> int:
    """Return the number of slots that a cache layer passes to attention, without the tokens of a call.

    A sliding layer that records its past stores more slots until it is cropped, so that drafts can be removed.
    """
    if _quantizes(type(layer)):
        return layer.cumulative_length
    keys = getattr(layer, "keys", None)
    num_slots = 0 if keys is None or 0 in keys.shape else keys.shape[-2]
    may_record = type(layer) is not DynamicLayer  # a quick test for the most frequent class
    records = may_record and getattr(layer, "record_past", False) and getattr(layer, "is_sliding", False)
    return min(num_slots, layer.sliding_window - 1) if records else num_slots


def count_layer_bytes(layer: Any, slots: int) -> int:
    """Return the stored bytes of a layer's `slots` (see `count_slots`), including scales and zero points."""
    if _quantizes(type(layer)):
        parts = (layer.keys, layer.values, layer._quantized_keys, layer._quantized_values)
        return sum(_count_bytes(part) for part in parts)
    num_slots = layer.keys.shape[-2]
    return (layer.keys.nbytes + layer.values.nbytes) * slots // num_slots if num_slots else 0


def _count_bytes(value: Any) -> int:
    """Return the bytes of all tensors in a nested value. Quantized tensors may consist of several tensors."""
    if isinstance(value, Tensor):
        parts = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
        return sum(_count_bytes(getattr(value, name)) for name in parts) if parts else value.nbytes
    if isinstance(value, dict):
        return sum(_count_bytes(part) for part in value.values())
    return sum(_count_bytes(part) for part in value) if isinstance(value, (tuple, list)) else 0


def read_keys(cache: Cache, layer: int) -> Tensor:
    """Return the keys of a layer, shape (batch, heads, slots, channels), on the device and in the dtype of calls."""
    return _read_states(cache, layer, "keys")


def read_values(cache: Cache, layer: int) -> Tensor:
    """Return the values of a layer, like `read_keys`."""
    return _read_states(cache, layer, "values")


def _read_states(cache: Cache, index: int, name: str) -> Tensor:
    layer: Any = cache.layers[index]
    states = getattr(layer, name)
    if is_quantized(layer):
        return _dequantize_states(layer, getattr(layer, f"_quantized_{name}"), states)
    if is_offloaded(cache):
        # The cache may be prefetching the layer.
        torch.cuda.default_stream(layer.device).wait_stream(cache.prefetch_stream)
        return states.to(layer.device)
    return states


def _dequantize_states(layer: Any, quantized: Any, last: Tensor) -> Tensor:
    """Return all states of a quantized layer. last: States that are not quantized yet."""
    states = layer._dequantize(quantized)
    # The layer applies the beams' row order to quantized states only when it quantizes again.
    if (rows := getattr(layer, "_pending_beam_idx", None)) is not None:
        states = states.index_select(0, rows.to(states.device))
    return torch.cat([states, last], dim=-2) if last.numel() else states
