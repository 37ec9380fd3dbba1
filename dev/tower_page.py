# SPDX-License-Identifier: Apache-2.0
"""Generated parts of docs/methods/towerdrop.md, answers right by score and block, and of docs/profile.md, times to the
first token by where tokens leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RAW = ROOT / "experiments/results/tower_blocks.jsonl"
FIRST_TOKEN = ROOT / "experiments/results/cpu/first_token.jsonl"
SETS = ("photographs", "documents")
AFTER = {"diverse": "divprune", "random": "random"}  # the same rule after the tower


def blocks() -> str:
    from tokenprune_bench.significance import LEVEL, better_p, wilson

    header, *rows = (json.loads(line) for line in RAW.read_text().splitlines())
    depth = 1 + max(one.get("layer", 0) for one in rows)
    parts = []
    for keep in sorted({one["keep"] for one in rows} - {1.0}):
        found = {(one.get("score", one["method"]), one.get("layer")): one for one in rows if one["keep"] == keep}
        scores = list(dict.fromkeys(one["score"] for one in rows if "score" in one))
        for name in SETS:
            rival = found["divprune", None][name]

            def cell(one: dict[str, Any] | None, name: str = name, rival: str = rival) -> str:
                if one is None:
                    return ""
                right = one[name]
                low, high = wilson(right.count("1"), len(right))
                worse = " ▼" if better_p(rival, right) < LEVEL else ""
                return f"{100 * right.count('1') / len(right):.1f} ({100 * low:.0f}–{100 * high:.0f}){worse}"

            lines = [f"| {name}, keep {keep} | {' | '.join(map(str, range(depth)))} | after |"]
            lines.append("|---" * (depth + 2) + "|")
            for score in scores:
                cells = [cell(found.get((score, at))) for at in range(depth)]
                lines.append(f"| `{score}` | {' | '.join(cells)} | {cell(found.get((AFTER.get(score, ''), None)))} |")
            lines.append(f"| `downsample` | {cell(found.get(('downsample', None)))} |{' |' * depth}")
            parts.append("\n".join(lines))
    whole = next(one for one in rows if one["method"] == "unpatched")
    asked = " and ".join(f"{header['questions'][name]} about {header['images']} {name}" for name in SETS)
    unpatched = " and ".join(f"{100 * whole[name].count('1') / len(whole[name]):.1f}" for name in SETS)
    setting = (
        f"{header['model']}, a tower of five blocks; questions: {asked}. Right, % (95 %), by the block at whose input "
        f"units leave; unpatched {unpatched}. After the tower: `divprune`, `random`. `downsample` saves what block 0 "
        "does. ▼: worse than `divprune` (McNemar's exact test, one-sided, 5 %)."
    )
    source = (
        "By `python experiments/tower_blocks.py`; raw data: [experiments/results/tower_blocks.jsonl]"
        "(../../experiments/results/tower_blocks.jsonl)."
    )
    return "\n\n".join([setting, *parts, source])


def first_token() -> str:
    """Return the table of docs/profile.md: times to the first token by where tokens leave."""
    header, *rows = (json.loads(line) for line in FIRST_TOKEN.read_text().splitlines())
    lines = ["| | keep | tokens | seconds | times as fast (least to most) |", "|---|---:|---:|---:|---:|"]
    for row in rows:
        times = f"{row['times']:.2f} ({row['least']:.2f}–{row['most']:.2f})"
        lines.append(f"| {row['way']} | {row['keep']:g} | {row['tokens']} | {row['seconds']:.2f} | {times} |")
    path = FIRST_TOKEN.relative_to(ROOT)
    note = (
        f"Qwen2.5-VL, every width an eighth of the 7 B model's, {header['layers']} layers of its decoder, random "
        f"weights, from pixels on; the tower alone is {max(row['tower'] for row in rows):.0%} of the unpatched time. "
        f"Medians of ratios in turn, {header['threads']} thread(s) of {header['cpus']} cores, {header['date']}. By "
        f"`python experiments/first_token.py`; raw data: [{path}](../{path})."
    )
    return "\n".join(lines) + f"\n\n{note}"
