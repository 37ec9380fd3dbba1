# SPDX-License-Identifier: Apache-2.0
"""Measure the tokens that vLLM reserves for the largest image at startup, and the front end's time for an image.

    .venv-vllm/bin/python benchmarks/experiments/reserved.py --json benchmarks/results/reserved.jsonl

vLLM asks a model's processor for its largest image and reserves the encoder cache for its visual tokens. On a GPU, vLLM
also runs the tower on that image and uses the remaining memory for keys and values. The script prints the reserved
tokens under each setting, on a CPU, with the limits of Qwen2.5-VL's processor (16,384 tokens per image) and, for the
bytes, the sizes of Qwen2.5-VL-7B. No weights are needed. It also measures the front end's CPU time for one large image,
from the decoded image to the prompt; the settings take turns.
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

HIDDEN, KV_BYTES = 3584, 2 * 28 * 4 * 128 * 2  # Qwen2.5-VL-7B in bfloat16: width of a visual token, bytes per token
LARGEST = 16_384 * 28 * 28  # pixels
EDGE = 2240  # pixels per side of the timed image: 6,400 tokens
LIMIT = {"size": {"shortest_edge": 56 * 56, "longest_edge": LARGEST}}
QUARTER = {"size": {"shortest_edge": 56 * 56, "longest_edge": LARGEST // 4}}
SETTINGS: dict[str, dict[str, Any]] = {
    "no setting": LIMIT,
    "divprune 0.25": LIMIT | {"tokenprune": {"method": "divprune", "keep": 0.25}},
    "downsample 0.25": LIMIT | {"tokenprune": {"method": "downsample", "keep": 0.25}},
    "a quarter of the pixels at most": QUARTER,
}


def budget(folder: Path, processor_arguments: dict[str, Any]) -> tuple[Any, Any]:
    """Return vLLM's encoder budget at startup, and the processor of a server."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget

    config = EngineArgs(
        str(folder), mm_processor_kwargs=processor_arguments, limit_mm_per_prompt={"image": 1, "video": 0},
        dtype="bfloat16", max_num_batched_tokens=8192, max_model_len=32_768,
        hf_overrides={"text_config": {"max_position_embeddings": 32_768}},
    ).create_engine_config()  # fmt: skip
    return MultiModalBudget(config, MULTIMODAL_REGISTRY), MULTIMODAL_REGISTRY.create_processor(config.model_config)


def seconds(processor: Any, seed: int) -> float:
    """Return the CPU seconds from a new image to its prompt."""
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
    budgets, processors, times = {}, {}, {name: [] for name in SETTINGS}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for name, processor_arguments in SETTINGS.items():
            budgets[name], processors[name] = budget(Path(folder), processor_arguments)
        for round_ in range(-1, args.rounds):  # the first is a warm-up
            for name, processor in processors.items():
                seconds(
                    processor, 1000 + round_
                )  # not timed: brings the allocator into the same state for all processors
                taken = seconds(processor, round_ + 1)
                if round_ >= 0:
                    times[name].append(taken)
    records = []
    table = Table(title="Qwen2.5-VL-7B: memory reserved for images, and the front end's time")
    for column in ("setting", "largest image", "encoder cache", "MB", "tokens of KV", "front end, s"):
        table.add_column(column)
    for name, budget_of_setting in budgets.items():
        largest, cache = budget_of_setting.mm_max_toks_per_item["image"], budget_of_setting.encoder_cache_size
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
