# SPDX-License-Identifier: Apache-2.0
"""The generated parts of docs/performance.md, from benchmarks/results/<device>; dev/readme.py writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
FLOOR = 0.95  # of efficiency
OF_LIMIT = 0.97  # of what a method's own arithmetic allows, where that is less
SHARE = 0.02  # of the unpatched prefill that choosing may take


def found(name: str) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The results of one benchmark for each device: header and records; the CPU first."""
    results = {}
    for path in sorted(RESULTS.glob(f"*/{name}.jsonl"), key=lambda path: (path.parent.name != "cpu", path)):
        if not path.parent.name.endswith("-tiny"):
            first, *records = (json.loads(line) for line in path.read_text().splitlines())
            results[path.parent.name] = first, records
    return results


def source(name: str, device: str, up: str = "../") -> str:
    path = f"benchmarks/results/{device}/{name}.jsonl"
    return f"By `python benchmarks/{name}.py`; raw data: [{path}]({up}{path})."


def where(header: dict[str, Any]) -> str:
    return (
        f"{header['device']}, {header['threads']} threads of {header['cpus']} cores, torch {header['torch']}, "
        f"transformers {header['transformers']}, {header['date']}, load {header['load']:g}"
    )


def _parts(name: str, make: Any) -> str:
    parts = [make(header, records, device) for device, (header, records) in found(name).items()]
    return "\n\n".join(parts) if parts else "(not measured yet)"


def efficiency() -> str:
    return _parts("efficiency", _efficiency)


def _efficiency(header: dict[str, Any], records: list[dict[str, Any]], device: str) -> str:
    parts = [f"{where(header)}; a decoder of {header['parameters'] / 1e6:.0f} M random parameters ({header['model']})."]
    for visual, keep in dict.fromkeys((one["visual"], one["keep"]) for one in records):
        whole, *own = [one for one in records if (one["visual"], one["keep"]) == (visual, keep)]
        lines = [
            f"**{visual} -> {keep} visual tokens**, unpatched {whole['ms']['p50']:.0f} ms, a step of decoding "
            f"{whole['step_ms']['p50']:.1f} ms:",
            "",
            "| method | tokens a layer | prefill, ms | speed-up | efficiency (p20 to p80) | by CPU time | limit "
            "| of it | overhead, ms | of unpatched | decode step, of unpatched | load |",
            "|---" * 12 + "|",
            *map(_efficiency_row, own),
        ]
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, source("efficiency", device)])


def _efficiency_row(one: dict[str, Any]) -> str:
    """▼: what misses its floor; an efficiency does not where it is all but what the method's arithmetic allows."""
    reached, share = one["efficiency"], one["overhead_share"]["p50"]
    limited = "of_limit" in one  # results from before limits were measured have none
    low = reached["p50"] < FLOOR and not (limited and one["of_limit"]["p50"] >= OF_LIMIT)
    limit, of_it, load = (
        (f"{one['limit']['p50']:.3f}", f"{one['of_limit']['p50']:.3f}", f"{one['load']:.1f}") if limited else [""] * 3
    )
    return (
        f"| `{one['method']}` | {sum(one['layers']) / len(one['layers']):.0f} | {one['ms']['p50']:.0f} "
        f"| {one['speedup']['p50']:.2f} "
        f"| {reached['p50']:.3f} ({reached['p20']:.3f} to {reached['p80']:.3f}){' ▼' if low else ''} "
        f"| {one['cpu_efficiency']['p50']:.3f} | {limit} | {of_it} | {one['overhead_ms']['p50']:.1f} "
        f"| {100 * share:.1f} %{' ▼' if share > SHARE else ''} | {one['step_ratio']['p50']:.2f} | {load} |"
    )


def mixed() -> str:
    return _parts("mixed_batches", _mixed)


def _mixed(header: dict[str, Any], records: list[dict[str, Any]], device: str) -> str:
    lines = [
        f"{where(header)}; the shipped model, {header['rows']} prompts, {records[0]['keep']:.0%} of the visual tokens "
        "kept, medians (p20 to p80) of runs in turn.",
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
        f"{where(header)}; a LLaVA with random weights and a decoder `{header['decoder']}`, medians of "
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


def farthest() -> str:
    return _parts("farthest", _farthest)


def _farthest(header: dict[str, Any], records: list[dict[str, Any]], device: str) -> str:
    lines = [
        f"{where(header)}; width {header['width']}, one token of 9 stays, medians of {header['rounds']} rounds "
        "in turn, CPU time.",
        "",
        "| features | tokens | one product of all and the picks, ms | choosing, ms | in products "
        "| one by one, in products |",
        "|---" * 6 + "|",
    ]
    for one in records:
        slow = one.get("one_by_one_products")
        lines.append(
            f"| {one['kind']} | {one['tokens']} | {one['product_cpu_ms']['p50']:.0f} "
            f"| {one['blocks_cpu_ms']['p50']:.0f} "
            f"| {one['blocks_products']['p50']:.1f} | {'' if slow is None else format(slow['p50'], '.1f')} |"
        )
    return "\n".join([*lines, "", source("farthest", device)])


def memory() -> str:
    return _parts("memory", _memory)


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
    return _parts("scaling", _scaling)


def _scaling(header: dict[str, Any], records: list[dict[str, Any]], device: str) -> str:
    counts = [str(count) for count in header["counts"]]
    lines = ["| | method | " + " | ".join(counts) + " | exponent |", "|---" * (3 + len(counts)) + "|"]
    for key, unit, label in (("seconds", 1e-3, "ms"), ("peak", 2**20, "MiB")):
        for one in records:
            if f"{key}_exponent" not in one:
                continue
            points = one["points"]
            cells = [_cell(points.get(count), key, unit) for count in counts]
            slope = one[f"{key}_exponent"]
            ending = "" if slope is None else f"{slope:.2f}"
            lines.append(f"| {one['what']}, {label} | `{one['method']}` | {' | '.join(cells)} | {ending} |")
    limit = (
        "" if header["limit"] is None else f" >: more than {header['limit'] / 2**30:g} GiB, where measuring stopped."
    )
    note = f"{where(header)}; features of width {header['width']}, one token of {header['share']} stays.{limit}"
    return "\n\n".join([note, "\n".join(lines), source("scaling", device)])


def _cell(point: dict[str, Any] | None, key: str, unit: float) -> str:
    if point is None:
        return ""
    return ">" if "failed" in point else f"{point[key] / unit:.1f}"


def ttft() -> str:
    return _parts("ttft", _ttft)


def _ttft(header: dict[str, Any], records: list[dict[str, Any]], device: str) -> str:
    lines = ["| model | method | keep | TTFT, ms | speed-up | per token, ms | peak, GiB |", "|---" * 7 + "|"]
    lines += [
        f"| {one['model']} | {one['method']} | {one['keep']:g} | {one['ttft_ms']['p50']:.1f} "
        f"| {one['ttft_speedup']['p50']:.2f} | {one['token_ms']['p50']:.2f} | {one['peak'] / 2**30:.2f} |"
        for one in records
    ]
    return "\n\n".join([f"{where(header)}.", "\n".join(lines), source("ttft", device)])
