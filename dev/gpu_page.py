# SPDX-License-Identifier: Apache-2.0
"""Write the table of docs/guides/gpu.md and the GPU table of README from the rows measured on an H200.

dev/readme.py calls this module.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks" / "experiments"))
import rows  # noqa: E402

FOLDER = ROOT / "benchmarks/results/nvidia-h200"
METHOD, SERVED = "divprune", "divprune 0.25"
ENGINES = {"llava7b.default": "LLaVA, 576 to 144 tokens", "qwen7b.eager": "Qwen2.5-VL, 2,116 to 529 tokens"}


class Line(NamedTuple):
    """A line of the table.

    Args:
        name: The measured quantity.
        unpatched: Value without pruning.
        pruned: Value with pruning.
        unit: Printed after both values.
        higher_is_better: True for rates and counts, False for times.
    """

    name: str
    unpatched: float
    pruned: float
    unit: str = " ms"
    higher_is_better: bool = False

    @property
    def gain(self) -> float:
        ratio = self.pruned / self.unpatched
        return ratio if self.higher_is_better else 1 / ratio


def read_row(file: str, **fields: Any) -> dict[str, Any]:
    """Return the first row of a result file with these fields."""
    _, records = rows.read(FOLDER / f"{file}.jsonl")
    return next(row for row in records if all(row.get(key) == value for key, value in fields.items()))


def prefill_lines(visual: int, keep: int, batch: int) -> dict[str, Line]:
    """Return the lines of one prefill, by kind: "eager", "graphs" and, at batch 1, "busy".

    Eager and graphed times come from the same run, in turn. The graphed time is compared with the faster time of the
    unpatched model.
    """
    unpatched = read_row("i_graphs", method="none", visual=visual, batch=batch, what="prefill")
    pruned = read_row("i_graphs", method=METHOD, visual=visual, keep=keep, batch=batch, what="prefill")
    name = f"prefill, {visual:,} to {keep} tokens, batch {batch}"
    fastest = min(unpatched["eager_ms"], unpatched["graphs_ms"])
    lines = {
        "eager": Line(name, unpatched["eager_ms"], pruned["eager_ms"]),
        "graphs": Line(f"{name}, `graphs=True`", fastest, pruned["graphs_ms"]),
    }
    if batch == 1:
        file = "f_llava15" if visual == 576 else "b_llava_next"
        busy = [
            read_row(file, method=method, visual=visual, batch=1, keep=num_kept)["device_ms"]
            for method, num_kept in (("none", visual), (METHOD, keep))
        ]
        lines["busy"] = Line(f"{name}, GPU busy time", min(fastest, busy[0]), busy[1])
    return lines


def memory_line() -> Line:
    """Return the number of requests whose caches fit into memory."""
    batches = [read_row("g_decode", method=method, what="largest batch")["batch"] for method in ("none", METHOD)]
    return Line("requests of 2,880 to 320 tokens that fit into memory", *batches, "", True)


def vllm_lines(engine: str) -> dict[str, Line]:
    """Return the lines of a vLLM server, by kind: "first", "client" and "engine".

    The throughput of the client includes preprocessing. The throughput of the engine does not.
    """
    unpatched, pruned = (read_row("h_vllm_times", engine=engine, setting=setting) for setting in ("off", SERVED))
    name = f"vLLM, {ENGINES[engine]}"
    return {
        "first": Line(f"{name}: time to first token, 1 request", unpatched["first_ms"], pruned["first_ms"]),
        "client": Line(f"{name}: requests/s at the client", unpatched["whole_rate"], pruned["whole_rate"], "", True),
        "engine": Line(f"{name}: requests/s of the engine only", unpatched["rate"], pruned["rate"], "", True),
    }


def answer_lines() -> list[Line]:
    """Return the times of a complete answer of 64 tokens at batch 1, for each way that was measured."""
    _, records = rows.read(FOLDER / "i_graphs.jsonl")
    answers = [
        [row for row in records if row["method"] == method and "64 tokens" in row["place"][0]]
        for method in ("none", METHOD)
    ]
    ways = {
        "an answer of 64 tokens, 576 to 64, batch 1": "eager_ms",
        "an answer of 64 tokens, `graphs=True`": "graphs_ms",
        "an answer of 64 tokens, static cache": "static_ms",
        "an answer of 64 tokens, static cache, `graphs=True`": "both_ms",
    }
    lines = []
    for name, key in ways.items():
        # Older rows with graphs replay only the prefill.
        rows_of_way = [[row for row in side if key != "graphs_ms" or row.get("step_hits")] for side in answers]
        values = [next((row[key] for row in side if key in row), None) for side in rows_of_way]
        if None not in values:
            lines.append(Line(name, *values))
    return lines


def table() -> str:
    """Return the table of docs/guides/gpu.md."""
    header, records = rows.read(FOLDER / "i_graphs.jsonl")
    static = next(row["static_ms"] for row in records if row["method"] == "none" and "static_ms" in row)
    steps = [read_row("g_decode", method=m, what="step, static cache", batch=32)["graph_ms"] for m in ("none", METHOD)]
    lines = [
        *prefill_lines(576, 64, 1).values(),
        *prefill_lines(2880, 320, 1).values(),
        prefill_lines(576, 64, 8)["eager"],
        prefill_lines(2880, 320, 8)["eager"],
        Line("decoding step, 2,880 to 320, batch 32, as a graph", *steps),
        memory_line(),
        *(line for engine in ENGINES for line in vllm_lines(engine).values()),
        *answer_lines(),
    ]
    note = (
        f"{header['device']}, {header['date']}, torch {header['torch']}, vLLM 0.32 (compiled unless marked eager, 64 "
        "concurrent requests), bfloat16; decoders of LLaVA-1.5-7B and LLaVA-NeXT-7B with random weights unless noted. "
        "Eager times at batch 1 vary by up to 2x between runs, because launch overhead dominates. With a static cache "
        f"the unpatched answer takes {static:.0f} ms. [All tables](docs/results/speed.md#on-a-gpu); raw data: "
        "`benchmarks/results/nvidia-h200`."
    )
    return "\n".join([*HEAD, *(format_line(line) for line in lines)]) + f"\n\n{note}"


HEAD = ("| NVIDIA H200, 7B models | all tokens | `divprune` | gain |", "|---|---:|---:|---:|")


def short(up: str = "") -> str:
    """Return the GPU table of README and a note about batch 1.

    Args:
        up: Path from the page to the repository root.
    """
    lines = [
        prefill_lines(2880, 320, 8)["eager"],
        prefill_lines(2880, 320, 1)["graphs"],
        prefill_lines(576, 64, 1)["graphs"],
        vllm_lines("llava7b.default")["client"],
        vllm_lines("qwen7b.eager")["client"],
        memory_line(),
    ]
    eager, first = prefill_lines(576, 64, 1)["eager"], vllm_lines("llava7b.default")["first"]
    note = (
        f"A short prompt at batch 1 is {describe_change(eager)} without `graphs=True`. The time to first token of a "
        f"single vLLM request is {describe_change(first)}. [More about GPUs]({up}docs/guides/gpu.md)."
    )
    return "\n".join([*HEAD, *(format_line(line) for line in lines)]) + f"\n\n{note}"


def describe_change(line: Line) -> str:
    """Describe the change of a time in words; differences of up to 5 % count as unchanged."""
    if abs(line.pruned / line.unpatched - 1) <= 0.05:
        return f"unchanged ({line.gain:.1f}x)"
    if line.gain < 1:
        return f"{100 * (line.pruned / line.unpatched - 1):.0f} % slower"
    return f"{line.gain:.1f}x faster"


def format_line(line: Line) -> str:
    """Return a line as a row of a Markdown table."""
    values = (format_number(value) + line.unit for value in (line.unpatched, line.pruned))
    return f"| {line.name} | {' | '.join(values)} | {line.gain:.1f}x |"


def format_number(value: float) -> str:
    """Return a count as an integer, and a measurement with three digits."""
    if isinstance(value, int):
        return str(value)
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
