# SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/results/speed.md about a budget before decoding. dev/readme.py calls this module."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tables import format_table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks" / "experiments"))
import rows  # noqa: E402
from gpu_page import SERVED, read_row  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
WAYS = ("unpatched", "budget after decoding", "budget before pixels")
SERVED_WAYS = ("unpatched", "cut after the tower", "budget before pixels", "both")
ENGINE, CORES = "llava7b.default", 16  # the H200's machine has 16 cores
SOURCE = (
    "By `python benchmarks/experiments/before_pixels.py`; raw data: "
    "[1](../../benchmarks/results/cpu/before_pixels.jsonl), [2](../../benchmarks/results/cpu/before_pixels-vllm.jsonl)."
)
MODELS, KEEPS = ("demo_qwen", "demo_smol"), (0.25,)


def read(name: str) -> tuple[str, dict[tuple[Any, ...], dict[str, Any]]]:
    """Return date and load of the quiet rows of a file, and the rows by megapixels, cores and way. Maybe no rows."""
    _, records = rows.quiet(RESULTS / "cpu" / name)
    if not records:
        return "", {}
    note = f"{records[0]['date']}, load at most {max(row['load'] for row in records):g}"
    return note, {(row["megapixels"], row.get("cores", 1), row["way"]): row for row in records}


def pixels() -> str:
    """Return the tables and the accuracy beside them."""
    return "\n\n".join(filter(None, [preprocessing(), server(), accuracy(), SOURCE]))


def preprocessing() -> str:
    note, by_key = read("before_pixels.jsonl")
    lines = []
    for megapixels in sorted({key[0] for key in by_key}):
        cells = [f"{megapixels} MP"]
        for cores in (1, 2):
            ways = [by_key[megapixels, cores, way] for way in WAYS]
            cells += [f"{row['ms']:.0f}" for row in ways]
        rates = (min(engine_rate(), CORES / 2 * 1e3 / ways[index]["ms"]) for index in (0, -1))
        lines.append([*cells, f"{1 / ways[-1]['times']:.1f}x", *(f"{rate:.0f}" for rate in rates)])
    titles = [
        "JPEG", "1 core: unpatched", "after", "before", "2 cores: unpatched", "after", "before", "gain",
        "calculated: unpatched", "before",
    ]  # fmt: skip
    return (
        f"**Decoding and processor of Qwen2.5-VL**, ms per image; {note}. Calculated, not measured: requests/s of "
        f"`{ENGINE}` above ({engine_rate():.0f} with {SERVED}) behind {CORES} such cores.\n\n"
        + format_table(titles, lines, 1)
    )


def engine_rate() -> float:
    return read_row("h_vllm_times", engine=ENGINE, setting=SERVED)["rate"]


def server() -> str:
    note, by_key = read("before_pixels-vllm.jsonl")
    if not by_key:
        return ""
    lines = []
    for megapixels in sorted({key[0] for key in by_key}):
        ways = [by_key[megapixels, 1, way] for way in SERVED_WAYS]
        lines.append(
            [f"{megapixels} MP", *(f"{row['per_second']:.2f}" for row in ways), f"{1 / ways[2]['times']:.1f}x"]
        )
    table = format_table(["JPEG", *SERVED_WAYS, "gain of the budget"], lines, 1)
    return f"**vLLM on a CPU, `demo_qwen`**, requests/s at the client; {note}.\n\n{table}"


def accuracy() -> str:
    """Return the accuracy of a smaller image and of a cut at equal tokens."""
    parts = []
    for model in MODELS:
        records = map(json.loads, (RESULTS / f"all_methods-{model}.jsonl").read_text().splitlines())
        right = {(row["method"], row["keep"]): row for row in records if row["record"] == "result"}
        values = [
            f"{_share(right['downsample', keep])} and {_share(right['divprune', keep])} at keep {keep:g}"
            for keep in KEEPS
        ]
        unpatched = next(row for (method, _), row in right.items() if method == "unpatched")
        parts.append(f"`{model}` {', '.join(values)} (unpatched {_share(unpatched)})")
    return f"Right answers in percent of `downsample` and `divprune` at equal tokens: {'; '.join(parts)}."


def _share(row: dict[str, Any]) -> str:
    return f"{100 * sum(row['correct'].values()) / sum(row['n'].values()):.1f}"
