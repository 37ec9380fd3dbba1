# SPDX-License-Identifier: Apache-2.0
"""Collects what a forward of a patched model removed, and turns it into `Stats`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tokenprune.accounting import DecoderShape
from tokenprune.base import Selection
from tokenprune.integrations.hf.cache import slots_handed_out
from tokenprune.statistics import Cut, Removal, Stats
from tokenprune.tokens import Segments

if TYPE_CHECKING:
    from tokenprune.integrations.hf.call import Call
    from tokenprune.integrations.hf.layout import Layout


class Report:
    """What one forward removed; belongs to its call, and becomes the model's `Stats` when the decoder is done. What
    costs time, or would ask the device, is left to whoever asks for the statistics (`Stats.settled`).

    segments: the visual tokens that reach the decoder; batch, length: the size of its input.
    """

    def __init__(self, shape: DecoderShape, segments: Segments, batch: int, length: int, record: bool) -> None:
        self.shape, self.length, self.record = shape, length, record
        self.stats = Stats(visual_tokens_in=sum(segments.counts))
        # (first layer, visual tokens, tokens of each row) of each group of layers that see the same tokens.
        self.groups = [(0, sum(segments.counts), [length] * batch)]
        self.whole_attention = False
        # Of layers whose attention goes in blocks: pairs of query and key of each row.
        self.pairs: dict[int, list[int]] = {}

    def add_time(self, seconds: float) -> None:
        self.stats.overhead_ms += 1000 * seconds

    def cut(self, call: Call, step: Any, selection: Selection, before: Segments) -> None:
        """A cut was made; `call` holds the state after it."""
        self._note(call, call.layout, call.segments.counts, step, selection, before)

    def unmerge(self, call: Call, step: Any) -> None:
        """Tokens that the tower merged stay one for the decoder's weights, but not for its attention and cache."""
        self.whole_attention = True
        state = call.unmerged
        self._note(call, state.layout, state.selection.counts, step, state.selection, call.segments)

    def _note(
        self, call: Call, layout: Layout, counts: list[int], step: Any, selection: Selection, before: Segments
    ) -> None:
        was, now = sum(before.counts), sum(counts)
        self.stats.removals.append(Removal(step.method.site, step.layer, step.method.name, was, now))
        widths = list(self.groups[-1][2])
        for row, old, new in zip(before.row, before.counts, counts, strict=True):
            widths[row] -= old - new
        group = (step.layer, now, widths)
        self.groups = [*(group for group in self.groups if group[0] < step.layer), group]
        if self.record:
            self.stats.later(_cut_record(call, layout, step, selection, before))

    def finish(self, cache: Any, past: int) -> Stats:
        """Return the `Stats`; `cache` holds what the decoder cached, None if it cached nothing."""
        stats = self.stats
        # The cache goes on growing.
        stats.kv_bytes, stats.kv_bytes_full = count_bytes(cache, past + self.length)
        stats.later(self._closed_forms)
        return stats

    def _closed_forms(self, stats: Stats) -> None:
        layers = self.shape.layers
        ends = [first for first, _, _ in self.groups[1:]] + [layers]
        per_layer = [group for group, end in zip(self.groups, ends, strict=True) for _ in range(end - group[0])]
        stats.visual_tokens_per_layer = [visual for _, visual, _ in per_layer]
        stats.visual_tokens_out = stats.visual_tokens_per_layer[-1]
        stats.keep_ratio = stats.visual_tokens_out / stats.visual_tokens_in
        rows = zip(*(widths for _, _, widths in per_layer), strict=True)
        flops = [self.shape.prefill_flops(list(row), self._attention(index, row)) for index, row in enumerate(rows)]
        stats.prefill_flops_ratio = sum(flops) / (len(flops) * self.shape.prefill_flops([self.length] * layers))

    def _attention(self, row: int, widths: tuple[int, ...]) -> list[float]:
        """The share of causal attention's pairs that each layer computes for a row; above 1 where attention runs over
        more tokens than the layer's weights."""
        if self.whole_attention:
            return [(self.length / width) ** 2 for width in widths]
        full = [width * (width + 1) // 2 for width in widths]
        return [self.pairs[layer][row] / all_ if layer in self.pairs else 1.0 for layer, all_ in enumerate(full)]


def count_bytes(cache: Any, full: int) -> tuple[int, int]:
    """Return the bytes that the cache itself holds, closed forms would hide a cut that frees nothing; and what it would
    hold of `full` tokens."""
    total, total_full = 0, 0
    for layer in getattr(cache, "layers", []):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or not keys.numel():
            continue
        # What a layer keeps until its next crop only is not counted.
        slot = (keys.numel() * keys.element_size() + values.numel() * values.element_size()) // keys.shape[-2]
        window = getattr(layer, "sliding_window", None) if getattr(layer, "is_sliding", False) else None
        total += slot * slots_handed_out(layer)
        total_full += slot * (min(full, window - 1) if window else full)
    return total, total_full


def _cut_record(
    call: Call, layout: Layout, step: Any, selection: Selection, before: Segments
) -> Callable[[Stats], None]:
    """What adds a `Cut` to the statistics, when it is called; until then nothing is read of the device."""
    positions = layout.positions()
    padding = call.padding(layout.length)
    if padding is not None:
        positions = positions.masked_fill(padding.to(positions.device).gather(1, layout.index), -1)
    cut = partial(Cut, step.method.site, step.layer, step.method.name)
    return partial(_add_cut, cut, call.past, positions, selection.assign, before)


def _add_cut(
    cut: Callable[..., Cut], past: int, positions: Tensor, assign: Tensor | None, before: Segments, stats: Stats
) -> None:
    kept = [[past + p for p in row if p >= 0] for row in positions.tolist()]
    sources = None
    if assign is not None:
        sources = [{} for _ in kept]
        targets, place = assign.tolist(), before.position.tolist()
        for segment, row in enumerate(before.row):
            for index in range(before.counts[segment]):
                target = targets[segment][index]
                if target >= 0:
                    key = past + place[segment][target]
                    sources[row].setdefault(key, []).append(past + place[segment][index])
    stats.cuts.append(cut(kept, sources))
