# SPDX-License-Identifier: Apache-2.0
"""Generated parts of docs/results/speed.md, from benchmarks/results/<device>; dev/readme.py writes them.

The tables show common methods (`SHOWN`). The raw files have all methods."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("dev", "benchmarks/experiments", "benchmarks/experiments/gpu")]
import rows  # noqa: E402
import sheets  # noqa: E402
from tables import format_table  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
GPU_TABLES = (
    "a_correctness", "b_llava_next", "c_memory", "d_video", "e_kernels", "f_llava15", "g_decode", "h_vllm_answers",
    "h_vllm_first_token", "h_vllm_times", "i_graphs", "j_peers",
)  # fmt: skip
SHOWN = (
    "random", "uniform", "divprune", "pool", "tome", "visionzip", "scope", "cdpruner", "dart", "fastv", "sparsevlm",
    "pyramiddrop", "vidcom2", "flashvid",
)  # fmt: skip
NUM_TOKENS = 32768  # visual tokens of the table of selection times


def _quiet(name: str, read: Any = rows.quiet) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Return header and records of one benchmark for each device, the CPU first.

    Rows measured on a busy machine are left out. Pass `rows.read` to keep them, for numbers that do not depend on it.
    """
    results = {}
    for path in sorted(RESULTS.glob(f"*/{name}.jsonl"), key=lambda path: (path.parent.name != "cpu", path)):
        if not path.parent.name.endswith("-tiny"):
            header, records = read(path)
            if records:
                results[path.parent.name] = header, records
    return results


def _source(name: str, device: str) -> str:
    path = f"benchmarks/results/{device}/{name}.jsonl"
    return f"By `python benchmarks/experiments/{name}.py`; [raw data]({path})."


def _describe_setup(header: dict[str, Any], records: list[dict[str, Any]] | None = None) -> str:
    """Describe where the records were measured, with the highest load among them."""
    loads = [record["load"] for record in records or () if "load" in record] or [header["load"]]
    load = "" if records is None else f", load at most {max(loads):g}"
    return f"{header['device']}, {header['threads']} threads, torch {header['torch']}, {header['date']}{load}"


def _build(name: str, build: Any, read: Any = rows.quiet) -> str:
    """Return the table that `build` makes for each device, or an empty text without results."""
    return "\n\n".join(build(header, records, device) for device, (header, records) in _quiet(name, read).items())


