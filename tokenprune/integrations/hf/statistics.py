# SPDX-License-Identifier: Apache-2.0
"""Statistics of a forward of a patched model: its `Trace`, and the state of its cache, become `Stats`."""

from __future__ import annotations

import threading
from collections.abc import MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from tokenprune.integrations.hf.cache.layer_storage import slots_handed_out, stored_bytes
from tokenprune.integrations.hf.cache.reduced_cache import reduction_of
from tokenprune.integrations.hf.cache.static_cache import StaticReduction, is_static
from tokenprune.statistics import Stats

if TYPE_CHECKING:
    from tokenprune.integrations.hf.forward.call import Call
    from tokenprune.integrations.hf.forward.trace import Trace
    from tokenprune.integrations.hf.sequence.layout import Layout


class _ThreadStats(threading.local):
    def __init__(self) -> None:
        self.latest: MutableMapping[LatestStats, Stats] = WeakKeyDictionary()


_thread = _ThreadStats()


class LatestStats:
    """The statistics of the last call with images, per thread. A copy knows only the last call of all threads."""

    def __init__(self) -> None:
        self._of_all = Stats()

    def set(self, stats: Stats) -> None:
        """Note the statistics of a call of this thread."""
        _thread.latest[self] = self._of_all = stats

    def get(self) -> Stats:
        """Return the statistics of this thread. A thread without a call sees the last call of all threads."""
        return _thread.latest.get(self, self._of_all)


def _note_cached_tokens(trace: Trace, rows: int, held: list[Held], stats: Stats) -> None:
    stats.kv_bytes_tokens = sum(
        size * _cached_tokens(trace, index, slots) // (rows * slots) for index, slots, size, _ in held
    )


def _cached_tokens(trace: Trace, layer: int, slots: int) -> int:
    """Return how many tokens the last `slots` slots of the rows hold after this forward, if the cache was empty
    before."""
    counts = trace.tokens_at(layer)
    if counts.after_cut and not trace.attends_all:
        return sum(min(slots, tokens) for tokens in counts.tokens_per_row)  # at the right end of each row
    padding = trace.prompt.padding_to_drop
    if padding is None:
        return min(slots, trace.length) * len(trace.tokens_per_row)
    return int((~padding[:, -slots:]).sum())


def _note_lost_ends(layout: Layout, ends: list[tuple[int, int]], stats: Stats) -> None:
    """Say it where a row's last token is gone: what a caller reads there, or `generate` starts from, is zero."""
    slots = layout.inverse.cpu()
    if lost := [str(row) for row, position in ends if slots[row, position] < 0]:
        stats.notes.append(
            f"the prompt ends with an image that was withdrawn (row {', '.join(lost)}): the output there is zero, and "
            "so is what generate() takes the first new token from; end the prompt with text"
        )


def collect_stats(call: Call, cache: Any) -> Stats | None:
    """Return the statistics after a call: its own where it has images, else those of the prefill that its cache
    continues; None where there are neither. cache: holds what the decoder cached, None if it cached nothing."""
    if call.has_images:
        trace = call.trace
        record_bytes(trace.stats, call, cache, trace.length, len(trace.tokens_per_row))
        trace.stats.defer(trace.add_closed_forms)
        if call.active and (ends := call.prompt.visual_ends):
            trace.stats.defer(partial(_note_lost_ends, call.state.layout, ends))
        return trace.stats
    if (decode := call.cached.decode) is None:
        return None
    record_bytes(decode.stats, call, cache, call.state.layout.length, len(decode.visual))
    return decode.stats


def record_bytes(stats: Stats, call: Call, cache: Any, length: int, rows: int) -> None:
    """Note what `cache` holds after a call of `rows` rows of `length` tokens; now, because it goes on growing.

    Which slots are tokens the call's own trace tells, where the cache was empty before; else only the device knows,
    and the question is left for whoever asks for the statistics.
    """
    held = _held(cache, call.past + length)
    stats.kv_bytes, stats.kv_bytes_full = _sums(held)
    if call.has_images and not call.past:
        stats.defer(partial(_note_cached_tokens, call.trace, rows, held), "kv_bytes_tokens")
        return
    mask = call.arguments.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] != call.past + length:
        mask = None  # padding is not known
    seen = []
    for index, slots, size, _ in held:
        positions = torch.arange(call.past + length, device="cpu").expand(rows, -1)
        if call.active:
            positions = next(group for group in reversed(call.groups) if group.first <= index).columns
            # A static layer has slots for tokens to come.
            positions = positions.masked_fill(positions >= call.past + length, -1)
        seen.append((size, positions[:, -slots:]))
    stats.defer(partial(_note_token_bytes, seen, mask), "kv_bytes_tokens")


def _note_token_bytes(seen: list[tuple[int, Tensor]], mask: Tensor | None, stats: Stats) -> None:
    """seen: for each layer its bytes, and the logical positions in its slots (long `[B, n]`, -1 = empty)."""
    stats.kv_bytes_tokens = 0
    for size, positions in seen:
        real = positions >= 0
        if mask is not None:
            real &= mask.to(positions.device).bool().gather(1, positions.clamp(min=0))
        stats.kv_bytes_tokens += size * int(real.sum()) // real.numel()


def count_bytes(cache: Any, full: int) -> tuple[int, int]:
    """Return the bytes that the cache itself holds, closed forms would hide a cut that frees nothing; and what it would
    hold of `full` tokens."""
    return _sums(_held(cache, full))


# A layer of a cache that holds keys: its index, its slots, their bytes, and the bytes if no token was removed.
Held = tuple[int, int, int, int]


def _held(cache: Any, full: int) -> list[Held]:
    """Return what the layers of a cache hold. full: how many tokens it would hold if none was removed."""
    layers = getattr(cache, "layers", ())
    if {*map(type, layers)} == {DynamicLayer}:
        filled = [(n, one.keys, one.values) for n, one in enumerate(layers) if one.is_initialized and one.keys.nbytes]
        sized = [(n, keys.shape[-2], keys.nbytes + values.nbytes) for n, keys, values in filled]
        return [(n, slots, size, size * full // slots) for n, slots, size in sized]
    static, reduction, found = is_static(cache), reduction_of(cache), []
    made = reduction.full if isinstance(reduction, StaticReduction) else {}
    for index, layer in enumerate(layers):
        if not (slots := slots_handed_out(layer)):
            continue
        size = stored_bytes(layer, slots)
        if static:
            whole = made.get(index, layer.max_cache_len)
        else:
            window = getattr(layer, "sliding_window", None) if getattr(layer, "is_sliding", False) else None
            whole = min(full, window - 1) if window else full
        found.append((index, slots, size, size * whole // slots))
    return found


def _sums(held: list[Held]) -> tuple[int, int]:
    return sum([size for _, _, size, _ in held]), sum([whole for _, _, _, whole in held])
