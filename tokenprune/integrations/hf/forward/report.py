# SPDX-License-Identifier: Apache-2.0
"""The removals of one forward, and the statistics that are closed forms of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.selection.segments import Segments
from tokenprune.statistics import Removal, Stats

if TYPE_CHECKING:
    from tokenprune.integrations.hf.forward.plan import Plan, Step
    from tokenprune.integrations.hf.sequence.layout import Layout


@dataclass(frozen=True)
class LayerGroup:
    """Decoder layers, from `first` on, that hold the same tokens.

    visual: visual tokens of the whole batch. tokens: all tokens of each row. width: slots of a row. cut: True if a cut
    made the group.
    """

    first: int
    visual: int
    tokens: list[int]
    width: int
    cut: bool = True


class Report:
    """The removals of one forward, which become the model's `Stats` when the decoder is done.

    Values that cost time, or make the host wait for the device, are computed when the statistics are read
    (`Stats.finalize`).

    plan: the cuts to make, None before they are planned.
    segments: the visual tokens that reach the decoder; tokens: of each row, padding left out; length: slots of a row of
    the decoder's input.
    """

    def __init__(self, shape: DecoderShape, segments: Segments, tokens: list[int], length: int, record: bool) -> None:
        self.shape, self.tokens, self.length, self.record = shape, tokens, length, record
        self.stats = Stats(visual_tokens_in=sum(segments.counts))
        self.groups = [LayerGroup(0, sum(segments.counts), tokens, length, cut=False)]
        self.plan: Plan | None = None
        self.whole_attention = False
        # Of layers whose attention goes in blocks: pairs of query and key of each row.
        self.pairs: dict[int, list[int]] = {}

    def add_time(self, seconds: float) -> None:
        self.stats.overhead_ms = (self.stats.overhead_ms or 0.0) + 1000 * seconds

    def note(self, step: Step, layout: Layout, before: Segments, counts: Sequence[int]) -> None:
        """Record that the layers from `step.layer` on hold the tokens of `layout`.

        before: the segments ahead of the step. counts: the visual tokens that are left of each.
        """
        was, now = sum(before.counts), sum(counts)
        self.stats.removals.append(Removal(step.method.site, step.layer, step.method.name, was, now))
        group = LayerGroup(step.layer, now, layout.counts, layout.width)
        self.groups = [*(group for group in self.groups if group.first < step.layer), group]

    def group_of(self, layer: int) -> LayerGroup:
        """Return the group that `layer` belongs to, of those recorded so far."""
        return next(group for group in reversed(self.groups) if group.first <= layer)

    def add_closed_forms(self, stats: Stats) -> None:
        """Add the counts of each layer, and the FLOPs, to `stats`."""
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
