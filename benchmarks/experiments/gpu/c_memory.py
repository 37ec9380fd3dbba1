# SPDX-License-Identifier: Apache-2.0
"""Measure peak memory of a prefill with attention-based methods, and with attention weights as in the authors' code.

The model is a 7 B decoder with 2880 and 16128 visual tokens, of which a ninth is kept. "eager, one layer" is the
unpatched model whose third layer computes attention weights with a mask of all pairs, as FastV's authors do. "above
none" is the cost of the weights. VidCom2 (Table 4) reports a rise of the peak by 38 to 53 % with such methods.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from kit import Sheet  # isort: skip
import torch
from clocks import Clocks
from common import Clock
from efficiency import Case
from prefills import NONE, held, model_of, peak_of

import tokenprune

METHODS = ("fastv", "sparsevlm", "pyramiddrop", "dart", "visionzip", "cdpruner", "divprune")
EAGER, LAYER = "eager, one layer", 2
COLUMNS = {
    "method": "method", "visual": "visual", "keep": "kept", "peak_bytes": "peak MiB", "rise_share": "above none",
    "weights_bytes": "the weights alone MiB", "kv_bytes": "KV MiB", "ms": "prefill ms", "bound": "bound by",
}  # fmt: skip


@contextmanager
def attention_weights(model: Any) -> Iterator[None]:
    """Let one layer compute its attention weights with eager attention."""
    attention = model.model.language_model.layers[LAYER].self_attn
    before, attention.config = attention.config, copy.copy(attention.config)
    attention.config._attn_implementation = "eager"

    def with_mask(_: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        length, lowest = hidden.shape[1], torch.finfo(hidden.dtype).min
        mask = torch.full((length, length), lowest, device=hidden.device, dtype=hidden.dtype).triu_(1)
        return args, kwargs | {"attention_mask": mask[None, None]}

    hook = attention.register_forward_pre_hook(with_mask, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
        attention.config = before


def measure(sheet: Sheet, clocks: Clocks, model: Any, visual: int, name: str) -> dict[str, Any]:
    """Return the row of a method."""
    case = Case(model, visual, visual // 9, Clock(sheet.device))
    if name == NONE:
        patched, images = nullcontext(), "random"
    elif name == EAGER:
        patched, images = attention_weights(model), "random"
    else:
        patched, images = tokenprune.patched(model, name, guard="off", **case.setting(name)), name
    with patched:
        run = case.prefill_of(case.images(images))
        run()
        case.cache = None
        with peak_of(sheet.device) as peak:
            run()
        kv, case.cache = held(case.cache), None
        row = clocks.timed(run, rounds=3)
    base, length = next(iter(sheet.rows.known((NONE, visual))), {}), case.ids.shape[1]
    return {
        "method": name, "visual": visual, "keep": visual if name in (NONE, EAGER) else case.keep,
        "peak_bytes": peak.bytes, "kv_bytes": kv, **row,
        "rise_share": peak.bytes / base["peak_bytes"] - 1 if "peak_bytes" in base else None,
        "weights_bytes": model.config.text_config.num_attention_heads * length**2 * model.dtype.itemsize,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    sheet = Sheet("c_memory", "Peak memory beside attention weights", "LLaVA-NeXT-7B's decoder", COLUMNS, __doc__, argv)
    model, clocks = model_of(sheet), Clocks(sheet.device, sheet.tiny)
    for visual in (576,) if sheet.tiny else (2880, 28 * 576):
        for name in (NONE, EAGER, *METHODS):
            sheet.take((name, visual), partial(measure, sheet, clocks, model, visual, name))
            sheet.free()
    return sheet.end()


if __name__ == "__main__":
    raise SystemExit(main())
