# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL-7B's shape, 16384 visual tokens of a video, from pixels to the first token: tower, choosing, prefill.

64 frames of 256 tokens, random weights, a quarter of the tokens stays (pevlm removes none, and reads the video in
blocks; pixelprune drops what repeats). "tower": the vision tower; "prefill": the decoder, with choosing in it; "first
token": from the call to the choice of a word.
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
    """Return the model, with the published tower."""
    if sheet.tiny:
        return qwen("tiny", sheet.device, sheet.dtype)
    tower = next(one for one in SHAPES if one.label.startswith("Qwen2.5-VL-7B")).config["vision_config"]
    return qwen("qwen2.5-7b", sheet.device, sheet.dtype, tower)


class Stages:
    """Times of the tower and of the decoder in a forward."""

    def __init__(self, model: Any, clocks: Clocks) -> None:
        self.marks, self.spans, self._stack = clocks.marks, {}, ExitStack()
        for name, module in (("tower_ms", model.model.visual), ("prefill_ms", model.model.language_model)):
            # First in, last out: what a patch does at the module's entry is in its time.
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


def measure(sheet: Sheet, clocks: Clocks, model: Any, given: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the row of a method."""
    cache: list[Any] = []

    def run() -> None:
        cache.clear()
        out = model(**given, use_cache=True, logits_to_keep=1)
        out.logits[:, -1:].argmax(-1)
        cache.append(out.past_key_values)

    keep = {} if name == "pevlm" else {"keep": KEEP}
    with nullcontext() if name == NONE else tokenprune.patched(model, name, guard="off", **keep):
        run()
        tokens = int((given["mm_token_type_ids"] > 0).sum())
        kept = tokens if name == NONE else tokenprune.stats(model).visual_tokens_out
        stages, taken, parts, choosing = Stages(model, clocks), [], [], []
        for _ in range(1 if sheet.tiny else 3):
            with Choosing(sheet.device) as cut:
                taken.append(1000 * clocks.clock(run)[0])
            parts.append(stages.read())
            choosing.append(cut.ms)
        stages.close()
        kv = held(cache[0])
        cache.clear()
        with peak_of(sheet.device) as peak:
            run()
        busy = clocks.busy_ms(run)
    cache.clear()
    whole = sheet.rows.known((NONE,))
    return {
        "method": name, "kept": kept, "ms": ladder(taken), "device_ms": busy, "choosing_ms": median(choosing),
        **{part: median(one[part] for one in parts) for part in parts[0]},
        "speedup": whole[0]["ms"]["p50"] / median(taken) if whole and "ms" in whole[0] else None,
        "peak_bytes": peak.bytes, "kv_bytes": kv, "bound": bound(median(taken), busy),
    }  # fmt: skip


def main(given: Sequence[str] | None = None) -> int:
    title, shape = "A video of 16384 visual tokens, from pixels to the first token", "Qwen2.5-VL-7B's shape"
    sheet = Sheet("d_video", title, shape, COLUMNS, __doc__, given)
    model, clocks = build(sheet), Clocks(sheet.device, sheet.tiny)
    torch.manual_seed(0)
    prompt = videos.inputs(model, TINY_GRID if sheet.tiny else GRID, sheet.device)
    for name in (NONE, *METHODS):
        sheet.take((name,), partial(measure, sheet, clocks, model, prompt, name))
        sheet.free()
    return sheet.end()


if __name__ == "__main__":
    raise SystemExit(main())
