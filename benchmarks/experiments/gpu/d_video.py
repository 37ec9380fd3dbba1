# SPDX-License-Identifier: Apache-2.0
"""Measure a video of 16384 visual tokens in the shape of Qwen2.5-VL-7B, from pixels to the first token.

The video has 64 frames of 256 tokens, the weights are random, and a quarter of the tokens is kept. (pevlm removes no
tokens and uses block attention; pixelprune drops repetitions.) "tower" is the vision tower, "prefill" is the decoder
including token selection, and "first token" is the time from the call to the argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from statistics import median
from typing import Any

from kit import Sheet  # isort: skip
import torch
import video_inputs as videos
from clocks import Choosing, Clocks, bound
from common import ladder, qwen
from limits import SHAPES
from prefills import NONE, held, peak_of

import tokenprune

METHODS = ("evs", "vidcom2", "dart", "divprune", "holitom", "pevlm", "tome", "pixelprune")
KEEP, GRID, TINY_GRID = 0.25, (64, 16, 16), (8, 4, 4)
COLUMNS = {
    "method": "method", "kept": "tokens left", "tower_ms": "tower ms", "choosing_ms": "choosing ms",
    "prefill_ms": "prefill ms", "ms": "first token ms", "speedup": "speed-up", "device_ms": "GPU busy ms",
    "peak_bytes": "peak MiB", "kv_bytes": "KV MiB", "bound": "bound by",
}  # fmt: skip


def build(sheet: Sheet) -> Any:
    """Build the model with the published tower."""
    if sheet.tiny:
        return qwen("tiny", sheet.device, sheet.dtype)
    tower = next(shape for shape in SHAPES if shape.label.startswith("Qwen2.5-VL-7B")).config["vision_config"]
    return qwen("qwen2.5-7b", sheet.device, sheet.dtype, tower)


class Stages:
    """Measure the times of tower and decoder in a forward."""

    def __init__(self, model: Any, clocks: Clocks) -> None:
        self.marks, self.spans, self._stack = clocks.marks, {}, ExitStack()
        for name, module in (("tower_ms", model.model.visual), ("prefill_ms", model.model.language_model)):
            # Registered first, so that a stage includes the work of a patch at the module's entry and exit.
            enter = module.register_forward_pre_hook(partial(self._begin, name), prepend=True)
            leave = module.register_forward_hook(partial(self._end, name))
            self._stack.callback(enter.remove)
            self._stack.callback(leave.remove)

    def _begin(self, name: str, *_: Any) -> None:
        self.spans[name] = [self.marks.now()]

    def _end(self, name: str, *_: Any) -> None:
        self.spans[name].append(self.marks.now())

    def read(self) -> dict[str, float]:
        """Return the milliseconds of each stage of the last forward."""
        return {name: self.marks.ms(*span) for name, span in self.spans.items()}

    def close(self) -> None:
        self._stack.close()


def measure(sheet: Sheet, clocks: Clocks, model: Any, inputs: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the row of a method."""
    cache: list[Any] = []

    def run() -> None:
        cache.clear()
        out = model(**inputs, use_cache=True, logits_to_keep=1)
        out.logits[:, -1:].argmax(-1)
        cache.append(out.past_key_values)

    keep = {} if name == "pevlm" else {"keep": KEEP}
    with nullcontext() if name == NONE else tokenprune.patched(model, name, guard="off", **keep):
        run()
        tokens = int((inputs["mm_token_type_ids"] > 0).sum())
        kept = tokens if name == NONE else tokenprune.stats(model).visual_tokens_out
        stages, milliseconds, parts, choosing = Stages(model, clocks), [], [], []
        for _ in range(1 if sheet.tiny else 3):
            with Choosing(sheet.device) as cut:
                milliseconds.append(1000 * clocks.clock(run)[0])
            parts.append(stages.read())
            choosing.append(cut.ms)
        stages.close()
        kv = held(cache[0])
        cache.clear()
        with peak_of(sheet.device) as peak:
            run()
        busy = clocks.busy_ms(run)
    cache.clear()
    unpatched = sheet.rows.known((NONE,))
    return {
        "method": name, "kept": kept, "ms": ladder(milliseconds), "device_ms": busy, "choosing_ms": median(choosing),
        **{part: median(part_times[part] for part_times in parts) for part in parts[0]},
        "speedup": unpatched[0]["ms"]["p50"] / median(milliseconds) if unpatched and "ms" in unpatched[0] else None,
        "peak_bytes": peak.bytes, "kv_bytes": kv, "bound": bound(median(milliseconds), busy),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    title, shape = "A video of 16384 visual tokens, from pixels to the first token", "Qwen2.5-VL-7B's shape"
    sheet = Sheet("d_video", title, shape, COLUMNS, __doc__, argv)
    model, clocks = build(sheet), Clocks(sheet.device, sheet.tiny)
    torch.manual_seed(0)
    prompt = videos.inputs(model, TINY_GRID if sheet.tiny else GRID, sheet.device)
    for name in (NONE, *METHODS):
        sheet.take((name,), partial(measure, sheet, clocks, model, prompt, name))
        sheet.free()
    return sheet.end()


if __name__ == "__main__":
    raise SystemExit(main())
