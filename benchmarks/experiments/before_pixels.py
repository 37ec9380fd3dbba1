# SPDX-License-Identifier: Apache-2.0
"""Time a budget of visual tokens before and after the pixels are decoded: JPEG files of 1, 4, 12 and 48 megapixels.

    python benchmarks/experiments/before_pixels.py
    python benchmarks/experiments/before_pixels.py --engine     # in an environment with vLLM

The budget is 320 tokens per image. Without `--engine`: wall time per image of decoding and of the processor of
Qwen2.5-VL (28 pixels per token, at most 16,384 tokens), with one image at a time and with two images in two threads,
each on a core. With it: requests per second of `LLM.chat` with the shipped model `demo_qwen` (16 pixels per token, at
most 1,600 tokens), each request with a different file in base64. The model is so small that preprocessing dominates.

All ways take turns in one process on the same files. times: the median over rounds of the ratio to the unpatched way.
"""

from __future__ import annotations

import argparse
import base64
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import torch
from common import Rows, add_options, code_version, header, results_path
from preprocessing import QWEN, SIZES, SMALL, decoded, photograph
from rich.console import Console
from rich.table import Table
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

import tokenprune
from tokenprune_demo import MODELS

CPU = torch.device("cpu")
BUDGET = 320
LARGE = {48: (6000, 8000)}
CORES = (1, 2)
COLUMNS = {"way": "way", "megapixels": "MP", "cores": "cores", "ms": "ms", "decode": "decode", "processor": "processor",
           "tokens": "tokens", "times": "of the first", "per_second": "requests/s"}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "unpatched": {"off": True},
    "cut after the tower": {"method": "divprune", "keep": BUDGET},
    "budget before pixels": {"max_visual_tokens": BUDGET},
    "both": {"max_visual_tokens": BUDGET, "method": "divprune", "keep": 0.5},
}
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endfor %}"
)


def qwen(max_tokens: int | None = None) -> Any:
    processor = Qwen2VLImageProcessor(**QWEN)
    return processor if max_tokens is None else tokenprune.patch_processor(processor, max_visual_tokens=max_tokens)


WAYS: dict[str, tuple[Callable[[], Any], bool]] = {
    "unpatched": (qwen, False),
    "budget after decoding": (lambda: qwen(BUDGET), False),
    "budget before pixels": (lambda: qwen(BUDGET), True),
}


def take(name: str, file: bytes) -> tuple[float, float, int]:
    """Return the seconds of decoding and of the processor, and the number of tokens."""
    build, is_small = WAYS[name]
    processor = build()
    start = time.perf_counter()
    image = tokenprune.load_image(file, processor=processor) if is_small else decoded(file)
    middle = time.perf_counter()
    with torch.inference_mode():
        grid = processor(images=[image], return_tensors="pt")["image_grid_thw"]
    return middle - start, time.perf_counter() - middle, int(grid.prod()) // 4


def take_several(name: str, file: bytes, cores: int) -> tuple[float, float, int]:
    """Return `take` per image, of one image on each core at the same time."""
    with ThreadPoolExecutor(cores) as pool:
        runs = list(pool.map(lambda _: take(name, file), range(cores)))
    decode, processor = (sum(run[index] for run in runs) / cores**2 for index in (0, 1))
    return decode, processor, runs[0][2]


def in_turn(names: list[str], rounds: int, run: Callable[[str], Any]) -> dict[str, list[Any]]:
    """Call `run` with every name in each round, and return the results by name. Each round starts with another name."""
    results: dict[str, list[Any]] = {name: [] for name in names}
    for index in range(rounds):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            results[name].append(run(name))
    return results


