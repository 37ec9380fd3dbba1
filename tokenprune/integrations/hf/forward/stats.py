# SPDX-License-Identifier: Apache-2.0
"""Collects what a forward of a patched model removed, and turns it into `Stats`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenprune.base import Selection
from tokenprune.integrations.hf.cache.layer_storage import slots_handed_out, stored_bytes
from tokenprune.integrations.hf.cache.reduced_cache import reduction_of
from tokenprune.integrations.hf.cache.static_cache import StaticReduction, is_static
from tokenprune.shapes.decoder import DecoderShape
from tokenprune.statistics import Cut, Removal, Stats
from tokenprune.view.segments import Segments

if TYPE_CHECKING:
    from tokenprune.integrations.hf.forward.context import Call
    from tokenprune.integrations.hf.forward.plan import Merged
    from tokenprune.integrations.hf.sequence.layout import Layout


@dataclass(frozen=True)
class _Group:
    """The decoder layers from `first` on see the same tokens: visual ones over the whole batch, all tokens of each row,
    and the slots that a row has; cut: whether that is by a cut."""

    first: int
    visual: int
    tokens: list[int]
    width: int
    cut: bool = True


class Report:
    """The removals of one forward; belongs to its call, and becomes the model's `Stats` when the decoder is done. What
    costs time, or would ask the device, is left to whoever asks for the statistics (`Stats.finalize`).

    segments: the visual tokens that reach the decoder; tokens: of each row, padding left out; length: slots of a row of
    the decoder's input.
    """

    def __init__(self, shape: DecoderShape, segments: Segments, tokens: list[int], length: int, record: bool) -> None:
        self.shape, self.tokens, self.length, self.record = shape, tokens, length, record
        self.stats = Stats(visual_tokens_in=sum(segments.counts))
        self.groups = [_Group(0, sum(segments.counts), tokens, length, cut=False)]
        self.whole_attention = False
        # Of layers whose attention goes in blocks: pairs of query and key of each row.
        self.pairs: dict[int, list[int]] = {}

    def add_time(self, seconds: float) -> None:
        self.stats.overhead_ms = (self.stats.overhead_ms or 0.0) + 1000 * seconds

    def cut(self, call: Call, step: Any, selection: Selection, before: Segments) -> None:
        """Record a cut; `call` holds the state after it."""
        self._note(call, call.layout, call.segments.counts, step, selection, before)

    def unmerge(self, call: Call, merged: Merged, layout: Layout) -> None:
        """Tokens that the tower merged stay one for the decoder's weights, which run on those of `layout`, but not for
        its attention and cache."""
        self.whole_attention = True
        self._note(call, layout, merged.counts, merged.step, merged.selection, call.segments)

    def _note(
        self, call: Call, layout: Layout, counts: list[int], step: Any, selection: Selection, before: Segments
    ) -> None:
        was, now = sum(before.counts), sum(counts)
        self.stats.removals.append(Removal(step.method.site, step.layer, step.method.name, was, now))
        group = _Group(step.layer, now, layout.counts, layout.width)
        self.groups = [*(group for group in self.groups if group.first < step.layer), group]
        if self.record:
            self.stats.defer(_cut_record(call, layout, step, selection, before))

    def finish(self, call: Call, cache: Any) -> Stats:
        """Return the `Stats`; `cache` holds what the decoder cached, None if it cached nothing."""
        note_bytes(self.stats, call, cache, self.length, len(self.tokens))
        self.stats.defer(self._closed_forms)
        if call.active and (ends := call.host.visual_ends):
            self.stats.defer(partial(_note_lost_ends, call.layout, ends))
        return self.stats

    def cached_tokens(self, call: Call, layer: int, slots: int) -> int:
        """Return how many tokens the last `slots` slots of the rows hold after this forward, if the cache was empty
        before."""
        group = next(group for group in reversed(self.groups) if group.first <= layer)
        if group.cut and not self.whole_attention:
            return sum(min(slots, tokens) for tokens in group.tokens)  # at the right end of each row
        padding = call.host.padding_to_drop
        if padding is None:
            return min(slots, self.length) * len(self.tokens)
        return int((~padding[:, -slots:]).sum())

    def _closed_forms(self, stats: Stats) -> None:
        layers = self.shape.layers
        ends = [group.first for group in self.groups[1:]] + [layers]
        per_layer = [group for group, end in zip(self.groups, ends, strict=True) for _ in range(end - group.first)]
        stats.visual_tokens_per_layer = [group.visual for group in per_layer]
        stats.visual_tokens_out = stats.visual_tokens_per_layer[-1]
        stats.keep_ratio = stats.visual_tokens_out / stats.visual_tokens_in

        rows = list(zip(*(group.tokens for group in per_layer), strict=True))
        stats.width_per_layer = [group.width for group in per_layer]
        slots = len(rows) * sum(stats.width_per_layer)
        stats.padding_share = 1 - sum(map(sum, rows)) / slots
        stats.prefill_flops = self._flops([stats.width_per_layer] * len(rows), [self.length] * len(rows))
        stats.prefill_flops_full = len(rows) * self.shape.prefill_flops([self.length] * layers)
        stats.prefill_flops_ratio = stats.prefill_flops / stats.prefill_flops_full
        whole = sum(self.shape.prefill_flops([tokens] * layers) for tokens in self.tokens)
        stats.prefill_flops_ratio_tokens = self._flops(rows, self.tokens) / whole

    def _flops(self, rows: Sequence[Sequence[int]], whole: list[int]) -> float:
        """FLOPs of rows with so many tokens in each layer; whole: those that each row came with."""
        return sum(
            self.shape.prefill_flops(list(row), self._attention(index, row, tokens))
            for index, (row, tokens) in enumerate(zip(rows, whole, strict=True))
        )

    def _attention(self, row: int, widths: Sequence[int], whole: int) -> list[float]:
        """Return the share of causal attention's pairs that each layer computes for a row.

        It is above 1 where attention runs over more tokens than the layer's weights.
        """
        if self.whole_attention:
            return [(whole / max(1, width)) ** 2 for width in widths]
        full = [max(1, width * (width + 1) // 2) for width in widths]
        return [self.pairs[layer][row] / all_ if layer in self.pairs else 1.0 for layer, all_ in enumerate(full)]


def _note_lost_ends(layout: Layout, ends: list[tuple[int, int]], stats: Stats) -> None:
    """Say it where a row's last token is gone: what a caller reads there, or `generate` starts from, is zero."""
    slots = layout.inverse.cpu()
    if lost := [str(row) for row, position in ends if slots[row, position] < 0]:
        stats.notes.append(
            f"the prompt ends with an image that was withdrawn (row {', '.join(lost)}): the output there is zero, and "
            "so is what generate() takes the first new token from; end the prompt with text"
        )


