# SPDX-License-Identifier: Apache-2.0
"""What answering questions cost: visual tokens, FLOPs of prefill, bytes of the KV cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import tokenprune
from tokenprune.bench.model import Subject


@dataclass
class Cost:
    """`Stats`, summed over the batches of one pass (overhead_ms too); flops: of the decoder in prefill.

    An engine that is not in this process tells no overhead (None), and nothing that follows from the decoder's sizes
    where its config is not at hand (0).
    """

    visual_tokens_in: int = 0
    visual_tokens_out: int = 0
    visual_tokens_per_layer: list[int] = field(default_factory=list)
    flops: float = 0.0
    kv_bytes: int = 0
    kv_bytes_full: int = 0
    overhead_ms: float | None = 0.0

    def add(self, subject: Subject, inputs: dict[str, Any], kv_bytes: int | None = None) -> None:
        """Add the batch that just ran. kv_bytes: what its cache held after prefill, if the model was not patched."""
        rows, length = inputs["input_ids"].shape
        full = rows * subject.shape.prefill_flops([length] * subject.shape.layers)
        if kv_bytes is None:
            stats = tokenprune.stats(subject.model)
        else:
            visual = subject.visual_tokens(inputs)
            per_layer = [visual] * subject.shape.layers
            stats = tokenprune.Stats(visual, visual, per_layer, kv_bytes=kv_bytes, kv_bytes_full=kv_bytes)
        for name in ("visual_tokens_in", "visual_tokens_out", "kv_bytes", "kv_bytes_full", "overhead_ms"):
            setattr(self, name, getattr(self, name) + getattr(stats, name))
        before = self.visual_tokens_per_layer or [0] * len(stats.visual_tokens_per_layer)
        self.visual_tokens_per_layer = [a + b for a, b in zip(before, stats.visual_tokens_per_layer, strict=True)]
        self.flops += full * stats.prefill_flops_ratio

    @staticmethod
    def total(costs: Iterable[dict[str, Any]]) -> Cost:
        """Return the sum of costs that were made plain with `dataclasses.asdict`."""
        total = Cost()
        for cost in costs:
            layers = cost["visual_tokens_per_layer"]
            before = total.visual_tokens_per_layer or [0] * len(layers)
            for name, value in cost.items():
                if name != "visual_tokens_per_layer":
                    setattr(total, name, None if value is None else getattr(total, name) + value)
            total.visual_tokens_per_layer = [a + b for a, b in zip(before, layers, strict=True)]
        return total

    def record(self, whole: Cost) -> dict[str, Any]:
        """Return the fields of `Stats`, with all ratios taken against the unpatched model on the same questions.

        whole: the cost of the latter. A method that acts on pixels does not know what it saved.
        """
        record = asdict(self)
        flops = record.pop("flops")
        record["visual_tokens_in"] = whole.visual_tokens_in
        record["kv_bytes_full"] = whole.kv_bytes
        record["visual_tokens_average"] = sum(self.visual_tokens_per_layer) / max(1, len(self.visual_tokens_per_layer))
        record["keep_ratio"] = self.visual_tokens_out / max(1, whole.visual_tokens_in)
        record["prefill_flops_ratio"] = flops / whole.flops if whole.flops else None
        return record


class Prefill:
    """Reads from the cache itself how many bytes the last prefill left in it."""

    def __init__(self, subject: Subject) -> None:
        self.decoder, self.kv_bytes = subject.adapter.decoder, 0

    def __enter__(self) -> Prefill:
        self._handle = self.decoder.register_forward_hook(self._look, with_kwargs=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()

    def _look(self, module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        embeds, cache = kwargs.get("inputs_embeds"), kwargs.get("past_key_values")
        if embeds is not None and embeds.shape[1] > 1 and cache is not None:
            tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
            self.kv_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
