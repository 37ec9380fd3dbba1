# SPDX-License-Identifier: Apache-2.0
"""Compute the `Stats` of a forward from its `Trace` and the state of its cache."""

from __future__ import annotations

import threading
from collections.abc import MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from tokenprune.integrations.hf.cache.layer_storage import count_layer_bytes, count_slots
from tokenprune.integrations.hf.cache.reduced_cache import get_reduction
from tokenprune.integrations.hf.cache.static_cache import StaticReduction, is_static
from tokenprune.statistics import Stats

if TYPE_CHECKING:
    from tokenprune.integrations.hf.forward.call import Call
    from tokenprune.integrations.hf.forward.token_state import Layout
    from tokenprune.integrations.hf.forward.trace import Trace


class _ThreadStats(threading.local):
    def __init__(self) -> None:
        self.latest: MutableMapping[LatestStats, Stats] = WeakKeyDictionary()


_thread = _ThreadStats()


class LatestStats:
    """Statistics of the last call with images, per thread. A deep copy has only the last call of all threads."""

    def __init__(self) -> None:
        self._latest_of_all_threads = Stats()

    def set(self, stats: Stats) -> None:
        """Store the statistics of a call of this thread."""
        _thread.latest[self] = self._latest_of_all_threads = stats

    def get(self) -> Stats:
        """Return the statistics of this thread, or of the last call of all threads if this thread made no call."""
        return _thread.latest.get(self, self._latest_of_all_threads)


def _record_token_bytes_from_trace(trace: Trace, rows: int, layers: list[CacheLayer], stats: Stats) -> None:
    stats.kv_bytes_tokens = sum(
        size * _count_cached_tokens(trace, index, slots) // (rows * slots) for index, slots, size, _ in layers
    )


def _count_cached_tokens(trace: Trace, layer: int, slots: int) -> int:
    """Count the tokens in the last `slots` slots of all rows after a forward that started with an empty cache."""
    counts = trace.get_tokens(layer)
    if counts.after_cut and not trace.attends_all:
        return sum(min(slots, tokens) for tokens in counts.tokens_per_row)  # rows are right-aligned
    padding = trace.prompt.padding_to_drop
    if padding is None:
        return min(slots, trace.length) * len(trace.tokens_per_row)
    return int((~padding[:, -slots:]).sum())


def _add_note_on_dropped_ends(layout: Layout, ends: list[tuple[int, int]], stats: Stats) -> None:
    """Add a note if the last token of a row was dropped. The output, and the first logits of `generate`, are zero."""
    slots = layout.inverse.cpu()
    if dropped := [str(row) for row, position in ends if slots[row, position] < 0]:
        stats.notes.append(
            f"the prompt ends with a dropped image (row {', '.join(dropped)}), so the output at the last token is zero "
            "and generate() starts from zero logits; end the prompt with text"
        )


def collect_stats(call: Call, cache: Any) -> Stats | None:
    """Collect the statistics of a finished call.

    Args:
        call: The call.
        cache: The decoder's key/value cache after the call, or None without a cache.

    Returns:
        The statistics of the call if it has images, else of the prefill that its cache continues. None if neither
        exists.
    """
    if call.has_images:
        trace = call.trace
        record_bytes(trace.stats, call, cache, trace.length, len(trace.tokens_per_row))
        trace.stats.defer(trace.add_closed_forms)
        if call.active and (ends := call.prompt.visual_ends):
            trace.stats.defer(partial(_add_note_on_dropped_ends, call.state.layout, ends))
        return trace.stats
    if (decode := call.cached.decode) is None:
        return None
    record_bytes(decode.stats, call, cache, call.state.layout.length, len(decode.visual))
    return decode.stats


def record_bytes(stats: Stats, call: Call, cache: Any, length: int, rows: int) -> None:
    """Record the bytes of `cache` after a call of `rows` rows of `length` tokens.

    The total bytes are recorded now, because the cache keeps growing. The bytes of valid tokens are deferred until the
    statistics are read: unless the cache was empty before the call, counting them synchronises with the device.
    """
    layers = _measure_layers(cache, call.past + length)
    stats.kv_bytes, stats.kv_bytes_full = _sum_bytes(layers)
    if call.has_images and not call.past:
        stats.defer(partial(_record_token_bytes_from_trace, call.trace, rows, layers), "kv_bytes_tokens")
        return
    mask = call.arguments.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] != call.past + length:
        mask = None  # the padding is unknown
    layer_positions = []
    for index, slots, size, _ in layers:
        positions = torch.arange(call.past + length, device="cpu").expand(rows, -1)
        if call.active:
            positions = next(group for group in reversed(call.groups) if group.first <= index).columns
            # A static layer has slots for future tokens.
            positions = positions.masked_fill(positions >= call.past + length, -1)
        layer_positions.append((size, positions[:, -slots:]))
    stats.defer(partial(_record_token_bytes, layer_positions, mask), "kv_bytes_tokens")


def _record_token_bytes(layer_positions: list[tuple[int, Tensor]], mask: Tensor | None, stats: Stats) -> None:
    """Count the bytes of valid tokens.

    Args:
        layer_positions: Bytes of each layer, and the logical position of each slot (long `[B, slots]`, -1 if empty).
        mask: Attention mask of the call, or None if the padding is unknown.
        stats: Statistics to update.
    """
    stats.kv_bytes_tokens = 0
    for size, positions in layer_positions:
        valid = positions >= 0
        if mask is not None:
            valid &= mask.to(positions.device).bool().gather(1, positions.clamp(min=0))
        stats.kv_bytes_tokens += size * int(valid.sum()) // valid.numel()


def count_bytes(cache: Any, num_tokens: int) -> tuple[int, int]:
    """Return the allocated bytes of a cache, and the bytes that it would need for `num_tokens` unpruned tokens.

    Both are measured on the tensors, because a closed form would hide a cut that frees no memory.
    """
    return _sum_bytes(_measure_layers(cache, num_tokens))


# A cache layer with keys: its index, its number of slots, their bytes, and the bytes without pruning.
CacheLayer = tuple[int, int, int, int]


def _measure_layers(cache: Any, num_tokens: int) -> list[CacheLayer]:
    """Measure the layers of a cache that would hold `num_tokens` tokens without pruning."""
    layers = getattr(cache, "layers", ())
    if {*map(type, layers)} == {DynamicLayer}:
        filled = [
            (index, layer.keys, layer.values)
            for index, layer in enumerate(layers)
            if layer.is_initialized and layer.keys.nbytes
        ]
        sizes = [(index, keys.shape[-2], keys.nbytes + values.nbytes) for index, keys, values in filled]
        return [(index, slots, size, size * num_tokens // slots) for index, slots, size in sizes]
    static, reduction, measured = is_static(cache), get_reduction(cache), []
    unpruned_slots = reduction.original_slots if isinstance(reduction, StaticReduction) else {}
    for index, layer in enumerate(layers):
        if not (slots := count_slots(layer)):
            continue
        size = count_layer_bytes(layer, slots)
        if static:
            num_slots = unpruned_slots.get(index, layer.max_cache_len)
        else:
            window = getattr(layer, "sliding_window", None) if getattr(layer, "is_sliding", False) else None
            num_slots = min(num_tokens, window - 1) if window else num_tokens
        measured.append((index, slots, size, size * num_slots // slots))
    return measured


def _sum_bytes(layers: list[CacheLayer]) -> tuple[int, int]:
    return sum([size for _, _, size, _ in layers]), sum([unpruned for _, _, _, unpruned in layers])
