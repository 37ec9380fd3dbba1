# SPDX-License-Identifier: Apache-2.0
"""Tokens that vLLM reserves for the largest image when it starts, and the front end's time for an image, by setting.

    .venv-vllm/bin/python benchmarks/experiments/reserved.py --json benchmarks/results/reserved.jsonl

vLLM asks a model's processor for its largest image and holds room for that many rows of the tower's output: the encoder
cache. On a GPU it also runs the tower on that image and takes the rest of the memory for keys and values. This prints
what it asks for under each setting, on a CPU, with the limits of Qwen2.5-VL's own processor (16,384 tokens an image)
and the sizes of Qwen2.5-VL-7B for the bytes: no weights of it are needed. Beside it the front end's CPU time for one
large image, from the decoded image to the prompt, the settings in turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table
from serving import write
from serving_shapes import write_model

HIDDEN, KV_BYTES = 3584, 2 * 28 * 4 * 128 * 2  # of Qwen2.5-VL-7B in bfloat16: a row of the tower's output, a token
LARGEST = 16_384 * 28 * 28  # pixels
EDGE = 2240  # of the image that is timed: 6,400 tokens
LIMIT = {"size": {"shortest_edge": 56 * 56, "longest_edge": LARGEST}}
QUARTER = {"size": {"shortest_edge": 56 * 56, "longest_edge": LARGEST // 4}}
SETTINGS: dict[str, dict[str, Any]] = {
    "no setting": LIMIT,
    "divprune 0.25": LIMIT | {"tokenprune": {"method": "divprune", "keep": 0.25}},
    "downsample 0.25": LIMIT | {"tokenprune": {"method": "downsample", "keep": 0.25}},
    "a quarter of the pixels at most": QUARTER,
}


def budget(folder: Path, given: dict[str, Any]) -> tuple[Any, Any]:
    """Return vLLM's own account of images when it starts, and the processor that a server has."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget

    made = EngineArgs(
        str(folder), mm_processor_kwargs=given, limit_mm_per_prompt={"image": 1, "video": 0}, dtype="bfloat16",
        max_num_batched_tokens=8192, max_model_len=32_768,
        hf_overrides={"text_config": {"max_position_embeddings": 32_768}},
    ).create_engine_config()  # fmt: skip
    return MultiModalBudget(made, MULTIMODAL_REGISTRY), MULTIMODAL_REGISTRY.create_processor(made.model_config)


def seconds(processor: Any, seed: int) -> float:
    """Return the CPU seconds from an image that no cache has to its prompt."""
    pixels = np.random.default_rng(seed).integers(0, 256, (EDGE, EDGE, 3), dtype=np.uint8)
    items = processor.info.parse_mm_data({"image": [Image.fromarray(pixels)]})
    start = time.process_time()
    processor("<|vision_start|><|image_pad|><|vision_end|>what?", items, hf_processor_mm_kwargs={})
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    made, processors, times = {}, {}, {name: [] for name in SETTINGS}
    with tempfile.TemporaryDirectory() as place:
        write_model(Path(place))
        for name, given in SETTINGS.items():
            made[name], processors[name] = budget(Path(place), given)
        for round_ in range(-1, args.rounds):  # one round to warm up
            for name, processor in processors.items():
                seconds(processor, 1000 + round_)  # what the one before left of the allocator is not in the time
                taken = seconds(processor, round_ + 1)
                if round_ >= 0:
                    times[name].append(taken)
    records = []
    table = Table(title="Qwen2.5-VL-7B: what is reserved for images, and the front end's time")
    for column in ("setting", "largest image", "encoder cache", "MB", "tokens of KV", "front end, s"):
        table.add_column(column)
    for name, one in made.items():
        largest, cache = one.mm_max_toks_per_item["image"], one.encoder_cache_size
        taken = cache * HIDDEN * 2
        middle = statistics.median(times[name])
        records.append({
            "setting": name, "largest": largest, "encoder_cache": cache, "bytes": taken, "kv_tokens": taken // KV_BYTES,
            "front_end_seconds": times[name],
        })  # fmt: skip
        cells = (f"{largest:,}", f"{cache:,}", f"{taken / 1e6:.0f}", f"{taken // KV_BYTES:,}", f"{middle:.2f}")
        table.add_row(name, *cells)
    Console().print(table)
    if args.json:
        write(args.json, args, records)


if __name__ == "__main__":
    main()