def measure(megapixels: float, size: tuple[int, int], rounds: int, cores: int) -> list[dict[str, Any]]:
    file, names = photograph(*size), list(WAYS)
    take(names[-1], file)
    results = in_turn(names, rounds, lambda name: take_several(name, file, cores))
    rows = []
    for name in names:
        decode, processor = (statistics.median(run[index] for run in results[name]) for index in (0, 1))
        pairs = zip(results[name], results["unpatched"], strict=True)
        ratios = [sum(run[:2]) / sum(first[:2]) for run, first in pairs]
        rows.append({
            "way": name, "megapixels": megapixels, "cores": cores, "ms": round(1e3 * (decode + processor), 2),
            "decode": round(1e3 * decode, 2), "processor": round(1e3 * processor, 2), "tokens": results[name][0][2],
            "times": round(statistics.median(ratios), 4), "jpeg": len(file),
        })  # fmt: skip
    return rows


def build_engine() -> Any:
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB. The default is most of the memory
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(MODELS["demo_qwen"]), dtype="float32", enforce_eager=True, max_model_len=2048, max_num_seqs=4,
        limit_mm_per_prompt={"image": 1, "video": 0}, mm_processor_cache_gb=0, enable_prefix_caching=False,
        gpu_memory_utilization=0.3, disable_log_stats=True,
        mm_processor_kwargs={"tokenprune": {"off": True}},
    )  # fmt: skip
    return llm, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def ask(engine: Any, name: str, files: list[bytes]) -> tuple[float, int]:
    """Return the seconds of all requests, and the tokens of a prompt."""
    llm, parameters = engine
    chats = []
    for file in files:
        url = "data:image/jpeg;base64," + base64.b64encode(file).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}]
        chats.append([{"role": "user", "content": parts}])
    start = time.perf_counter()
    outputs = llm.chat(
        chats, parameters, use_tqdm=False, chat_template=TEMPLATE, chat_template_content_format="openai",
        mm_processor_kwargs={"tokenprune": SETTINGS[name]},
    )  # fmt: skip
    return time.perf_counter() - start, len(outputs[0].prompt_token_ids)


def serve(engine: Any, megapixels: float, size: tuple[int, int], rounds: int, count: int) -> list[dict[str, Any]]:
    # Bytes after the end of a JPEG are not decoded, and make every file another one.
    photo = photograph(*size)
    files, names = [photo + bytes([index]) for index in range(count)], list(SETTINGS)
    ask(engine, names[-1], files[:1])
    results = in_turn(names, rounds, lambda name: ask(engine, name, files))
    rows = []
    for name in names:
        ratios = [run[0] / first[0] for run, first in zip(results[name], results["unpatched"], strict=True)]
        seconds = statistics.median(run[0] for run in results[name]) / count
        rows.append({
            "way": name, "megapixels": megapixels, "ms": round(1e3 * seconds, 2), "per_second": round(1 / seconds, 3),
            "tokens": results[name][0][1], "times": round(statistics.median(ratios), 4), "jpeg": len(photo),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", action="store_true", help="requests per second of vLLM with the model demo_qwen")
    parser.add_argument("--requests", type=int, default=4, help="requests of a round")
    parser.add_argument("--quick", action="store_true", help="a small image twice, to see that it runs")
    parser.add_argument("--json", type=Path)
    add_options(parser)
    args = parser.parse_args()
    args.tiny = args.quick
    rounds, sizes = (2, SMALL) if args.quick else (args.rounds, SIZES | LARGE)
    path = args.json or results_path(CPU, "before_pixels" + ("-vllm" if args.engine else ""))
    file = Rows(path, header(CPU, columns=COLUMNS), args, code=code_version(), rounds=rounds)
    engine = build_engine() if args.engine else None
    table = Table(title="A budget before and after decoding")
    for column in COLUMNS.values():
        table.add_column(column)
    for megapixels, size, cores in [(*item, cores) for item in sizes.items() for cores in ((1,) if engine else CORES)]:

        def run(
            megapixels: float = megapixels, size: tuple[int, int] = size, cores: int = cores
        ) -> list[dict[str, Any]]:
            if engine:
                return serve(engine, megapixels, size, rounds, args.requests)
            return measure(megapixels, size, rounds, cores)

        for row in file.measure(megapixels if engine else [megapixels, cores], run):
            cells = [row.get(key, "") for key in COLUMNS]
            table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console().print(table)


if __name__ == "__main__":
    main()
