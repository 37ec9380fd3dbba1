# SPDX-License-Identifier: Apache-2.0
"""Compare `patch(..., graphs=True)` with the same patch without graphs: prefill, and 64 tokens of `generate`.

Prefill: LLaVA-1.5-7B's decoder with 576 visual tokens to 64 and 192, and as in LLaVA-NeXT 2880 to 320, with encoded
images. Eager and graph runs take turns. The length limits are the defaults, so prompts above 1024 tokens are not
replayed (see the raw file). "first replay" is the call that captures, after one that records the layers. "gap" is the
difference between the logits of both, relative to their norm. "GPU busy" is the kernel time of the eager run in the
profiler. 64 tokens: `generate` from pixels on, with a dynamic cache, with `cache_implementation="static"` (whose steps
transformers compiles on a GPU), with graphs of prefill and steps, and with both. Its "first replay" is the sum of the
first two answers, which record groups and capture graphs. "auto": the first four answers with `graphs="auto"`, and the
peak memory with and without graphs. `none` is the unpatched model, with graphs by `tokenprune.graphs.graphed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

from kit import Sheet  # isort: skip
import torch
from clocks import Clocks, bound
from common import Clock
from efficiency import TILE, Case
from prefills import NONE, model_of

import tokenprune
from tokenprune.integrations.hf.families import get_adapter
from tokenprune.integrations.hf.graphs import Graphs
from tokenprune.integrations.hf.graphs.decoder import GraphedDecoder, build_graphed_decoder
from tokenprune.integrations.shared.attachment import get_attachment

METHODS = ("random", "divprune", "visionzip", "cdpruner", "fastv", "dart")
ANSWER, ROUNDS = 64, 3  # tokens, and runs per turn
COMPILING = 90.0  # maximum seconds of a row whose steps transformers compiles
COLUMNS = {
    "method": "method", "what": "what", "batch": "batch", "visual": "visual", "keep": "kept", "eager_ms": "eager ms",
    "graphs_ms": "graphs ms", "static_ms": "static cache ms", "both_ms": "static cache, graphs ms",
    "times": "times as fast", "device_ms": "GPU busy ms", "first_ms": "first replay ms", "graphs_bytes": "graphs MiB",
}  # fmt: skip


class Ways:
    """A method on one prompt, with and without graphs."""

    def __init__(self, sheet: Sheet, model: Any, name: str, visual: int, keep: int, batch: int) -> None:
        self.sheet, self.model, self.name = sheet, model, name
        self.case = Case(model, visual, keep, Clock(sheet.device), batch)
        self.setting = {} if name == NONE else self.case.setting(name)
        self.about = {"method": name, "batch": batch, "visual": visual, "keep": keep}

    @contextmanager
    def patched(self, graphs: bool | str | Graphs) -> Iterator[GraphedDecoder | None]:
        """Patch the model and yield the part that replays its prefill."""
        if self.name != NONE:
            with tokenprune.patched(self.model, self.name, guard="off", graphs=graphs, **self.setting):
                parts = get_attachment(self.model).engine.parts
                yield next((part for part in parts if isinstance(part, GraphedDecoder)), None)
            return
        parts = build_graphed_decoder(get_adapter(self.model), graphs)
        for part in parts:
            part.attach()
        try:
            yield parts[0] if parts else None
        finally:
            for part in parts:
                part.detach()

    def prefill(self, images: Any) -> torch.Tensor:
        """Return the logits of the last token, shape (batch, 1, vocabulary)."""
        torch.manual_seed(0)
        encoded = {"image": images}
        return self.model(input_ids=self.case.ids, mm_encoder_outputs=encoded, use_cache=True, logits_to_keep=1).logits

    def answer(self, **options: Any) -> torch.Tensor:
        """Return the tokens of an answer."""
        torch.manual_seed(0)
        pixels = self.case.pixels(self.case.batch * (self.case.visual // TILE))
        ids, num_tokens = self.case.ids, 4 if self.sheet.tiny else ANSWER
        arguments = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False} | options
        return self.model.generate(
            input_ids=ids, pixel_values=pixels, attention_mask=torch.ones_like(ids), pad_token_id=0, **arguments
        )

    def times(self, run: Callable[[], Any]) -> list[float]:
        return [1000 * self.case.clock(run)[0] for _ in range(1 if self.sheet.tiny else ROUNDS)]


def of_prefill(sheet: Sheet, clocks: Clocks, model: Any, *which: Any) -> dict[str, Any]:
    """Return the row of a prefill."""
    ways = Ways(sheet, model, *which)
    eager: list[float] = []
    graphs: list[float] = []
    for _ in range(1 if sheet.tiny else 2):
        with ways.patched(False):
            run = partial(ways.prefill, ways.case.images("random" if ways.name == NONE else ways.name))
            expected = run()
            eager += ways.times(run)
            busy = clocks.busy_ms(run)
        with ways.patched(True) as part:
            run()  # records which layers follow each other
            first = 1000 * clocks.clock(run)[0]
            graphs += ways.times(run)
            gap = (run() - expected).float().norm() / expected.float().norm()
            counts = counted(part)
    return ways.about | counts | compared(eager, graphs) | {
        "what": "prefill", "first_ms": first, "gap": float(gap), "device_ms": busy, "bound": bound(median(graphs), busy)
    }  # fmt: skip


def of_answer(sheet: Sheet, clocks: Clocks, model: Any, *which: Any) -> dict[str, Any]:
    """Return the row of an answer."""
    ways = Ways(sheet, model, *which)
    milliseconds: dict[bool, list[float]] = {}
    for graphs in (False, True):
        with ways.patched(graphs) as part:
            first = 1000 * (clocks.clock(ways.answer)[0] + clocks.clock(ways.answer)[0])
            milliseconds[graphs] = ways.times(ways.answer)
            counts = counted(part) if part is not None else {}
    return (
        ways.about
        | counts
        | compared(milliseconds[False], milliseconds[True])
        | {"what": what(ways), "first_ms": first}
    )


def of_auto(sheet: Sheet, clocks: Clocks, model: Any, *which: Any) -> dict[str, Any]:
    """Return the row of the first answers with `graphs="auto"`, and of peak memory."""
    ways, peaks = Ways(sheet, model, *which), {}
    milliseconds: list[float] = []
    for graphs in (False, "auto"):
        sheet.free()
        if sheet.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with ways.patched(graphs) as part:
            milliseconds = [1000 * clocks.clock(ways.answer)[0] for _ in range(4)]
            counts = counted(part) if part is not None else {}
        peaks[graphs] = torch.cuda.max_memory_allocated() if sheet.device.type == "cuda" else 0
    about = {"what": f"{what(ways)}, auto", "answers_ms": milliseconds, "graphs_ms": milliseconds[-1]}
    return ways.about | counts | about | {"peak_bytes": peaks["auto"], "eager_peak_bytes": peaks[False]}


def of_static(graphs: bool, sheet: Sheet, clocks: Clocks, model: Any, *which: Any) -> dict[str, Any]:
    """Return the row of an answer with a static cache."""
    ways = Ways(sheet, model, *which)
    run = partial(ways.answer, cache_implementation="static")
    with ways.patched(Graphs(static=True) if graphs else False) as part:
        run()
        run()
        milliseconds = median(ways.times(run))
        counts = counted(part) if part is not None else {}
    eager = next((row["eager_ms"] for row in sheet.rows.known(("64 tokens", *which))), None)
    times = eager / milliseconds if eager else None
    return (
        ways.about | counts | {"what": what(ways), "both_ms" if graphs else "static_ms": milliseconds, "times": times}
    )


def what(ways: Ways) -> str:
    return f"{4 if ways.sheet.tiny else ANSWER} tokens"


def counted(part: GraphedDecoder) -> dict[str, Any]:
    """Return the counts of the graphs: hits, reasons for misses except the first call, and bytes."""
    stats = SimpleNamespace()
    part.add_stats(stats)  # type: ignore[arg-type]  # the unpatched model lacks other statistics
    reasons = [*stats.graphs.misses, *stats.graphs.step_misses]
    misses = [reason for reason in reasons if not reason.startswith(("the first prompt", "the first step"))]
    return {
        "hits": stats.graphs.hits, "step_hits": stats.graphs.step_hits, "captured": stats.graphs.captured,
        "why_not": "; ".join(misses), "graphs_bytes": stats.graphs.bytes,
    }  # fmt: skip


def compared(eager: list[float], graphs: list[float]) -> dict[str, float]:
    return {"eager_ms": median(eager), "graphs_ms": median(graphs), "times": median(eager) / median(graphs)}


def main(argv: Sequence[str] | None = None) -> int:
    sheet = Sheet("i_graphs", "Prefill as graphs", "LLaVA-1.5-7B's and LLaVA-NeXT-7B's decoder", COLUMNS, __doc__, argv)
    model, clocks = model_of(sheet), Clocks(sheet.device, sheet.tiny)
    prompts = ((576, (64,)),) if sheet.tiny else ((576, (64, 192)), (2880, (320,)))
    answers = [(name, 576, 576 if name == NONE else 64, 1) for name in (NONE, "divprune", "fastv")]

    def take(kind: str, run: Callable[..., Any], *which: Any, seconds: float | None = None) -> None:
        sheet.take((kind, *which), partial(run, sheet, clocks, model, *which), seconds)
        sheet.free()

    batches = (1,) if sheet.tiny else (1, 8)
    # The prefills of an earlier run are known, so answers come first.
    for batch in batches:
        for which in answers:
            take("64 tokens", of_answer, *which[:-1], batch)
        if batch == 1:
            for which in answers[:2]:
                take("64 tokens, auto", of_auto, *which)
    for which in answers[:2]:
        take("64 tokens, static cache", partial(of_static, False), *which, seconds=COMPILING)
    for batch in batches:
        for visual, keeps in prompts:
            for name, keep in [(NONE, visual), *((name, keep) for keep in keeps for name in METHODS)]:
                take("prefill", of_prefill, name, visual, keep, batch)
    # Last, because a device error of a replay beside compiled steps would end the process.
    for which in answers[:2]:
        take("64 tokens, static cache, graphs", partial(of_static, True), *which, seconds=COMPILING)
    return sheet.end()


if __name__ == "__main__":
    raise SystemExit(main())
