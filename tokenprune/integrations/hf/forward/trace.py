# SPDX-License-Identifier: Apache-2.0
"""Record of the cuts of one forward. Its `Stats` are computed from the record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from tokenprune.integrations.hf.forward.token_state import Layout
from tokenprune.kernels.transfer import to_device
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.selection.method import Selection
from tokenprune.selection.segments import Segments
from tokenprune.statistics import Cut, Removal, Stats

if TYPE_CHECKING:
    from tokenprune.integrations.hf.forward.plan import Step
    from tokenprune.integrations.hf.forward.prompt_info import PromptInfo


@dataclass(frozen=True)
class LayerTokens:
    """Number of tokens in the decoder layers from `first_layer` to the next entry of the trace.

    Attributes:
        num_visual: Visual tokens of the whole batch.
        tokens_per_row: Tokens of each row, without padding.
        width: Slots of each row.
        after_cut: Whether a cut changed the tokens.
    """

    first_layer: int
    num_visual: int
    tokens_per_row: list[int]
    width: int
    after_cut: bool = True


class Trace:
    """Append-only record of one forward with images. It becomes the model's `Stats` when the decoder is done.

    Values that cost time, or that wait for the device, are computed when the statistics are read (`Stats.finalize`).

    Attributes:
        prompt: The prompt of the call.
        past: Tokens in the cache before the call.
        tokens_per_row: Tokens of each row at the decoder's entry, without padding.
        length: Slots of each row at the decoder's entry.
        record: Whether to keep a `Cut` of each cut.
        layers: Token counts after each cut. Of several entries with the same first layer the last one is valid.
        attends_all: Whether attention runs over all tokens although layers compute fewer.
        pairs: Query-key pairs of each row in layers whose attention is computed in blocks.
    """

    def __init__(
        self, shape: DecoderShape, segments: Segments, prompt: PromptInfo, past: int, length: int, record: bool
    ) -> None:
        self.shape, self.prompt, self.past, self.length, self.record = shape, prompt, past, length, record
        self.tokens_per_row = prompt.tokens_per_row
        num_visual = sum(segments.counts)
        self.stats = Stats(visual_tokens_in=num_visual)
        self.layers = [LayerTokens(0, num_visual, self.tokens_per_row, length, after_cut=False)]
        self.attends_all = False
        self.pairs: dict[int, list[int]] = {}

    def add_time(self, seconds: float) -> None:
        self.stats.overhead_ms = (self.stats.overhead_ms or 0.0) + 1000 * seconds

    def add_cut(self, step: Step, selection: Selection, before: Segments, num_kept: list[int], layout: Layout) -> None:
        """Record a cut of the visual tokens `before`. layout: all tokens after the cut."""
        num_before, num_after = sum(before.counts), sum(num_kept)
        self.stats.removals.append(Removal(step.method.site, step.layer, step.method.name, num_before, num_after))
        self.layers.append(LayerTokens(step.layer, num_after, layout.tokens_per_row, layout.width))
        if self.record:
            # The transfer to the device is queued now. Its result is read with the statistics.
            is_real = to_device(self.prompt.is_real, layout.index.device).gather(1, layout.index)
            positions = layout.positions().masked_fill(~is_real, -1)
            build_cut = partial(Cut, step.method.site, step.layer, step.method.name)
            self.stats.defer(partial(_append_cut, build_cut, self.past, positions, selection, before))

    def get_tokens(self, layer: int) -> LayerTokens:
        """Return the token counts of `layer`, as far as cuts are recorded."""
        return next(tokens for tokens in reversed(self.layers) if tokens.first_layer <= layer)

    def add_closed_forms(self, stats: Stats) -> None:
        """Add the token counts of each layer, and the FLOPs, to `stats`."""
        num_layers = self.shape.layers
        ends = [tokens.first_layer for tokens in self.layers[1:]] + [num_layers]
        spans = zip(self.layers, ends, strict=True)
        per_layer = [tokens for tokens, end in spans for _ in range(end - tokens.first_layer)]
        stats.visual_tokens_per_layer = [tokens.num_visual for tokens in per_layer]
        stats.visual_tokens_out = stats.visual_tokens_per_layer[-1]
        stats.keep_ratio = stats.visual_tokens_out / stats.visual_tokens_in

        rows = list(zip(*(tokens.tokens_per_row for tokens in per_layer), strict=True))
        stats.width_per_layer = [tokens.width for tokens in per_layer]
        slots = len(rows) * sum(stats.width_per_layer)
        stats.padding_share = 1 - sum(map(sum, rows)) / slots
        stats.prefill_flops = self._compute_flops([stats.width_per_layer] * len(rows), [self.length] * len(rows))
        stats.prefill_flops_full = len(rows) * self.shape.prefill_flops([self.length] * num_layers)
        stats.prefill_flops_ratio = stats.prefill_flops / stats.prefill_flops_full
        unpruned = sum(self.shape.prefill_flops([tokens] * num_layers) for tokens in self.tokens_per_row)
        stats.prefill_flops_ratio_tokens = self._compute_flops(rows, self.tokens_per_row) / unpruned

    def _compute_flops(self, rows: Sequence[Sequence[int]], unpruned: list[int]) -> float:
        """Return the FLOPs of rows with these token counts per layer. unpruned: tokens of each row at the entry."""
        return sum(
            self.shape.prefill_flops(list(row), self._attention(index, row, tokens))
            for index, (row, tokens) in enumerate(zip(rows, unpruned, strict=True))
        )

    def _attention(self, row: int, widths: Sequence[int], unpruned: int) -> list[float]:
        """Return the share of causal attention's pairs that each layer computes for a row.

        It is above 1 where attention runs over more tokens than the layer's weights.
        """
        if self.attends_all:
            return [(unpruned / max(1, width)) ** 2 for width in widths]
        causal = [max(1, width * (width + 1) // 2) for width in widths]
        return [self.pairs[layer][row] / pairs if layer in self.pairs else 1.0 for layer, pairs in enumerate(causal)]


def _append_cut(
    build_cut: Callable[..., Cut], past: int, positions: Tensor, selection: Selection, before: Segments, stats: Stats
) -> None:
    """Append a `Cut` to `stats`. positions: of the kept tokens, -1 for padding, shape (batch, width)."""
    kept = [[past + position for position in row if position >= 0] for row in positions.tolist()]
    sources: list[dict[int, list[int]]] | None = None
    weights: list[dict[int, list[float]]] | None = None
    if selection.assign is not None:
        sources, weights = [{} for _ in kept], [{} for _ in kept]
        targets, prompt_positions = selection.assign.tolist(), before.position.tolist()
        weight = None if selection.weight is None else selection.weight.tolist()
        for segment, row in enumerate(before.row):
            for index in range(before.counts[segment]):
                target = targets[segment][index]
                if target >= 0:
                    key = past + prompt_positions[segment][target]
                    sources[row].setdefault(key, []).append(past + prompt_positions[segment][index])
                    weights[row].setdefault(key, []).append(1.0 if weight is None else weight[segment][index])
        weights = None if weight is None else [{key: _normalize(w) for key, w in row.items()} for row in weights]
    stats.cuts.append(build_cut(kept, sources, weights=weights))


def _normalize(weights: list[float]) -> list[float]:
    """Return the weights of a merged token's sources, scaled to a sum of 1.

    A sum of 0 occurs for a single source. Its weight is 1.
    """
    total = sum(weights)
    return [weight / total for weight in weights] if total > 0 else [1.0] * len(weights)