def stats_after(call: Call, cache: Any) -> Stats | None:
    """Return the statistics after a call: its own where it has images, else those of the prefill that its cache
    continues; None where there are neither. cache: see `Report.finish`."""
    if call.has_images:
        return call.report.finish(call, cache)
    if (decode := call.cached.decode) is None:
        return None
    note_bytes(decode.stats, call, cache, call.layout.length, len(decode.visual))
    return decode.stats


def note_bytes(stats: Stats, call: Call, cache: Any, length: int, rows: int) -> None:
    """Note what `cache` holds after a call of `rows` rows of `length` tokens; now, because it goes on growing.

    Which slots are tokens the call's own report tells, where the cache was empty before; else only the device knows,
    and the question is left for whoever asks for the statistics.
    """
    stats.kv_bytes, stats.kv_bytes_full = count_bytes(cache, call.past + length)
    held = [(index, slots_handed_out(layer), stored_bytes(layer)) for index, layer in _filled_layers(cache)]
    if call.has_images and not call.past:
        stats.kv_bytes_tokens = sum(
            size * call.report.cached_tokens(call, index, slots) // (rows * slots) for index, slots, size in held
        )
        return
    mask = call.arguments.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] != call.past + length:
        mask = None  # padding is not known
    seen = []
    for index, slots, size in held:
        positions = torch.arange(call.past + length).expand(rows, -1)
        if call.active:
            positions = call.group_of(index).columns
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
    total, total_full = 0, 0
    for index, layer in _filled_layers(cache):
        size = stored_bytes(layer)
        total += size
        total_full += size * _slots_of(cache, index, layer, full) // slots_handed_out(layer)
    return total, total_full


def _slots_of(cache: Any, index: int, layer: Any, full: int) -> int:
    """Return how many slots a layer would have for `full` tokens if none was removed."""
    if is_static(cache):
        reduction = reduction_of(cache)
        made = reduction.full if isinstance(reduction, StaticReduction) else {}
        return made.get(index, layer.max_cache_len)
    window = getattr(layer, "sliding_window", None) if getattr(layer, "is_sliding", False) else None
    return min(full, window - 1) if window else full


def _filled_layers(cache: Any) -> list[tuple[int, Any]]:
    """Return (index, layer) of the layers of a cache that hold keys."""
    layers = enumerate(getattr(cache, "layers", []))
    return [(index, layer) for index, layer in layers if slots_handed_out(layer)]


def _cut_record(
    call: Call, layout: Layout, step: Any, selection: Selection, before: Segments
) -> Callable[[Stats], None]:
    """Return a function that adds a `Cut` to the statistics; until then nothing is read of the device."""
    positions = layout.positions()
    padding = call.padding(layout.length)
    if padding is not None:
        positions = positions.masked_fill(padding.to(positions.device).gather(1, layout.index), -1)
    cut = partial(Cut, step.method.site, step.layer, step.method.name)
    return partial(_add_cut, cut, call.past, positions, selection, before)


def _add_cut(
    cut: Callable[..., Cut], past: int, positions: Tensor, selection: Selection, before: Segments, stats: Stats
) -> None:
    kept = [[past + p for p in row if p >= 0] for row in positions.tolist()]
    sources: list[dict[int, list[int]]] | None = None
    weights: list[dict[int, list[float]]] | None = None
    if selection.assign is not None:
        sources, weights = [{} for _ in kept], [{} for _ in kept]
        targets, place = selection.assign.tolist(), before.position.tolist()
        given = None if selection.weight is None else selection.weight.tolist()
        for segment, row in enumerate(before.row):
            for index in range(before.counts[segment]):
                target = targets[segment][index]
                if target >= 0:
                    key = past + place[segment][target]
                    sources[row].setdefault(key, []).append(past + place[segment][index])
                    weights[row].setdefault(key, []).append(1.0 if given is None else given[segment][index])
        weights = None if given is None else [{key: _shares(of) for key, of in row.items()} for row in weights]
    stats.cuts.append(cut(kept, sources, weights=weights))


def _shares(weights: list[float]) -> list[float]:
    """Scale weights so that they sum to 1; those of one token are 1, as it is copied whatever it weighs."""
    total = sum(weights)
    return [one / total for one in weights] if total > 0 else [1.0] * len(weights)
