# SPDX-License-Identifier: Apache-2.0
"""Test whether a vLLM server is ever slower with fewer visual tokens, for images and a video, new and cached.

    .venv-vllm/bin/python benchmarks/experiments/serving_shapes.py --json benchmarks/results/serving_shapes.jsonl

Pruning costs most in relation to its savings with small images, a small decoder, and images that are in vLLM's caches.
The model is therefore a Qwen2.5-VL with random weights and a decoder of 12 M parameters. One server runs, and each
request sets its own keep. Shapes and concurrencies are measured one after another. Within each, the settings take turns
in each round, first with new media, then with the same media and another question. Ratios of requests per second are
computed per round.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import openai
import torch
from rich.console import Console
from rich.table import Table
from rows import Load, add_options
from serving import QUESTION, TEMPLATE, byte_tokenizer, load, noise, noise_image, served, write

# By visual tokens: the edge of an image in pixels (28 x 28 pixels per token), or frames (two per temporal patch) and
# edge.
SHAPES = {"36": 168, "576": 672, "2304": 1344, "video": (16, 224)}
SPECIAL = "<pad> <s> </s> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>".split()
QUESTIONS = {"new": QUESTION, "seen": "How many are there of them?"}


def write_model(folder: Path, **shape: int) -> None:
    """Write a random Qwen2.5-VL with a small tower. `shape` overrides sizes of the decoder."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    torch.manual_seed(0)
    text = dict(
        vocab_size=16384, hidden_size=384, intermediate_size=1152, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=6, max_position_embeddings=8192, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        rope_parameters=dict(rope_type="default", rope_theta=10_000.0, mrope_section=[8, 12, 12]),
    )  # fmt: skip
    text |= shape
    vision = dict(
        depth=2, num_heads=2, patch_size=14, hidden_size=64, intermediate_size=128, window_size=112,
        fullatt_block_indexes=[1], out_hidden_size=text["hidden_size"],
    )  # fmt: skip
    ids = {
        f"{name}_id": SPECIAL.index(token)
        for name, token in (
            ("vision_start_token", "<|vision_start|>"), ("vision_end_token", "<|vision_end|>"),
            ("image_token", "<|image_pad|>"), ("video_token", "<|video_pad|>"),
        )
    }  # fmt: skip
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    # vLLM normalizes images and videos with the same values.
    common = dict(patch_size=14, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(size={"shortest_edge": 28**2, "longest_edge": 1344**2}, **common),
        byte_tokenizer(SPECIAL, image_token="<|image_pad|>", video_token="<|video_pad|>"),
        Qwen2VLVideoProcessor(size={"shortest_edge": 28**2, "longest_edge": 16 * 224**2}, **common),
        chat_template=TEMPLATE,
    ).save_pretrained(folder)


def medium(shape: int | tuple[int, int], seeds: Iterator[int]) -> dict[str, Any]:
    """Return a unique image or video as a part of a message."""
    if isinstance(shape, int):
        return noise_image(next(seeds), shape)
    frames, size = shape
    data = ",".join(noise(next(seeds), size) for _ in range(frames))
    return {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + data}}


async def sweep(url: str, args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    client = openai.AsyncOpenAI(base_url=url, api_key="none", timeout=600, max_retries=0)
    settings: dict[str, dict[str, Any]] = {"off": {"off": True}}
    settings |= {f"keep {keep}": {"method": args.method, "keep": keep} for keep in args.keep}
    seeds, records = itertools.count(), []
    for shape, concurrency in itertools.product(args.shapes, args.concurrency):
        rates, prompts = defaultdict(list), defaultdict(list)
        load_before = os.getloadavg()[0]
        for round_ in range(-1, args.rounds):  # the first is a warm-up
            # Alternate the order, so that no setting has an advantage over the rounds.
            for name in list(settings)[:: -1 if round_ % 2 else 1]:
                media = [medium(SHAPES[shape], seeds) for _ in range(max(args.requests, concurrency))]
                for media_kind, question in QUESTIONS.items():
                    took, answers = await load(client, media, settings[name], concurrency, args.tokens, question)
                    if round_ >= 0:
                        rates[media_kind, name].append(len(media) / took)
                        prompts[media_kind, name] += [length for _, length in answers]
        for (media_kind, name), rates_of_setting in sorted(rates.items()):
            ratios = [rate / off for rate, off in zip(rates_of_setting, rates[media_kind, "off"], strict=True)]
            records.append({
                "shape": shape, "concurrency": concurrency, "media": media_kind, "setting": name,
                "requests_per_second": rates_of_setting, "ratio": statistics.median(ratios), "ratios": ratios,
                "prompt_tokens": statistics.mean(prompts[media_kind, name]), "load_with_server": load_before,
            })  # fmt: skip
            console.log(f"{shape}, {concurrency} at once, {media_kind}, {name}: x{records[-1]['ratio']:.2f}")
    return records


def table(records: list[dict[str, Any]]) -> Table:
    result = Table(title="requests per second, relative to the same server without pruning")
    for column in ("visual tokens", "at once", "media", "setting", "prompt", "requests/s", "over off (least, most)"):
        result.add_column(column)
    for record in records:
        result.add_row(
            record["shape"], str(record["concurrency"]), record["media"], record["setting"],
            f"{record['prompt_tokens']:.0f}", f"{statistics.median(record['requests_per_second']):.2f}",
            f"{record['ratio']:.2f} ({min(record['ratios']):.2f}, {max(record['ratios']):.2f})",
        )  # fmt: skip
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="divprune")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=4, help="requests per round, at least the concurrency")
    parser.add_argument("--tokens", type=int, default=4, help="tokens per answer")
    parser.add_argument("--json", type=Path)
    add_options(parser, resume=False)
    args = parser.parse_args()
    args.load = Load(args.allow_load).begin  # the server causes load itself, so only the load before it counts
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model")
        (Path(folder) / "template.jinja").write_text(TEMPLATE)
        extra = ["--chat-template", f"{folder}/template.jinja", "--max-model-len", "4096"]
        extra += ["--max-num-batched-tokens", "4096"]
        with served(f"{folder}/model", extra, console) as url:
            records = asyncio.run(sweep(url, args, console))
    console.print(table(records))
    if args.json:
        write(args.json, args, records)


if __name__ == "__main__":
    main()
