# SPDX-License-Identifier: Apache-2.0
"""The generated parts of docs/results/speed.md, from benchmarks/results/<device>; dev/readme.py writes them."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "benchmarks" / "experiments"), str(ROOT / "benchmarks/experiments/gpu")]
import rows  # noqa: E402
import sheets  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
GPU_TABLES = (
    "a_correctness", "b_llava_next", "c_memory", "d_video", "e_kernels", "f_llava15", "g_decode", "h_vllm_answers",
    "h_vllm_times", "i_graphs",
)  # fmt: skip
ELSEWHERE = (
    "b_llava_next",
    "f_llava15",
    "e_kernels",
)  # shown by benchmarks/experiments/peers.py, and by kernel_page.py
FLOOR = 0.95  # of efficiency
OF_LIMIT = 0.97  # of what a method's own arithmetic allows, where that is less
SHARE = 0.02  # of the unpatched prefill that choosing may take
_MIXED = (
    "**Batches of unequal prompts.** A batch is as wide as its longest row. Padding leaves with the first cut, so one "
    "prompt of text among images does not undo what the images save:"
)


def found(name: str, read: Any = rows.quiet) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The results of one benchmark for each device, of quiet rows: header and records; the CPU first. read: `rows.read`
    for what does not depend on the load."""
    results = {}
    for path in sorted(RESULTS.glob(f"*/{name}.jsonl"), key=lambda path: (path.parent.name != "cpu", path)):
        if not path.parent.name.endswith("-tiny"):
            header, records = read(path)
            if records:
                results[path.parent.name] = header, records
    return results


def source(name: str, device: str, up: str = "../") -> str:
    path = f"benchmarks/results/{device}/{name}.jsonl"
    return f"By `python benchmarks/experiments/{name}.py`; raw data: [{path}]({up}{path})."


def where(header: dict[str, Any], records: list[dict[str, Any]] | None = None) -> str:
    """Say where it was measured. records: those whose times are shown; the highest load among them is said."""
    loads = [one["load"] for one in records or () if "load" in one] or [header["load"]]
    load = "" if records is None else f", load at most {max(loads):g}"
    return (
        f"{header['device']}, {header['threads']} threads of {header['cpus']} cores, torch {header['torch']}, "
        f"transformers {header['transformers']}, {header['date']}{load}"
    )


def _parts(name: str, make: Any, before: str = "", fold: str = "", read: Any = rows.quiet) -> str:
    """Return what `make` makes of each device's results; nothing where there are none. before: what stands above it.
    fold: title of the fold that it is put into."""
    parts = [make(header, records, device) for device, (header, records) in found(name, read).items()]
    if not parts:
        return ""
    text = "\n\n".join(parts)
    if fold:
        text = f"<details markdown>\n<summary>{fold}</summary>\n\n{text}\n\n</details>"
    return f"{before}\n\n{text}".strip()


def efficiency() -> str:
    return _parts("efficiency", _efficiency, fold="Every method, at each length")


def _efficiency(header: dict[str, Any], records: list[dict[str, Any]], device: str) -> str:
    random = f"a decoder of {header['parameters'] / 1e6:.0f} M random parameters ({header['model']})"
    parts = [f"{where(header, records)}; {random}, the tower left out."]
    methods = [one for one in records if one["method"] != "unpatched"]
    for visual, keep in dict.fromkeys((one["visual"], one["keep"]) for one in methods):
        own = [one for one in methods if (one["visual"], one["keep"]) == (visual, keep)]
        whole, step = (median(one[f"unpatched_{key}"]["p50"] for one in own) for key in ("ms", "step_ms"))
        lines = [
            f"**{visual} -> {keep} visual tokens**, unpatched {whole:.0f} ms, a step of decoding {step:.1f} ms; "
            "choosing and steps as shares of these:",
            "",
            "| method | tokens a layer | speed-up | efficiency (p20-p80) | limit | choosing | decode step |",
            "|---" * 7 + "|",
            *map(_efficiency_row, own),
        ]
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, source("efficiency", device)])


def _efficiency_row(one: dict[str, Any]) -> str:
    """▼: what misses its floor; an efficiency does not where it is all but what the method's arithmetic allows."""
    reached, share = one["efficiency"], one["overhead_share"]["p50"]
    low = reached["p50"] < FLOOR and one["of_limit"]["p50"] < OF_LIMIT
    return (
        f"| `{one['method']}` | {sum(one['layers']) / len(one['layers']):.0f} | {one['speedup']['p50']:.2f} "
        f"| {reached['p50']:.3f} ({reached['p20']:.3f}-{reached['p80']:.3f}){' ▼' if low else ''} "
        f"| {one['limit']['p50']:.3f} | {100 * share:.1f} %{' ▼' if share > SHARE else ''} "
        f"| {one['step_ratio']['p50']:.2f} |"
    )


def mixed() -> str:
    return _parts("mixed_batches", _mixed, _MIXED)


def _mixed(header: dict[str, Any], records: list[dict[str, Any]], device: str) -> str:
    lines = [
        f"{where(header, records)}; the shipped model, {header['rows']} prompts, {records[0]['keep']:.0%} of the "
        "visual tokens kept, medians (p20 to p80) of runs in turn.",
        "",
        "| method | prompts without an image | width of a row, before and in the last layer | padding "
        "| prefill FLOPs | KV bytes | TTFT, unpatched / patched |",
        "|---" * 7 + "|",
    ]
    for one in records:
        ratio = one["ttft_ratio"]
        lines.append(
            f"| `{one['method']}` | {one['texts']} | {one['length']} -> {one['width_per_layer'][-1]} "
            f"| {one['padding_share']:.0%} | {one['prefill_flops_ratio']:.0%} "
            f"| {one['kv_bytes'] / one['kv_bytes_full']:.0%} "
            f"| {1 / ratio['p50']:.2f} ({1 / ratio['p80']:.2f} to {1 / ratio['p20']:.2f}) |"
        )
    return "\n".join([*lines, "", source("mixed_batches", device)])


