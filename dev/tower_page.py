# SPDX-License-Identifier: Apache-2.0
"""Generate parts of docs/results/methods.md (accuracy of `towerdrop`) and docs/results/speed.md (first token)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "dev"), str(ROOT / "benchmarks" / "experiments")]
import rows  # noqa: E402
from tables import format_keeps, format_share, format_table  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
BLOCKS = (RESULTS / "tower_blocks.jsonl", RESULTS / "tower_blocks-demo_smol.jsonl")
TOKENS = 1024  # of the image in benchmarks/experiments/first_token.py
FIRST_TOKEN = {
    RESULTS / "cpu/first_token.jsonl": "Qwen2.5-VL, every width an eighth of the 7 B model's",
    RESULTS / "cpu/first_token-internvl.jsonl": "InternVL3, four tiles, every width an eighth of the 2 B model's",
}
AFTER = {"diverse": "divprune", "random": "random"}  # the same rule after the tower


def blocks() -> str:
    """Return the tables of docs/results/methods.md: accuracy of each model by score and block."""
    about = (
        "Correct answers in %. Columns: tower block whose input loses the patches; `divprune` or `random` after the "
        "tower. `downsample` saves as much as block 0. ▼: significantly worse than `divprune`. By "
        "`python benchmarks/experiments/tower_blocks.py`."
    )
    return "\n\n".join([about, *map(_blocks, BLOCKS)])


def _blocks(path: Path) -> str:
    from tokenprune_bench.significance import LEVEL, better_p, wilson

    header, records = rows.read(path)
    by_setting = {
        (record["keep"], record.get("score", record["method"]), record.get("layer")): record for record in records
    }
    layers = range(1 + max(record.get("layer", 0) for record in records))
    keeps = sorted({keep for keep, *_ in by_setting} - {1.0})
    unpatched, parts, asked = by_setting[1.0, "unpatched", None], [], []
    for name, questions in header["questions"].items():
        widest = 0.0

        def cell(keep: float, what: str, layer: int | None, name: str = name) -> str:
            nonlocal widest
            if (record := by_setting.get((keep, what, layer))) is None:
                return ""
            low, high = wilson(record[name].count("1"), len(record[name]))
            widest = max(widest, 50 * (high - low))
            worse = better_p(by_setting[keep, "divprune", None][name], record[name]) < LEVEL
            return f"{format_share(record[name])}{' ▼' if worse else ''}"

        titles = [title for keep in keeps for title in (f"keep {keep}: 0", *map(str, layers[1:]), "after")]
        lines = []
        for score in dict.fromkeys(record["score"] for record in records if "score" in record):
            after = AFTER.get(score, "")
            cells = [
                text
                for keep in keeps
                for text in (*(cell(keep, score, layer) for layer in layers), cell(keep, after, None))
            ]
            lines.append([f"`{score}`", *cells])
        smaller = (cell(keep, "downsample", None) + " |" * len(layers) for keep in keeps)
        lines.append(["`downsample`", *smaller])
        parts.append(format_table([name, *titles], lines))
        share = f"unpatched {format_share(unpatched[name])} %, 95 %: up to ±{widest:.0f}"
        asked.append(f"{questions} about {header['images']} {name} ({share})")
    model, file = header["model"].partition(" ")[0], path.relative_to(ROOT)
    setting = f"**{model}**, a tower of {len(layers) + 1} blocks; {', '.join(asked)}; [raw data](../../{file})."
    return "\n\n".join([setting, *parts])


def first_token() -> str:
    """Return the speed-up of the first token by site for each model shape, in CPU time if the machine was busy."""
    parts = []
    for path, what in FIRST_TOKEN.items():
        header, records = rows.read(path)
        loaded = any(rows.is_loaded(row, header) for row in records)
        keeps = list(dict.fromkeys(row["keep"] for row in records))
        cells = {(row["way"], row["keep"]): _times(row, loaded) for row in records}
        title = "speed-up, CPU time" if loaded else "speed-up (range)"
        ways = dict.fromkeys(row["way"] for row in records[1:] if row["way"] != "unpatched")
        lines = [[way, *(cells[way, keep] for keep in keeps)] for way in ways]
        seconds = "" if loaded else f"{records[0]['seconds']:.1f} s unpatched, "
        note = (
            f"{what}, {header['layers']} decoder layers, random weights, from pixels: {seconds}the tower takes "
            f"{records[0]['tower']:.0%}. Median ratios, {header['threads']} thread, {header['date']}; "
            f"[raw data](../{path.relative_to(ROOT)})."
        )
        parts += [format_table([title, *format_keeps(keeps)], lines, left=1), note]
    return "\n\n".join([*parts, "By `python benchmarks/experiments/first_token.py`."])


def _times(row: dict[str, Any], loaded: bool) -> str:
    tokens = "" if row["tokens"] == round(TOKENS * row["keep"]) else f", {row['tokens']} tokens"
    if loaded:
        return f"{row['cpu']:.2f}{tokens}"
    return f"{row['times']:.2f} ({row['least']:.2f}–{row['most']:.2f}){tokens}"
