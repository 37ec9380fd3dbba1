# SPDX-License-Identifier: Apache-2.0
"""Generated parts of docs/serving/start.md and docs/results/serving.md, from the raw files."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import accuracy_pages
from accuracy_pages import rows
from tables import format_table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
SERVING = RESULTS / "serving.jsonl"
SHAPES = RESULTS / "serving_shapes.jsonl"
OVERLOAD_SHAPES = RESULTS / "overload_shapes.jsonl"
CHATS = RESULTS / "long_chats_vllm.jsonl"
KV_BLOCKS = RESULTS / "kv_blocks.jsonl"
RESERVED = RESULTS / "reserved.jsonl"
MIXED_LOAD = RESULTS / "mixed_load.jsonl"
OVERHEAD = RESULTS / "overhead.jsonl"
SHOWN_SETTING = "keep 0.25"  # of the settings in SHAPES

link = accuracy_pages.link


def format_source(script: str, raw_file: Path) -> str:
    """Return the sentence that names the script and the raw file of a table."""
    return f"By `python benchmarks/experiments/{script}.py`; raw data: {link(raw_file, '../')}."


def serving() -> str:
    """Return the table of a vLLM server under load."""
    records = rows.lines(SERVING)
    if not records:
        return ""
    titles = ["concurrent requests", "setting", "prompt tokens", "requests/s", "over off", "TTFT p50, s", "p99, s"]
    lines = []
    for record in records:
        numbers = [statistics.median(record["requests_per_second"])]
        numbers += [record[key] for key in ("speedup", "ttft_p50", "ttft_p99")]
        cells = [str(record["concurrency"]), record["setting"], f"{record['prompt_tokens']:.0f}"]
        lines.append(cells + [f"{number:.2f}" for number in numbers])
    first = records[0]
    setup = (
        f"Random LLaVA with a decoder of 100 M parameters, 576 visual tokens per image, `{first['method']}`, "
        f"vLLM {first['vllm']} on {first['cpus']} CPU cores, {first['tokens']} tokens per answer, medians of "
        f"{first['rounds']} alternating rounds."
    )
    return "\n\n".join([setup, format_table(titles, lines), format_source("serving", SERVING)])


def shapes() -> str:
    """Return the table of a vLLM server with images of several sizes and a video."""
    records = rows.lines(SHAPES)
    if not records:
        return ""
    first = records[0]
    reduced = [record for record in records if record["setting"] != "off"]
    lines = []
    for shape, concurrency in dict.fromkeys((record["shape"], record["concurrency"]) for record in reduced):
        cells = {
            record["media"]: f"{record['ratio']:.2f} ({min(record['ratios']):.2f}–{max(record['ratios']):.2f})"
            for record in reduced
            if (record["shape"], record["concurrency"], record["setting"]) == (shape, concurrency, SHOWN_SETTING)
        }
        lines.append([shape, str(concurrency), cells["new"], cells["seen"]])
    setup = (
        f"Requests per second at {SHOWN_SETTING} relative to the same server without reduction: median (minimum to "
        f"maximum) of {first['rounds']} alternating rounds. Qwen2.5-VL with random weights and a decoder of 12 M "
        f"parameters, `{first['method']}`, vLLM {first['vllm']} on {first['cpus']} CPU cores."
    )
    table = format_table(["visual tokens", "concurrent", "new images", "repeated images"], lines)
    return "\n\n".join([setup, table, format_source("serving_shapes", SHAPES)])


def overload_shapes() -> str:
    """Return the table of the overload policy on simulated arrivals."""
    records = rows.lines(OVERLOAD_SHAPES)
    names = {"whole": "unpruned", "half": "keep 0.5", "quarter": "keep 0.25"}
    names |= {"compared anew": "policy without delays", "policy": "policy"}
    lines = []
    for record in records:
        cells = [record["arrivals"], names[record["setting"]], f"{record['p99']:.2f}", f"{record['kept']:.0%}"]
        lines.append([*cells, f"{record['changes_a_minute']:.1f}", str(record["most_within_a_minute"])])
    setup = f"Simulation of {records[0]['requests']:,} requests, without a server."
    table = format_table(["arrivals", "setting", "p99, s", "kept", "changes per minute", "maximum"], lines)
    return "\n\n".join([setup, table, format_source("overload_shapes", OVERLOAD_SHAPES)])


def kv_blocks() -> str:
    """Return the table of the requests that fit into the same KV cache."""
    records = rows.lines(KV_BLOCKS)
    first = records[0]
    lines = []
    for record in records:
        name = re.sub(r"^(divprune|dart)", r"`\1`", record["setting"])
        cache = record["blocks_a_request"] * record["layers_a_block"]
        share = cache / first["blocks_a_request"] / first["layers_a_block"]
        lines.append([name, f"{share:.2f}", str(record["fit"]), f"{record['fit'] / first['fit']:.2f}"])
    same = min(record["same_answers"] for record in records if record["same_answers"] is not None)
    setup = (
        f"A narrow LLaVA with {first['layers']} layers and random weights, 576 visual and "
        f"{first['prompt_tokens'] - 576} text tokens per prompt, memory of {first['blocks']} blocks of "
        f"{first['block_size']} tokens, {first['requests']} requests, vLLM {first['vllm']}. "
        f"{same} of {first['requests']} answers are equal with freed blocks."
    )
    table = format_table(["setting", "KV cache per request", "concurrent requests", "over off"], lines)
    return "\n\n".join([setup, table, format_source("kv_blocks", KV_BLOCKS)])


def reserved() -> str:
    """Return the table of the memory that vLLM reserves for images."""
    lines = []
    for record in rows.lines(RESERVED):
        cells = [record["setting"].replace("a quarter of the pixels at most", "`size` limits pixels to a quarter")]
        cells += [f"{record['largest']:,}", f"{record['bytes'] / 1e6:.0f}", f"{record['kv_tokens']:,}"]
        lines.append([*cells, f"{1000 * statistics.median(record['front_end_seconds']):.0f}"])
    titles = ["setting", "largest image, tokens", "cache, MB", "in KV cache tokens", "front end, ms"]
    return "\n\n".join([format_table(titles, lines), format_source("reserved", RESERVED)])


def mixed_load() -> str:
    """Return the sentence about ten minutes of mixed load."""
    (record,) = rows.lines(MIXED_LOAD)
    statuses, reloads = record["statuses"], record["reloads"]
    aborted = sum(count for name, count in statuses.items() if name.startswith(("leaves", "gone")))
    refused = sum(count for name, count in statuses.items() if name.endswith(" 400"))
    return (
        f"{record['requests']:,} requests in {record['seconds'] / 60:g} minutes ({refused:,} refused, {aborted:,} "
        f"aborted by clients), {reloads['taken']} reloads and {reloads['refused']} invalid files, vLLM "
        f"{record['vllm']}. {record['compared']:,} answers and all counters were compared: {record['differ']} "
        f"differences, {record['second_try']} retries. {format_source('mixed_load', MIXED_LOAD)}"
    )


def overhead() -> str:
    """Return the table of the plugin's cost when it drops no tokens."""
    lines = []
    records = [record for record in rows.lines(OVERHEAD) if not record["what"].endswith("started again")]
    baselines = {record["what"]: record["seconds"] for record in records if record["server"] == "no plugin"}
    for record in records:
        ratios = [
            seconds / baseline for seconds, baseline in zip(record["seconds"], baselines[record["what"]], strict=True)
        ]
        decoder = record["what"].replace("next to none", "minimal")
        share = f"{record['share']:.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
        lines.append([decoder, record["server"], f"{1000 * statistics.median(record['seconds']):.0f}", share])
    titles = ["decoder", "server", "CPU time per request, ms", "relative to no plugin (range)"]
    return "\n\n".join([format_table(titles, lines), format_source("overhead", OVERHEAD)])


