# SPDX-License-Identifier: Apache-2.0
"""Speed-ups that papers print beside ours on a GPU: docs/results/peers.md, from the tables of
benchmarks/experiments/gpu.

    python benchmarks/experiments/peers.py --page

Ours: prefills of a 7 B decoder with random weights (gpu/b_llava_next.py, gpu/f_llava15.py), batch 1. Theirs: what a
paper prints (experiments/papers/speedups.json), of its own implementation, model and device. `By FLOPs`: the closed
form at that size, which no implementation beats on a device that is limited by arithmetic.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
from common import AFTER, BEFORE, fill_page
from limits import SHAPES

from tokenprune.models.decoder_shape import DecoderShape

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
import sheets

PUBLISHED = Path(__file__).parent / "papers" / "speedups.json"
PAGE = Path(__file__).parents[2] / "docs/results/peers.md"
BEGIN, END = "<!-- peers:begin (benchmarks/experiments/peers.py --page) -->", "<!-- peers:end -->"
TABLES = {"f_llava15": "LLaVA-1.5-7B", "b_llava_next": "LLaVA-NeXT-7B"}
PRINTED = (64, 320)  # tokens left where papers print a ratio
MISSING = (
    "**Missing until a GPU run (`python experiments/gpu/run.py`): our ratios at the same counts, LLaVA-1.5-7B 576 to "
    "192, 128 and 64, LLaVA-NeXT-7B 2880 to 640, 320 and 160.**"
)
COLUMNS = ("method", "model", "tokens", "prefill", "GPU busy", "by FLOPs", "KV cache", "peak memory", "bound by")


def published() -> list[dict[str, Any]]:
    """Return what papers print, each with its `ratio`, before / after."""
    made = []
    for one in json.loads(PUBLISHED.read_text()):
        ratio = one["ratio"] if "ratio" in one else one["before"] / one["after"]
        made.append(one | {"ratio": ratio})
    return made


def by_flops(visual: int, layers: list[int]) -> float:
    """Return the ratio of a 7 B LLaVA's decoder FLOPs in prefill, unpatched over patched. layers: tokens of each."""
    shape, text = DecoderShape.from_config(SHAPES[0].made().get_text_config()), BEFORE + AFTER
    whole = shape.prefill_flops([visual + text] * len(layers))
    return whole / shape.prefill_flops([left + text for left in layers])


def ours(model: str, found: list[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of a table's methods, beside its unpatched model; rows that were cut off have none."""
    alone = [row for row in found if row.get("batch") == 1 and "ms" in row]
    whole = next((row for row in alone if row["method"] == "none"), None)
    return [
        [
            f"`{row['method']}`", model, f"{row['visual']} to {row['keep']}", f"x{row['speedup']:.2f}",
            f"x{_busy(whole) / _busy(row):.2f}",
            f"x{by_flops(row['visual'], row['layers']):.2f}", f"{row['kv_bytes'] / whole['kv_bytes']:.0%}",
            f"{row['peak_bytes'] / max(1, whole['peak_bytes']):.0%}", row["bound"],
        ]
        for row in alone
        if whole and row["method"] != "none" and row["keep"] in PRINTED
    ]  # fmt: skip


def _busy(row: dict[str, Any]) -> float:
    """Return the milliseconds that the GPU is busy in a prefill, which are at most the milliseconds of the prefill."""
    return min(row["ms"]["p50"], row["device_ms"])


def page() -> str:
    """Return both tables as Markdown."""
    text = []
    for name, model in TABLES.items():
        for _, header, found in sheets.found(name):
            text += [f"Ours, {sheets.where(header)}", "", "| " + " | ".join(COLUMNS) + " |"]
            text += ["|---|---|---|" + "---:|" * (len(COLUMNS) - 3)]
            text += ["| " + " | ".join(row) + " |" for row in ours(model, found)] + [""]
    text = text or [MISSING, ""]
    text += [
        "Published, by others on their machines (not measured here):",
        "",
        "| method | printed in | model | what | setting | device | speed-up |",
        "|---|---|---|---|---|---|---:|",
    ]
    for one in published():
        source = f"{one['source']}, {one['where']}"
        text.append(
            f"| {one['title']} | {source} | {one['model']} | {one['measured']} | {one['setting']} "
            f"| {one['device'] or 'not noted'} | x{one['ratio']:.2f} |"
        )
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the tables into docs/results/peers.md")
    if parser.parse_args().page:
        fill_page(PAGE, BEGIN, END, page())
    else:
        print(page())


if __name__ == "__main__":
    main()
