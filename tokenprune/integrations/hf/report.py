# SPDX-License-Identifier: Apache-2.0
"""Collects what a forward of a patched model removed, and turns it into `Stats`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from tokenprune.accounting import DecoderShape
from tokenprune.base import Selection
from tokenprune.statistics import Cut, Stats
from tokenprune.tokens import Segments

if TYPE_CHECKING:
    from tokenprune.integrations.hf.call import Call


class Report:
    """One per patched model; started anew by every forward that begins without a cached past."""

    def __init__(self, shape: DecoderShape, record: bool) -> None:
        self.shape, self.record = shape, record
        self.start()

    def start(self) -> None:
        self.stats = Stats()
        self._flops = self._flops_full = 0.0

    def add_time(self, seconds: float) -> None:
        self.stats.overhead_ms += 1000 * seconds

    def enter(self, segments: Segments, batch: int, length: int) -> None:
        """Visual tokens reach the decoder."""
        layers, self._length = self.shape.layers, length
        self.stats.visual_tokens_per_layer = self.stats.visual_tokens_per_layer or [0] * layers
        self.stats.visual_tokens_in += sum(segments.counts)
        self._changes: list[tuple[int, int, list[int]]] = [(0, sum(segments.counts), [length] * batch)]

    def cut(self, call: Call, step: Any, selection: Selection, before: Segments) -> None:
        """A cut was made; `call` holds the state after it."""
        removed = [0] * len(self._changes[-1][2])
        for row, old, new in zip(before.row, before.counts, call.segments.counts, strict=True):
            removed[row] += old - new
        widths = [width - gone for width, gone in zip(self._changes[-1][2], removed, strict=True)]
        change = (step.layer, sum(call.segments.counts), widths)
        self._changes = [*(c for c in self._changes if c[0] < step.layer), change]
        if self.record:
            self.stats.cuts.append(_cut_record(call, step, selection, before))

    def leave(self, call: Call, cache: Any) -> None:
        """The decoder is done; `cache` holds what it cached, None if it cached nothing."""
        stats, layers, length = self.stats, self.shape.layers, self._length
        batch = len(self._changes[0][2])
        per_layer: list[int] = []
        rows: list[list[int]] = []
        for index, (first, visual, widths) in enumerate(self._changes):
            last = self._changes[index + 1][0] if index + 1 < len(self._changes) else layers
            per_layer += [visual] * (last - first)
            rows += [widths] * (last - first)
        stats.visual_tokens_per_layer = [a + b for a, b in zip(stats.visual_tokens_per_layer, per_layer, strict=True)]
        stats.visual_tokens_out += per_layer[-1]
        stats.keep_ratio = stats.visual_tokens_out / stats.visual_tokens_in
        for row in range(batch):
            self._flops += self.shape.prefill_flops([widths[row] for widths in rows])
            self._flops_full += self.shape.prefill_flops([length] * layers)
        stats.prefill_flops_ratio = self._flops / self._flops_full
        self._kv(cache, call.past + length)

    def _kv(self, cache: Any, full: int) -> None:
        """Bytes from the cache itself: closed forms would hide a cut that frees nothing."""
        self.stats.kv_bytes = self.stats.kv_bytes_full = 0
        for layer in getattr(cache, "layers", []):
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is None or not keys.numel():
                continue
            held = keys.numel() * keys.element_size() + values.numel() * values.element_size()
            window = getattr(layer, "sliding_window", None) if getattr(layer, "is_sliding", False) else None
            self.stats.kv_bytes += held
            self.stats.kv_bytes_full += held // keys.shape[-2] * (min(full, window - 1) if window else full)


def _cut_record(call: Call, step: Any, selection: Selection, before: Segments) -> Cut:
    positions = call.layout.positions()
    padding = call.arguments.get("attention_mask")
    if isinstance(padding, Tensor) and padding.ndim == 2:
        real = padding[:, -call.layout.length :].bool().gather(1, call.layout.index)
        positions = positions.masked_fill(~real, -1)
    kept = [[call.past + p for p in row if p >= 0] for row in positions.tolist()]
    sources = None
    if selection.assign is not None:
        sources = [{} for _ in kept]
        assign, place = selection.assign.tolist(), before.position.tolist()
        for segment, row in enumerate(before.row):
            for index in range(before.counts[segment]):
                target = assign[segment][index]
                if target >= 0:
                    key = call.past + place[segment][target]
                    sources[row].setdefault(key, []).append(call.past + place[segment][index])
    return Cut(step.method.site, step.layer, step.method.name, kept, sources)
