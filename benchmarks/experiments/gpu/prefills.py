# SPDX-License-Identifier: Apache-2.0
"""Measure prefills with each method and budget, in a LLaVA with random weights and encoded images."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from clocks import Choosing, Clocks
from common import AFTER, BEFORE, Clock, Live, Peak, llava
from efficiency import BLOCKS, Case, lengths, weighted
from kit import Sheet

import tokenprune
from tokenprune.models.decoder_shape import DecoderShape

NONE = "none"  # the unpatched model
COLUMNS = {
    "method": "method", "batch": "batch", "visual": "visual", "keep": "kept", "layer_tokens": "tokens a layer",
    "ms": "prefill ms", "speedup": "speed-up", "graph_ms": "as a graph ms", "oracle_ms": "oracle ms",
    "oracle_graph_ms": "oracle, graph ms", "efficiency": "of the oracle", "choosing_ms": "choosing ms",
    "peak_bytes": "peak MiB", "kv_bytes": "KV MiB", "bound": "bound by",
}  # fmt: skip


def model_of(sheet: Sheet) -> Any:
    """Build the table's LLaVA: a 7 B decoder with a small tower."""
    return llava("tiny" if sheet.tiny else "vicuna-7b", sheet.device, sheet.dtype, BLOCKS)


def held(cache: Any) -> int:
    """Return the bytes of a cache's keys and values."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def peak_of(device: torch.device) -> Any:
    """Return a context whose `bytes` are the peak allocation inside (on a CPU: of tensors only)."""
    return Peak(device) if device.type == "cuda" else Live()


@dataclass
class Prefills:
    """The rows of a prompt with `visual` visual tokens, repeated `batch` times."""

    sheet: Sheet
    clocks: Clocks
    model: Any
    visual: int
    batch: int
    rounds: int
    _oracles: dict[int, tuple[float, float]] = field(default_factory=dict)

    def take(self, methods: Sequence[str], keeps: Sequence[int]) -> None:
        """Measure the unpatched model, then each method at each number of kept tokens."""
        self._take(NONE, self.visual)
        for keep in keeps:
            for name in methods:
                self._take(name, keep)
        self.sheet.free()

    def _take(self, name: str, keep: int) -> None:
        self.sheet.take((name, self.visual, keep, self.batch), partial(self.measure, name, keep))

    def measure(self, name: str, keep: int) -> dict[str, Any]:
        """Return the row of a method."""
        torch.manual_seed(0)
        case = Case(self.model, self.visual, keep, Clock(self.sheet.device), self.batch)
        if name == NONE:
            patched, images = nullcontext(), case.images("random")
        else:
            patched = tokenprune.patched(self.model, name, guard="off", **case.setting(name))
        with patched:
            if name != NONE:
                images = case.images(name)
            run = case.prefill_of(images)
            run()
            layers, flops = self._layers(name, case)
            case.cache = None
            with peak_of(self.sheet.device) as peak:
                run()
            kv, weights = (
                held(case.cache),
                sum(parameter.nbytes for parameter in self.model.model.language_model.parameters()),
            )
            row = self.clocks.timed(run, flops, weights + kv, self.rounds)
            with Choosing(self.sheet.device) as choosing:
                run()
        case.cache = None
        oracle = self._oracle(case, layers)
        unpatched = self.sheet.rows.known((NONE, self.visual, self.visual, self.batch))
        return {
            "method": name, "batch": self.batch, "visual": self.visual, "keep": keep,
            "layer_tokens": sum(layers) / len(layers), "layers": layers, **row,
            "speedup": unpatched[0]["ms"]["p50"] / row["ms"]["p50"] if unpatched and "ms" in unpatched[0] else None,
            "oracle_ms": oracle[0], "oracle_graph_ms": oracle[1], "efficiency": oracle[0] / row["ms"]["p50"],
            "choosing_ms": choosing.ms, "peak_bytes": peak.bytes, "kv_bytes": kv,
        }  # fmt: skip

    def _layers(self, name: str, case: Case) -> tuple[list[int], float]:
        """Return the visual tokens per layer of a prompt, and the FLOPs of the batch."""
        if name != NONE:
            stats = tokenprune.stats(self.model)
            return [count // self.batch for count in stats.visual_tokens_per_layer], stats.prefill_flops
        shape = DecoderShape.from_config(self.model.config.text_config)
        length = [BEFORE + self.visual + AFTER] * shape.layers
        return [self.visual] * shape.layers, self.batch * shape.prefill_flops(length)

    def _oracle(self, case: Case, layers: list[int]) -> tuple[float, float | None]:
        """Return the milliseconds of the unpatched decoder at the layers' prompt lengths: eager, and as a graph."""
        counts = lengths(layers)
        for count in counts:
            if count not in self._oracles:
                run = case.oracle_of(count)
                run()
                milliseconds = [1000 * self.clocks.clock(run)[0] for _ in range(1 if self.sheet.tiny else self.rounds)]
                self._oracles[count] = median(milliseconds), self.clocks.graph_ms(run, self.rounds)[0]
        times = {count: self._oracles[count] for count in counts}
        graphs = None if any(graph_ms is None for _, graph_ms in times.values()) else weighted(times, layers, 1)
        return weighted(times, layers, 0), graphs
