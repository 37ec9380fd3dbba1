# SPDX-License-Identifier: Apache-2.0
"""Count the tokens that vLLM computes over an agent's chat, with the counters of its prefix cache.

    .venv-vllm/bin/python benchmarks/experiments/long_chats_vllm.py --json benchmarks/results/long_chats_vllm.jsonl

The script counts tokens and measures no times. It sends the chats of experiments/long_chats.py to an engine, turn by
turn. long_chats.py assumes a cache of single tokens, while the engine's prefix cache holds blocks and its encoder cache
holds some of the images. Ages are part of a request's setting. A way that removes images leaves them out of the
request. The model is a Qwen2.5-VL with random weights, which do not affect the counts.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from pathlib import Path
from typing import Any

# Set before vllm is imported: the engine runs in this process, with a fixed amount of KV memory.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_USE_V2_MODEL_RUNNER": "0"}

import calm_threads  # noqa: F401
import numpy as np
from long_chats import SYSTEM, TEXT, TIERS, TURNS, VISUAL, WAYS, Item, Way, tokens
from PIL import Image
from rich.console import Console
from serving import write
from serving_shapes import SPECIAL, write_model

NARROW = dict(
    hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    max_position_embeddings=2**17,
)  # fmt: skip
PIXELS = 28  # pixels per side of a visual token
OPEN, CLOSE, IMAGE = (SPECIAL.index(f"<|{name}|>") for name in ("vision_start", "vision_end", "image_pad"))


def screenshot(turn: int) -> Image.Image:
    """Return a noise image of `VISUAL` tokens, different for each turn."""
    side = PIXELS * round(VISUAL**0.5)
    pixels = np.random.default_rng(turn).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((side, side))


def words(kind: str, turn: int, count: int) -> list[int]:
    """Return token ids of words, always the same for a turn."""
    draw = random.Random(f"{kind} {turn}")
    return [draw.randrange(len(SPECIAL), 10_000) for _ in range(count)]


def request(items: list[Item], method: str, step: int) -> dict[str, Any]:
    """Return a chat as a vLLM prompt. The two tags around an image count as words of its turn."""
    ids: list[int] = []
    for kind, turn, count in items:
        has_image = kind == "text" and ("image", turn) in {item[:2] for item in items}
        ids += [OPEN, IMAGE, CLOSE] if kind == "image" else words(kind, turn, count - 2 * has_image)
    setting = {"method": method, "keep": {"keep": 1.0, "age": TIERS, "step": step}} if step else {"off": True}
    shots = [screenshot(turn) for kind, turn, _ in items if kind == "image"]
    return {
        "prompt_token_ids": ids, "multi_modal_data": {"image": shots},
        "mm_processor_kwargs": {"tokenprune": setting},
    }  # fmt: skip


class Engine:
    """Engine that counts tokens. `encoded` is the number of images that ran through its vision tower."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        from vllm import LLM

        self.llm = LLM(
            str(folder), dtype="float32", enforce_eager=True, max_model_len=65_536, max_num_seqs=1,
            block_size=args.block_size, max_num_batched_tokens=args.batched, disable_log_stats=False,
            limit_mm_per_prompt={"image": TURNS}, mm_processor_kwargs={"tokenprune": {"off": True}},
        )  # fmt: skip
        self.encoded = 0
        model = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
        embed = model.embed_multimodal

        def count_embeddings(**kwargs: Any) -> Any:
            embeddings = embed(**kwargs)
            self.encoded += len(embeddings)
            return embeddings

        model.embed_multimodal = count_embeddings

    def counters(self) -> tuple[int, int]:
        """Return vLLM's counts of queried and hit tokens of the prefix cache."""
        metrics = {
            metric.name: metric.value
            for metric in self.llm.get_metrics()
            if metric.name.startswith("vllm:prefix_cache_")
        }
        return int(metrics["vllm:prefix_cache_queries"]), int(metrics["vllm:prefix_cache_hits"])

    def chat(self, way: Way, method: str) -> dict[str, Any]:
        """Send every turn of a chat, starting with empty caches, and return the counts."""
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()
        before, encoded, lengths = self.counters(), self.encoded, []
        for turn in range(1, TURNS + 1):
            items = way.prompt(turn)
            (output,) = self.llm.generate(
                [request(items, method, way.step)], SamplingParams(max_tokens=1), use_tqdm=False
            )
            lengths.append(len(output.prompt_token_ids))
            if lengths[-1] != tokens(items):
                raise SystemExit(f"{way.name}: the prompt has {lengths[-1]} tokens instead of {tokens(items)}.")
        num_queried, hits = (now - then for now, then in zip(self.counters(), before, strict=True))
        if num_queried != sum(lengths):
            raise SystemExit(f"{way.name}: vLLM counted {num_queried} tokens instead of {sum(lengths)}.")
        return {
            "way": way.name, "step": way.step, "last": way.last, "chunk": way.chunk, "prompt_tokens": num_queried,
            "hits": hits, "computed": num_queried - hits, "encoded": self.encoded - encoded, "longest": max(lengths),
            "images": sum(kind == "image" for kind, *_ in items),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="divprune")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--batched", type=int, default=8192, help="token budget per step, and of the encoder cache")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console, records = Console(), []
    sizes = {"turns": TURNS, "system": SYSTEM, "visual": VISUAL, "text": TEXT}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), **NARROW)
        engine = Engine(Path(folder), args)
        for way in WAYS:
            records.append(sizes | engine.chat(way, args.method))
            console.log(records[-1])
            if args.json:
                write(args.json, args, records)


if __name__ == "__main__":
    main()