def decode() -> str:
    return _parts("decode", _decode)


def _decode(header: dict[str, Any], records: list[dict[str, Any]], device: str) -> str:
    lines = [
        f"{where(header, records)}; a LLaVA with random weights and a decoder `{header['decoder']}`, medians of "
        f"{header['rounds']} rounds in turn, {header['steps']} steps each.",
        "",
        "| visual tokens | method | keep | cache | step, ms | times as fast as unpatched and dynamic | as unpatched |",
        "|---" * 7 + "|",
    ]
    for one in records:
        lines.append(
            f"| {one['visual']} | `{one['method']}` | {one['keep']:g} | {one['cache']} | {one['step_ms']['p50']:.1f} "
            f"| {_ratio(one['speedup'])} | {_ratio(one['over_unpatched'])} |"
        )
    return "\n".join([*lines, "", source("decode", device)])


def _ratio(one: dict[str, float]) -> str:
    return f"{one['p50']:.2f} ({one['p20']:.2f} to {one['p80']:.2f})"


def memory() -> str:
    return _parts("memory", _memory, fold="Memory, every method", read=rows.read)  # bytes do not depend on the load


def _memory(header: dict[str, Any], records: list[dict[str, Any]], device: str) -> str:
    counts = list(dict.fromkeys(one["visual"] for one in records))
    lines = [
        f"{where(header)}; a decoder of {header['parameters'] / 1e6:.1f} M random parameters, keep {header['keep']:g}; "
        "MiB, in brackets those of all pairs of tokens, of logits, and of the cache that stays.",
        "",
        "| prompt | logits | method | " + " | ".join(f"{count} visual tokens" for count in counts) + " |",
        "|---" * (3 + len(counts)) + "|",
    ]
    ways = dict.fromkeys((one["prompt"], one["logits"], one["method"]) for one in records)
    for way in ways:
        found = {one["visual"]: one for one in records if (one["prompt"], one["logits"], one["method"]) == way}
        cells = [_held(found[count]) if count in found else "" for count in counts]
        lines.append(f"| {way[0]} | {way[1]} | {_code(way[2])} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", source("memory", device)])


def _code(method: str) -> str:
    return method if method == "unpatched" else f"`{method}`"


def _held(one: dict[str, Any]) -> str:
    parts = (one["kinds"].get("pairs", 0), one["kinds"].get("logits", 0), one["kv"])
    return f"{one['peak'] / 2**20:.0f} ({', '.join(f'{part / 2**20:.0f}' for part in parts)})"


def scaling() -> str:
    return _parts("scaling", _scaling, fold="Time by the number of tokens, every method")


LONG = (32768,)  # of the counts that were measured
PRODUCTS = 6  # of all tokens and those that stay; what takes longer is marked


def _scaling(header: dict[str, Any], records: list[dict[str, Any]], device: str) -> str:
    counts = [str(count) for count in header["counts"] if count in LONG] or [str(header["counts"][-1])]
    lines = [f"| method | {' | '.join(counts)} | products | exponent |", "|---" * (3 + len(counts)) + "|"]
    for one in records:
        key = "cpu" if "cpu_exponent" in one else "seconds"
        points = one["points"]
        ran = [point for count in header["counts"] if (point := points.get(str(count))) and "failed" not in point]
        last = ran[-1] if ran else {}
        products = last[key] / last["product"] if last.get("product") else None
        shown = "" if products is None else f"{products:.1f}{' ▼' if products > PRODUCTS else ''}"
        slope = one.get(f"{key}_exponent")
        kind = "" if one["what"] == "selection" else f", {one['what']}"
        cells = [_cell(points.get(count), key, 1e-3) for count in counts]
        cells += [shown, "" if slope is None else f"{slope:.1f}"]
        lines.append(f"| `{one['method']}`{kind} | {' | '.join(cells)} |")
    ends = ""
    if header["limit"] is not None:
        ends = f" >: more than {header['limit'] / 2**30:g} GiB or {header.get('most') or 0:g} s."
    share = f"features of width {header['width']}, one token of {header['share']} stays"
    note = (
        f"{where(header, records)}; {share}. Choosing in ms; in products of all tokens with those that stay (▼: over "
        f"{PRODUCTS}), at the most tokens that were reached; the raw data have the peaks.{ends}"
    )
    return "\n\n".join([note, "\n".join(lines), source("scaling", device)])


def _cell(point: dict[str, Any] | None, key: str, unit: float) -> str:
    if point is None:
        return ""
    return ">" if "failed" in point else f"{point[key] / unit:.1f}"


def gpu() -> str:
    if not (text := sheets.pages(tuple(name for name in GPU_TABLES if name not in ELSEWHERE))):
        return ""
    absent = ", ".join(f"`{name}`" for name in GPU_TABLES if not sheets.found(name))
    missing = f"Not run yet: {absent}. " if absent else ""
    note = (
        "`none` is the unpatched model. Where a row is bound by launches the GPU waits for the host, *as a graph* says "
        "how long it computes, and times differ by up to twice between runs. Prefills stand [beside the papers' speed]"
        "(peers.md), kernels [beside their references](kernels.md#measured-on-an-h200)."
    )
    return f"## On a GPU\n\n{missing}{note}\n\n{text}"