def chats() -> str:
    """Return the table of the tokens that vLLM computes over a long chat."""
    records = rows.lines(CHATS)
    names = {
        "everything stays": "all images",
        "the last 3 images, one leaves a turn": "last 3 images",
        "the last 3 to 12 images, ten leave at once": "last 3 to 12 images, dropped in tens",
    }
    titles = ["history", "computed", "recomputed", "encoded images", "longest prompt", "images in the last turn"]
    lines = []
    for record in records:
        minimum = record["system"] + record["turns"] * (record["visual"] + record["text"])
        cells = [f"{record['computed']:,}", f"{max(0, record['computed'] - minimum):,}", str(record["encoded"])]
        cells += [f"{record['longest']:,}", str(record["images"])]
        lines.append([names.get(record["way"], record["way"]), *cells])
    first = records[0]
    setup = (
        f"Tokens over {first['turns']} turns, from vLLM's prefix cache counters. Each turn has a screenshot of "
        f"{first['visual']} visual tokens and {first['text']} text tokens; the system prompt has {first['system']}. "
        f"Qwen2.5-VL with random weights, `{first['method']}`, vLLM {first['vllm']} on a CPU, blocks of "
        f"{first['block_size']} tokens, an encoder cache of {first['batched']:,} tokens."
    )
    return "\n\n".join([setup, format_table(titles, lines, left=1), format_source("long_chats_vllm", CHATS)])


PARTS = {
    "chats": chats,
    "shapes": shapes,
    "overload-shapes": overload_shapes,
    "kv-blocks": kv_blocks,
    "reserved": reserved,
    "mixed-load": mixed_load,
    "overhead": overhead,
}