def _common(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of common methods, or all records if none is common."""
    return [record for record in records if record["method"] in SHOWN] or records


def efficiency() -> str:
    return _build("efficiency", _efficiency)


def _efficiency(header: dict[str, Any], records: list[dict[str, Any]], device: str) -> str:
    records = _common([record for record in records if record["method"] != "unpatched"])
    cases = list(dict.fromkeys((record["visual"], record["keep"]) for record in records))
    by_case = {(record["method"], record["visual"]): record for record in records}
    setup = f"{_describe_setup(header, records)}; decoder with {header['parameters'] / 1e6:.0f} M random parameters."
    for visual, keep in cases:
        times = [record["unpatched_ms"]["p50"] for record in records if record["visual"] == visual]
        setup += f" {visual} -> {keep} visual tokens: {median(times):.0f} ms unpatched."
    header_cells = [f"{visual} -> {keep}: speed-up | selection" for visual, keep in cases]
    lines = [f"| method | {' | '.join(header_cells)} |", "|---|" + "---:|---:|" * len(cases)]
    for method in dict.fromkeys(record["method"] for record in records):
        cells = [_speedup(by_case.get((method, visual))) for visual, _ in cases]
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return "\n\n".join([setup, "\n".join(lines), _source("efficiency", device)])


def _speedup(record: dict[str, Any] | None) -> str:
    if record is None:
        return " | "
    return f"{record['speedup']['p50']:.1f}x | {100 * record['overhead_share']['p50']:.1f} %"


def memory() -> str:
    return _build("memory", _memory, rows.read)  # bytes do not depend on the load


def _memory(header: dict[str, Any], records: list[dict[str, Any]], device: str) -> str:
    records = [record for record in records if record["logits"] == "last"]
    counts = list(dict.fromkeys(record["visual"] for record in records))
    setup = f"{_describe_setup(header)}; decoder with {header['parameters'] / 1e6:.1f} M random parameters."
    lines = []
    for prompt, method in dict.fromkeys((record["prompt"], record["method"]) for record in records):
        peaks = {
            record["visual"]: f"{record['peak'] / 2**20:.0f}"
            for record in records
            if (record["prompt"], record["method"]) == (prompt, method)
        }
        name = method if method == "unpatched" else f"`{method}`"
        lines.append([prompt, name, *(peaks.get(count, "") for count in counts)])
    table = format_table(["prompt", "method", *(f"{count} tokens" for count in counts)], lines, left=2)
    return "\n\n".join([setup, table, _source("memory", device)])


def scaling() -> str:
    return _build("scaling", _scaling)


def _scaling(header: dict[str, Any], records: list[dict[str, Any]], device: str) -> str:
    records = _common([record for record in records if record["what"] == "selection"])
    largest = str(NUM_TOKENS if NUM_TOKENS in header["counts"] else header["counts"][-1])
    lines = []
    for record in records:
        unit = "cpu" if "cpu_exponent" in record else "seconds"
        exponent = record.get(f"{unit}_exponent")
        shown = "" if exponent is None else f"{exponent:.1f}"
        lines.append([f"`{record['method']}`", _time(record["points"].get(largest), unit), shown])
    setup = f"{_describe_setup(header, records)}; features of width {header['width']}, keep 1/{header['share']}."
    if header["limit"] is not None:
        setup += f" `>`: over {header['limit'] / 2**30:g} GiB or {header.get('most') or 0:g} s."
    table = format_table(["method", f"ms for {largest} tokens", "exponent"], lines, left=1)
    return "\n\n".join([setup, table, _source("scaling", device)])


def _time(point: dict[str, Any] | None, unit: str) -> str:
    if point is None:
        return ""
    return ">" if "failed" in point else f"{1e3 * point[unit]:.0f}"


def gpu() -> str:
    """Return the GPU tables of prefill, decoding and vLLM; docs/results/peers.md and kernels.md have the others."""
    return "\n\n".join(filter(None, [_prefill(), _decode_steps(), _vllm_requests()]))


def _gpu_table(name: str, title: str, header_cells: str, build_rows: Any) -> str:
    parts = []
    for path, header, records in sheets.found(name):
        source = f"benchmarks/results/{path.parent.name}/{path.name}"
        table = format_table(header_cells.split(" | "), build_rows(records), left=1)
        by = f"By `python benchmarks/experiments/gpu/{name}.py`; [raw data]({source})."
        parts.append("\n\n".join([f"**{title}** {sheets.where(header)}", table, by]))
    return "\n\n".join(parts)


def _name_and_batch(record: dict[str, Any]) -> tuple[str, str]:
    return "unpatched" if record["method"] == "none" else f"`{record['method']}`", str(record["batch"])


def _prefill() -> str:
    def build(records: list[dict[str, Any]]) -> list[list[str]]:
        methods = ("none", "divprune", "visionzip", "fastv")
        shown = [record for record in records if record["what"] == "prefill" and record["method"] in methods]
        keys = ("eager_ms", "graphs_ms", "device_ms")
        return [
            [
                *_name_and_batch(record),
                f"{record['visual']}" + ("" if record["method"] == "none" else f" to {record['keep']}"),
                *(f"{record[key]:.1f}" if record.get(key) else "" for key in keys),
            ]
            for record in shown
        ]

    columns = "method | batch | tokens | eager, ms | `graphs=True`, ms | GPU busy, ms"
    return _gpu_table("i_graphs", "Prefill.", columns, build)


def _decode_steps() -> str:
    def build(records: list[dict[str, Any]]) -> list[list[str]]:
        lines = []
        for record in records:
            if record["what"] == "step, static cache" and record["method"] in ("none", "divprune"):
                graph = record["graph_ms"]["p50"] if isinstance(record["graph_ms"], dict) else record["graph_ms"]
                numbers = (record["ms"]["p50"], graph, record["kv_bytes"] / 2**30)
                cells = (f"{number:.1f}" for number in numbers)
                lines.append([*_name_and_batch(record), str(record["left"]), *cells])
        return lines

    columns = "method | batch | visual tokens | eager, ms | CUDA graph, ms | KV cache, GiB"
    return _gpu_table("g_decode", "One decoding step, static cache.", columns, build)


def _vllm_requests() -> str:
    def build(records: list[dict[str, Any]]) -> list[list[str]]:
        return [
            [
                record["engine"],
                "unpatched" if record["setting"] == "off" else record["setting"],
                str(record["prompt"]),
                f"{record['first_ms']:.0f}",
                f"{record['rate']:.1f}",
                f"{record['whole_rate']:.1f}",
            ]
            for record in records
        ]

    columns = "engine | setting | prompt tokens | first token, ms | requests/s, engine only | requests/s, client"
    return _gpu_table("h_vllm_times", "vLLM.", columns, build)
