# SPDX-License-Identifier: Apache-2.0
"""The generated parts of the pages about serving, from the raw files of what was measured on servers."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import accuracy_pages
from accuracy_pages import rows

ROOT = Path(__file__).parent.parent
SERVING = ROOT / "benchmarks/results/serving.jsonl"
SHAPES = ROOT / "benchmarks/results/serving_shapes.jsonl"
OVERLOAD_SHAPES = ROOT / "benchmarks/results/overload_shapes.jsonl"
CHATS = ROOT / "benchmarks/results/long_chats_vllm.jsonl"
KV_BLOCKS = ROOT / "benchmarks/results/kv_blocks.jsonl"
RESERVED = ROOT / "benchmarks/results/reserved.jsonl"
MIXED_LOAD = ROOT / "benchmarks/results/mixed_load.jsonl"
OVERHEAD = ROOT / "benchmarks/results/overhead.jsonl"

link = accuracy_pages.link


def serving() -> str:
    """The table of a vLLM server under load, from its raw file."""
    records = rows.lines(SERVING)
    if not records:
        return ""
    lines = [
        "| requests at once | setting | prompt tokens | requests/s | over off | TTFT p50, s | p99, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in records:
        rate = statistics.median(one["requests_per_second"])
        lines.append(
            f"| {one['concurrency']} | {one['setting']} | {one['prompt_tokens']:.0f} | {rate:.2f} "
            f"| {one['speedup']:.2f} | {one['ttft_p50']:.2f} | {one['ttft_p99']:.2f} |"
        )
    first = records[0]
    setting = (
        f"A random LLaVA with a decoder of 100 M parameters and 576 visual tokens an image, `{first['method']}`, vLLM "
        f"{first['vllm']} on {first['cpus']} CPU cores, {first['tokens']} tokens an answer, medians of "
        f"{first['rounds']} rounds made in turn."
    )
    source = f"By `python benchmarks/experiments/serving.py`; raw data: {link(SERVING, '../')}."
    return "\n\n".join([setting, "\n".join(lines), source])


SHOWN = ("keep 0.25",)  # of the settings that were measured by size


def shapes() -> str:
    """The table of a vLLM server with images of several sizes and a video, from its raw file."""
    records = rows.lines(SHAPES)
    if not records:
        return ""
    first = records[0]
    reduced = [one for one in records if one["setting"] != "off"]
    columns = sorted(dict.fromkeys((one["media"], one["setting"]) for one in reduced if one["setting"] in SHOWN))
    lines = ["| visual tokens | at once | " + " | ".join(f"{media}, {setting}" for media, setting in columns) + " |"]
    lines.append("|---" * (2 + len(columns)) + "|")
    for shape, concurrency in dict.fromkeys((one["shape"], one["concurrency"]) for one in reduced):
        cells = {
            (one["media"], one["setting"]): f"{one['ratio']:.2f} ({min(one['ratios']):.2f}–{max(one['ratios']):.2f})"
            for one in reduced
            if (one["shape"], one["concurrency"]) == (shape, concurrency)
        }
        lines.append(f"| {shape} | {concurrency} | " + " | ".join(cells[column] for column in columns) + " |")
    least = min(one["ratio"] for one in reduced)
    setting = (
        f"Requests per second, over those of the same server with nothing removed: medians of {first['rounds']} rounds "
        f"in turn (least and most), a Qwen2.5-VL with random weights and a decoder of 12 M parameters, "
        f"`{first['method']}`, vLLM {first['vllm']} on {first['cpus']} CPU cores. Seen: the server had the image or "
        f"video before, with another question, so that its caches hold what stays of it. Least of all: {least:.2f}."
    )
    source = f"By `python benchmarks/experiments/serving_shapes.py`; raw data: {link(SHAPES, '../')}."
    return "\n\n".join([setting, "\n".join(lines), source])


def overload_shapes() -> str:
    """The table of the overload policy on simulated arrivals, from its raw file."""
    records = [json.loads(line) for line in OVERLOAD_SHAPES.read_text().splitlines()]
    lines = ["| requests come | setting | p99, s | kept | changes a minute | most within one |", "|---" * 6 + "|"]
    for one in records:
        cells = [one["arrivals"], one["setting"], f"{one['p99']:.2f}", f"{one['kept']:.0%}"]
        cells += [f"{one['changes_a_minute']:.1f}", str(one["most_within_a_minute"])]
        lines.append(f"| {' | '.join(cells)} |")
    source = f"By `python benchmarks/experiments/overload_shapes.py`; raw data: {link(OVERLOAD_SHAPES, '../')}."
    return "\n\n".join([f"A simulation of {records[0]['requests']:,} requests; no server.", "\n".join(lines), source])


def kv_blocks() -> str:
    """The table of how many requests fit in the same KV cache, from its raw file."""
    records = [json.loads(line) for line in KV_BLOCKS.read_text().splitlines()]
    first = records[0]
    lines = ["| setting | KV cache of a request | requests at once | over off |", "|---|---|---|---|"]
    for one in records:
        name = re.sub(r"^(divprune|dart)", r"`\1`", one["setting"])
        held = one["blocks_a_request"] * one["layers_a_block"] / first["blocks_a_request"] / first["layers_a_block"]
        lines.append(f"| {name} | {held:.2f} | {one['fit']} | {one['fit'] / first['fit']:.2f} |")
    same = [one["same_answers"] for one in records if one["same_answers"] is not None]
    setting = (
        f"A random LLaVA of {first['layers']} layers (as many as LLaVA-1.5 7B has, but narrow), 576 visual tokens an "
        f"image and {first['prompt_tokens'] - 576} of text; {first['blocks']} blocks of {first['block_size']} tokens "
        f"in all layers, or as much memory in blocks of fewer; {first['requests']} requests, vLLM {first['vllm']}. "
        f"Of {first['requests']} answers {min(same)} are the same with blocks given back (freed) as without."
    )
    source = f"By `python benchmarks/experiments/kv_blocks.py`; raw data: {link(KV_BLOCKS, '../')}."
    return "\n\n".join([setting, "\n".join(lines), source])


def reserved() -> str:
    """The table of what vLLM reserves for images, from its raw file."""
    lines = [
        "| setting | largest image, tokens | encoder cache, MB | as tokens of KV cache | front end, ms |",
        "|---" * 5 + "|",
    ]
    for one in rows.lines(RESERVED):
        cells = [one["setting"], f"{one['largest']:,}", f"{one['bytes'] / 1e6:.0f}", f"{one['kv_tokens']:,}"]
        cells += [f"{1000 * statistics.median(one['front_end_seconds']):.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [*lines, "", f"By `python benchmarks/experiments/reserved.py`; raw data: {link(RESERVED, '../')}."]
    )


def mixed_load() -> str:
    """The sentence about ten minutes of mixed load, from its raw file."""
    (one,) = rows.lines(MIXED_LOAD)
    statuses, reloads = one["statuses"], one["reloads"]
    gone = sum(count for name, count in statuses.items() if name.startswith(("leaves", "gone")))
    refused = sum(count for name, count in statuses.items() if name.endswith(" 400"))
    return (
        f"{one['requests']:,} requests in {one['seconds'] / 60:g} minutes, {refused:,} of them refused and {gone:,} "
        f"dropped by their clients, {reloads['taken']} changes of the profiles and {reloads['refused']} wrong files, "
        f"vLLM {one['vllm']}: {one['compared']:,} answers and all counters compared, {one['differ']} "
        f"differences, {one['second_try']} second tries ({link(MIXED_LOAD, '../')})."
    )


def overhead() -> str:
    """The table of what the plugin costs where it removes nothing, from its raw file."""
    lines = ["| decoder | server | CPU time of a request, ms | over no plugin (least–most) |", "|---" * 4 + "|"]
    records = [one for one in rows.lines(OVERHEAD) if not one["what"].endswith("started again")]
    bare = {one["what"]: one["seconds"] for one in records if one["server"] == "no plugin"}
    for one in records:
        shares = [mine / theirs for mine, theirs in zip(one["seconds"], bare[one["what"]], strict=True)]
        over = f"{one['share']:.2f} ({min(shares):.2f}–{max(shares):.2f})"
        lines.append(f"| {one['what']} | {one['server']} | {1000 * statistics.median(one['seconds']):.0f} | {over} |")
    return "\n".join(
        [*lines, "", f"By `python benchmarks/experiments/overhead.py`; raw data: {link(OVERHEAD, '../')}."]
    )


def chats() -> str:
    """The table of what vLLM computes over a long chat, from its raw file."""
    records = rows.lines(CHATS)
    lines = [
        "| way | computed | of them again | images encoded | longest prompt | images seen in the last turn |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for one in records:
        once = one["system"] + one["turns"] * (one["visual"] + one["text"])
        lines.append(
            f"| {one['way']} | {one['computed']:,} | {max(0, one['computed'] - once):,} | {one['encoded']} "
            f"| {one['longest']:,} | {one['images']} |"
        )
    first = records[0]
    setting = (
        f"Tokens over {first['turns']} turns, by vLLM's own counters of its prefix cache: a screenshot of "
        f"{first['visual']} visual tokens and {first['text']} of words each, after a system prompt of "
        f"{first['system']}. A random Qwen2.5-VL, `{first['method']}`, vLLM {first['vllm']} on a CPU, blocks of "
        f"{first['block_size']}, an encoder cache of {first['batched']:,} tokens."
    )
    source = f"By `python benchmarks/experiments/long_chats_vllm.py`; raw data: {link(CHATS, '../')}."
    return "\n\n".join([setting, "\n".join(lines), source])


IN_FULL = {
    "chats": chats,
    "shapes": shapes,
    "overload-shapes": overload_shapes,
    "kv-blocks": kv_blocks,
    "reserved": reserved,
    "mixed-load": mixed_load,
    "overhead": overhead,
}
