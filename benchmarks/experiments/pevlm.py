# SPDX-License-Identifier: Apache-2.0
"""Measure the growth of prefill time and memory with the frames of a video: block attention (pevlm) and full attention.

    python benchmarks/experiments/pevlm.py --json benchmarks/results/pevlm.jsonl

The model is a Qwen2-VL decoder with random weights; a prompt has 32 visual tokens per frame and 64 text tokens. The
video is encoded beforehand. "attention" is the attention of one layer, "prefill" is the model's forward, and "padded"
is a forward of two rows, one padded on the left (memory only: full attention then builds a mask of all pairs). Blocks
use the defaults, with min_frames=1 so that short videos use blocks, too. Times are CPU times of one thread, both
variants in turn in one process, as medians over rounds. Memory is the rise of the peak of a fresh process. Exponents
are slopes of linear fits to the logarithms.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import calm_threads  # noqa: F401
import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rows import Load, add_options
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

import tokenprune
from tokenprune.kernels.block_attention import Parts, attend_in_blocks
from tokenprune.selection.frames import Visual

FRAMES = (16, 32, 64, 128, 256)
GRID, PER_FRAME, TEXT, VIDEO_ID = (8, 16), 32, 64, 5
HEADS, KV_HEADS, WIDTH = 4, 2, 64
WAYS = ("full", "blocks")
METHOD = tokenprune.method("pevlm", min_frames=1)


def build_parts(frames: int) -> Parts:
    """Return the parts of a prompt with half of its text before and half after the video."""
    before, length = TEXT // 2, TEXT + frames * PER_FRAME
    video = Visual.from_positions("video", range(before, before + frames * PER_FRAME), frames)
    starts = METHOD.block_starts([video], length)
    if isinstance(starts, str):
        raise SystemExit(f"{frames} frames: {starts}")
    sizes = tuple(b - a for a, b in pairwise(starts))
    return Parts(0, starts[0], sizes, length - starts[-1], 0)


def attention(frames: int, way: str) -> Callable[[], object]:
    """Return a function that computes the attention of one layer."""
    length, cut = TEXT + frames * PER_FRAME, build_parts(frames)
    query = torch.randn(1, HEADS, length, WIDTH)
    key, value = (torch.randn(1, KV_HEADS, length, WIDTH) for _ in range(2))
    if way == "full":
        return lambda: scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return lambda: attend_in_blocks(query, key, value, cut, WIDTH**-0.5)


def build() -> Qwen2VLForConditionalGeneration:
    torch.manual_seed(0)
    text = dict(
        vocab_size=1024, hidden_size=HEADS * WIDTH, intermediate_size=2 * HEADS * WIDTH, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=2**14,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
        rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[8, 12, 12]),
    )  # fmt: skip
    vision = dict(depth=1, num_heads=2, embed_dim=32, hidden_size=HEADS * WIDTH, mlp_ratio=2, patch_size=4)
    config = Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=6, video_token_id=VIDEO_ID, vision_start_token_id=7
    )
    return Qwen2VLForConditionalGeneration(config).eval()


def prefill(frames: int, way: str, model: Qwen2VLForConditionalGeneration, rows: int = 1) -> Callable[[], object]:
    """Return a function that runs the model's forward. The model is patched in advance if `way` is "blocks"."""
    ids = torch.randint(8, 1024, (rows, TEXT + frames * PER_FRAME))
    ids[:, TEXT // 2 : TEXT // 2 + frames * PER_FRAME] = VIDEO_ID
    mask = torch.ones_like(ids)
    mask[1:, : TEXT // 4] = 0
    grid = torch.tensor([[frames, *GRID]] * rows)
    pixels = torch.randn(rows * frames * math.prod(GRID), 3 * 2 * 4**2)

    def patched() -> None:
        if tokenprune.is_patched(model):
            tokenprune.unpatch(model)
        if way == "blocks":
            tokenprune.patch(model, METHOD)

    patched()
    with torch.inference_mode():
        encoded = {"video": model.model.get_video_features(pixels, grid, return_dict=True)}
    types = 2 * (ids == VIDEO_ID).long()

    def run() -> object:
        return model(
            input_ids=ids, attention_mask=mask, video_grid_thw=grid, mm_token_type_ids=types,
            mm_encoder_outputs=encoded, use_cache=True, logits_to_keep=1,
        )  # fmt: skip

    run.patched = patched
    return run


def times(rounds: int, console: Console) -> dict[tuple[str, str, int], list[float]]:
    """Return the CPU seconds of each run. All runs take turns in each round."""
    model = build()
    runs = {("attention", way, frames): attention(frames, way) for frames in FRAMES for way in WAYS}
    runs |= {("prefill", way, frames): prefill(frames, way, model) for frames in FRAMES for way in WAYS}
    seconds: dict[tuple[str, str, int], list[float]] = {key: [] for key in runs}
    for round_ in track(range(-1, rounds), description="times", console=console):
        for key, run in runs.items():
            getattr(run, "patched", lambda: None)()
            start = time.process_time()
            with torch.inference_mode():
                run()
            if round_ >= 0:
                seconds[key].append(time.process_time() - start)
    return seconds


def rise(quantity: str, way: str, frames: int, threads: int) -> int:
    """Return the bytes that this process's peak memory rises by in one run."""
    torch.set_num_threads(threads)
    model = None if quantity == "attention" else build()

    def build_run(count: int) -> Callable[[], object]:
        if quantity == "attention":
            return attention(count, way)
        return prefill(count, way, model, rows=2 if quantity == "padded" else 1)

    def memory(line: str) -> int:
        return next(int(x.split()[1]) for x in Path("/proc/self/status").open() if x.startswith(line)) * 1024

    with torch.inference_mode():
        build_run(12)()  # one-time allocations
        run = build_run(frames)
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before = memory("VmRSS")
        run()
    return memory("VmHWM") - before


def exponent(values: dict[int, float]) -> float:
    """Return the slope of log(value) over log(frames)."""
    x, y = ([math.log(v) for v in side] for side in (values.keys(), values.values()))
    return statistics.linear_regression(x, y).slope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    add_options(parser, resume=False)
    args = parser.parse_args()
    console = Console()
    points = [
        (quantity, way, frames) for quantity in ("attention", "prefill", "padded") for frames in FRAMES for way in WAYS
    ]
    peaks = {}
    for point in track(points, description="memory", console=console):
        # Fork before this process computes anything, so that no tensors are shared.
        with multiprocessing.get_context("fork").Pool(1) as pool:
            peaks[point] = pool.apply(rise, (*point, args.threads))
    torch.set_num_threads(args.threads)
    load = Load(args.allow_load)
    seconds = times(args.rounds, console)
    timed = load.record()
    pairs = {frames: build_parts(frames).pairs for frames in FRAMES}
    full_pairs = {frames: (TEXT + frames * PER_FRAME) * (TEXT + frames * PER_FRAME + 1) // 2 for frames in FRAMES}

    table = Table(title=f"{PER_FRAME} tokens a frame, cpu, {args.threads} threads")
    for column in ("", "", *map(str, FRAMES), "exponent"):
        table.add_column(column, justify="right" if column else "left")
    records = []

    def add(label: str, way: str, unit: float, digits: int, values: dict[int, float], **raw: object) -> None:
        slope = exponent(values)
        table.add_row(label, way, *(f"{value / unit:.{digits}f}" for value in values.values()), f"{slope:.2f}")
        records.append({"what": label, "way": way, "exponent": slope, "values": list(values.values()), **raw})

    for way, counts in zip(WAYS, (full_pairs, pairs), strict=True):
        add("pairs of query and key, millions", way, 1e6, 2, counts)
    for quantity in ("attention", "prefill"):
        for way in WAYS:
            raw = {frames: seconds[quantity, way, frames] for frames in FRAMES}
            middle = {frames: statistics.median(all_) for frames, all_ in raw.items()}
            add(f"{quantity}, ms", way, 1e-3, 1, middle, seconds=list(raw.values()), **timed)
    for quantity in ("attention", "prefill", "padded"):
        for way in WAYS:
            add(f"{quantity}, peak MiB", way, 2**20, 1, {frames: peaks[quantity, way, frames] for frames in FRAMES})
    console.print(table)
    if args.json:
        header = {
            "device": "cpu", "threads": args.threads, "cpus": os.cpu_count(), "torch": torch.__version__,
            "transformers": transformers.__version__, "tokenprune": tokenprune.__version__, "frames": FRAMES,
            "tokens_per_frame": PER_FRAME, "text": TEXT, "sink_frames": METHOD.sink_frames,
            "block_frames": METHOD.block_frames, "rounds": args.rounds,
        }  # fmt: skip
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text("\n".join(json.dumps(line) for line in (header, *records)) + "\n")


if __name__ == "__main__":
    main()
