# SPDX-License-Identifier: Apache-2.0
"""Decoding steps after 2880 visual tokens and after 320 kept tokens, and the largest batch.

The decoder of LLaVA-NeXT-7B runs at batch 1, 16 and 32 with three caches: a dynamic cache, a dynamic cache with
`graphs=True`, which replays the steps, and a static cache. The step of the static cache is also captured here as a CUDA
graph. Compare rows with graphs to the row "none" with graphs. "first ms": the step that captures. "largest": the
maximum batch that fits into memory during a decoding step (bisection). Each request has 64 text tokens and 64 new
tokens besides its visual tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from kit import Sheet  # isort: skip
import torch
from clocks import Clocks
from common import AFTER, BEFORE, Clock
from efficiency import Case
from prefills import NONE, held, model_of
from transformers import DynamicCache, StaticCache

import tokenprune
from tokenprune.integrations.hf.families import get_adapter
from tokenprune.integrations.hf.graphs import Graphs
from tokenprune.integrations.hf.graphs.decoder import GraphedDecoder, build_graphed_decoder
from tokenprune.integrations.shared.attachment import get_attachment
from tokenprune.models.decoder_shape import DecoderShape

METHODS, BATCHES, MORE = (NONE, "divprune", "fastv"), (1, 16, 32), 64
BYTES = 100 << 30  # limit of the graphs, so that the buffers of the largest batch fit
COLUMNS = {
    "method": "method", "what": "what", "left": "visual tokens in the cache", "batch": "batch", "ms": "step ms",
    "graph_ms": "as a graph ms", "token_ms": "ms a token", "of_none": "as fast as none", "kv_bytes": "KV MiB",
    "first_ms": "first ms", "graphs_bytes": "graphs MiB", "bound": "bound by",
}  # fmt: skip


class Steps:
    """The rows of one prompt."""

    def __init__(self, sheet: Sheet, visual: int, keep: int) -> None:
        self.sheet, self.visual, self.keep = sheet, visual, keep
        self.model, self.clocks = model_of(sheet), Clocks(sheet.device, sheet.tiny)
        self.weights = sum(parameter.nbytes for parameter in self.model.parameters())
        self.text = self.model.config.get_text_config()

    def patched(self, name: str) -> Any:
        return nullcontext() if name == NONE else tokenprune.patched(self.model, name, guard="off", keep=self.keep)

    @contextmanager
    def graphed(self, name: str) -> Iterator[GraphedDecoder]:
        """Patch the model with graphs, or only replay graphs without a method."""
        graphs = Graphs(bytes=BYTES)
        if name != NONE:
            with tokenprune.patched(self.model, name, guard="off", keep=self.keep, graphs=graphs):
                parts = get_attachment(self.model).engine.parts
                yield next(part for part in parts if isinstance(part, GraphedDecoder))
            return
        [part] = build_graphed_decoder(get_adapter(self.model), graphs)
        part.attach()
        try:
            yield part
        finally:
            part.detach()

    def replayed(self, name: str, batch: int) -> dict[str, Any]:
        """Return the row of a replayed step with a dynamic cache."""
        case = Case(self.model, self.visual, self.keep, Clock(self.sheet.device), batch)
        token = case.ids[:, -1:]
        with self.graphed(name) as part:
            cache = self.model(
                input_ids=case.ids,
                mm_encoder_outputs={"image": case.images("random")},
                use_cache=True,
                logits_to_keep=1,
            ).past_key_values

            def run() -> None:
                self.model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)

            run()  # captures the groups of layers
            first = 1000 * self.clocks.clock(run)[0]
            kv, flops = held(cache), 2 * batch * self.weights / self.model.dtype.itemsize
            row = self.clocks.timed(run, flops, self.weights + kv, graph=False)
            misses = [reason for reason in part.steps if reason and not reason.startswith("the first step")]
            row |= {"hits": part.steps[""], "why_not": "; ".join(misses), "graphs_bytes": part.buckets.bytes}
        known = self.sheet.rows.known((NONE, "graphs", batch))
        best = row["ms"]["p50"]
        return {
            "method": name, "what": "step, graphs=True", "left": self.visual if name == NONE else self.keep,
            "batch": batch, **row, "best_ms": best, "token_ms": best / batch, "kv_bytes": kv, "first_ms": first,
            "of_none": known[0]["best_ms"] / best if known and "best_ms" in known[0] else None,
        }  # fmt: skip

    def step(self, name: str, kind: str, batch: int) -> dict[str, Any]:
        """Return the row of a step. kind: "dynamic" or "static" cache."""
        case = Case(self.model, self.visual, self.keep, Clock(self.sheet.device), batch)
        length = case.ids.shape[1]
        with self.patched(name):
            cache = StaticCache(config=self.text, max_cache_len=length + MORE) if kind == "static" else None
            images = {"image": case.images("random")}
            cache = self.model(
                input_ids=case.ids, mm_encoder_outputs=images, past_key_values=cache, use_cache=True, logits_to_keep=1
            ).past_key_values
            left = self.visual if name == NONE else tokenprune.stats(self.model).visual_tokens_out // batch
            token = case.ids[:, -1:]

            def run() -> None:
                self.model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)

            kv, flops = held(cache), 2 * batch * self.weights / self.model.dtype.itemsize
            # Capturing a step with a dynamic cache would hold the cache twice.
            row = self.clocks.timed(run, flops, self.weights + kv, graph=kind == "static")
        known = self.sheet.rows.known((NONE, kind, batch))
        best = row["ms"]["p50"] if row["graph_ms"] is None else row["graph_ms"]
        return {
            "method": name, "what": f"step, {kind} cache", "left": left, "batch": batch, **row, "best_ms": best,
            "token_ms": best / batch, "kv_bytes": kv,
            "of_none": known[0]["best_ms"] / best if known and "best_ms" in known[0] else None,
        }  # fmt: skip

    def largest(self, name: str) -> dict[str, Any]:
        """Return the row of the largest batch."""
        shape = DecoderShape.from_config(self.text)
        with self.patched(name):
            layers = [self.visual] * shape.layers
            if name != NONE:
                case = Case(self.model, self.visual, self.keep, Clock(self.sheet.device))
                case.prefill(case.images("random"))
                layers = tokenprune.stats(self.model).visual_tokens_per_layer
        lengths = [BEFORE + count + AFTER + MORE for count in layers]
        request_bytes = shape.kv_bytes(lengths, self.model.dtype.itemsize)
        batch = largest_batch(partial(self._fits, lengths), self.guess(request_bytes))
        return {
            "method": name, "what": "largest batch", "left": layers[-1], "batch": batch,
            "kv_bytes": batch * request_bytes, "bound": "memory",
        }  # fmt: skip

    def guess(self, request_bytes: int) -> int:
        """Return the batch that begins the search: the free bytes divided by the bytes of a request."""
        free = torch.cuda.mem_get_info()[0] if self.sheet.device.type == "cuda" else 2**20
        return max(1, free // request_bytes)

    def _fits(self, lengths: Sequence[int], batch: int) -> bool:
        """Return whether a decoding step of `batch` requests fits. On the CPU, the cache must stay below 1 MiB."""
        heads, width = self.text.num_key_value_heads, self.text.head_dim
        cache, states = DynamicCache(config=self.text), None
        try:
            for layer, length in enumerate(lengths):
                states = torch.zeros(2, batch, heads, length, width, device=self.sheet.device, dtype=self.model.dtype)
                cache.update(states[0], states[1], layer)
            token = torch.full((batch, 1), 20, device=self.sheet.device)
            decoder = self.model.model.language_model
            position = torch.full((batch, 1), max(lengths), device=self.sheet.device)
            decoder(inputs_embeds=decoder.embed_tokens(token), past_key_values=cache, position_ids=position)
            self.clocks.clock.wait()
            return self.sheet.device.type == "cuda" or held(cache) < 2**20
        except torch.OutOfMemoryError:
            return False
        finally:
            del cache, states
            self.sheet.free()


def largest_batch(fits: Callable[[int], bool], start: int) -> int:
    """Return the largest batch that fits, at most 1/32 too small. Return 0 if a batch of 1 does not fit."""
    low, high = 0, start
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def main(argv: Sequence[str] | None = None) -> int:
    sheet = Sheet("g_decode", "A step of decoding", "LLaVA-NeXT-7B's decoder", COLUMNS, __doc__, argv)
    steps = Steps(sheet, *((288, 32) if sheet.tiny else (2880, 320)))
    for batch in (1, 2) if sheet.tiny else BATCHES:
        for kind in ("dynamic", "graphs", "static"):
            for name in METHODS:
                run = (
                    partial(steps.replayed, name, batch) if kind == "graphs" else partial(steps.step, name, kind, batch)
                )
                sheet.take((name, kind, batch), run)
                sheet.free()
    for name in METHODS:
        sheet.take((name, "largest"), partial(steps.largest, name))
        sheet.free()
    return sheet.end()


if __name__ == "__main__":
    raise SystemExit(main())
