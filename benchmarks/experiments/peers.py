# SPDX-License-Identifier: Apache-2.0
"""Write docs/results/peers.md: measured and published speed-ups.

    python benchmarks/experiments/peers.py --page

Measured: prefills of a 7 B decoder with random weights at batch 1 (gpu/b_llava_next.py, gpu/f_llava15.py). Published:
numbers that papers print for their own implementation, model and device (experiments/papers/speedups.json). `By FLOPs`
is the limit in closed form.
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
PRINTED = (64, 320)  # kept tokens with a speed-up in the papers
MISSING = "**No GPU results. Run `python benchmarks/experiments/gpu/run.py`.**"
COLUMNS = ("method", "GPU busy", "by FLOPs", "eager prefill", "KV cache")


def published() -> list[dict[str, Any]]:
    """Return the published entries, each with its `ratio` of times before and after."""
    return [
        entry | {"ratio": entry["ratio"] if "ratio" in entry else entry["before"] / entry["after"]}
        for entry in json.loads(PUBLISHED.read_text())
    ]


def by_flops(visual: int, layers: list[int]) -> float:
    """Return unpatched / patched prefill FLOPs of a 7 B LLaVA's decoder.

    `layers` has the visual tokens of each layer.
    """
    shape, text = DecoderShape.from_config(SHAPES[0].build_config().get_text_config()), BEFORE + AFTER
    unpatched = shape.prefill_flops([visual + text] * len(layers))
    return unpatched / shape.prefill_flops([kept + text for kept in layers])


def ours(records: list[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of each measured method at batch 1."""
    timed = [row for row in records if row.get("batch") == 1 and "ms" in row]
    base = next((row for row in timed if row["method"] == "none"), None)
    return [
        [
            f"`{row['method']}`",
            f"{_busy(base) / _busy(row):.2f}x",
            f"{by_flops(row['visual'], row['layers']):.2f}x",
            _describe_ratio(row["speedup"]),
            f"{row['kv_bytes'] / base['kv_bytes']:.0%}",
        ]
        for row in timed
        if base and row["method"] != "none" and row["keep"] in PRINTED
    ]


def _describe_ratio(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio >= 1 else f"{1 / ratio:.2f}x slower"


def _busy(row: dict[str, Any]) -> float:
    """Return the GPU busy time in ms, which is at most the prefill time."""
    return min(row["ms"]["p50"], row["device_ms"])


def page() -> str:
    """Return both tables as Markdown."""
    text = []
    for name, model in TABLES.items():
        for _, header, records in sheets.found(name):
            example_row = next(row for row in records if row.get("keep") in PRINTED)
            text += [
                f"**{model}, {example_row['visual']} to {example_row['keep']} tokens.** {sheets.where(header)}",
                "",
            ]
            text += ["| " + " | ".join(COLUMNS) + " |", "|---" + "|---:" * (len(COLUMNS) - 1) + "|"]
            text += ["| " + " | ".join(row) + " |" for row in ours(records)] + [""]
    text = text or [MISSING, ""]
    text += [
        "**Published**, measured by the authors on their machines:",
        "",
        "| method | source | model | setting | device | speed-up |",
        "|---|---|---|---|---|---:|",
    ]
    for entry in published():
        setting = entry["setting"] if entry["measured"] == "prefill" else f"{entry['measured']}, {entry['setting']}"
        text.append(
            f"| {entry['title']} | {entry['source']}, {entry['where']} | {entry['model']} | {setting} "
            f"| {entry['device'] or ''} | {entry['ratio']:.2f}x |"
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
