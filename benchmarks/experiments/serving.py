# SPDX-License-Identifier: Apache-2.0
"""Measure requests per second and time to first token of vLLM's OpenAI server with fewer visual tokens.

    python benchmarks/experiments/serving.py --json benchmarks/results/serving.jsonl

Run this in an environment with vLLM. `make .venv-vllm/.setup-done` installs its CPU build, including openai.

One server runs with `{"tokenprune": {"off": true}}`. Each request sets its own keep, so all settings use the same
process. Every request has a new image, so no cache applies. The settings take turns in each round, which cancels drifts
of the machine's speed. Without --model, the server runs a random LLaVA with a small tower, 576 visual tokens per image
and a decoder of about 100 M parameters.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import numpy as np
import openai
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from rows import Load, add_options

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
SPECIAL = ["<pad>", "<s>", "</s>", "<image>"]
QUESTION = "What is in the picture?"


def write_model(folder: Path, **shape: int) -> None:
    """Write a random LLaVA, most of whose parameters are in its decoder, with a byte tokenizer.

    `shape` overrides sizes of the decoder.
    """
    from safetensors.torch import load_file, save_file
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )  # fmt: skip

    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=336, patch_size=14
    )
    text = dict(
        vocab_size=16384, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=12, max_position_embeddings=2048, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    text = LlamaConfig(**text | shape)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=SPECIAL.index("<image>"))
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    # vLLM expects the parameter names of LLaVA checkpoints on the hub.
    weights = load_file(folder / "model.safetensors")
    names = {name: re.sub(r"vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name) for name in weights}
    save_file({names[name]: value for name, value in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    image = CLIPImageProcessor(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336})
    tokenizer = byte_tokenizer(SPECIAL, image_token="<image>")
    LlavaProcessor(
        image, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    ).save_pretrained(folder)


def byte_tokenizer(special: list[str], **names: str) -> Any:
    """Build a tokenizer of bytes after the special tokens. `names` are special tokens that a processor looks up."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", extra_special_tokens=names
    )


@contextmanager
def served(model: str | None, extra: list[str], console: Console) -> Iterator[str]:
    """Start a server, yield its address, and stop it."""
    with tempfile.TemporaryDirectory() as temporary, socket.socket() as free:
        folder = Path(temporary)
        if model is None:
            write_model(folder / "model")
            (folder / "template.jinja").write_text(TEMPLATE)
            model = str(folder / "model")
            extra = ["--chat-template", str(folder / "template.jinja"), "--max-model-len", "1024", *extra]
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name",
            "served", "--host", "127.0.0.1", "--port", str(port), "--trust-request-mm-kwargs",
            "--mm-processor-kwargs", '{"tokenprune": {"off": true}}', *extra,
        ]  # fmt: skip
        with (folder / "log").open("w") as log:
            # vLLM's CPU build otherwise reserves most of the memory. GPU builds ignore the variable.
            environment = {"VLLM_CPU_KVCACHE_SPACE": "2", **os.environ}
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            try:
                with console.status("starting the server"):
                    while not _healthy(port):
                        if process.poll() is not None:
                            raise SystemExit((folder / "log").read_text()[-3000:])
                        time.sleep(1)
                yield f"http://127.0.0.1:{port}/v1"
            finally:
                process.terminate()
                process.wait(60)


def _healthy(port: int) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
    except OSError:
        return False


def noise_image(seed: int, size: int) -> dict[str, Any]:
    """Return a unique noise image as a part of a message."""
    return {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64," + noise(seed, size)}}


def noise(seed: int, size: int) -> str:
    """Return a noise image as base64 of a JPEG. `size` is its edge in pixels."""
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (size // 8, size // 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((size, size)).save(buffer, "JPEG", quality=90)
    return base64.b64encode(buffer.getvalue()).decode()


async def ask(
    client: openai.AsyncOpenAI,
    part: dict[str, Any],
    setting: dict[str, Any],
    tokens: int,
    question: str = QUESTION,
) -> tuple[float, int]:
    """Return the seconds to the first token, and the server's count of prompt tokens.

    `part` is an image or a video as a part of a message.
    """
    start, first, length = time.perf_counter(), None, 0
    stream = await client.chat.completions.create(
        model="served",
        messages=[{"role": "user", "content": [part, {"type": "text", "text": question}]}],
        temperature=0, max_tokens=tokens, stream=True, stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "mm_processor_kwargs": {"tokenprune": setting}},
    )  # fmt: skip
    async for event in stream:
        if first is None and event.choices:
            first = time.perf_counter() - start
        if event.usage:
            length = event.usage.prompt_tokens
    return first, length


async def load(
    client: openai.AsyncOpenAI,
    parts: list[dict[str, Any]],
    setting: dict[str, Any],
    concurrency: int,
    tokens: int,
    question: str = QUESTION,
) -> tuple[float, list[tuple[float, int]]]:
    """Send all requests, at most `concurrency` at a time. Return the total seconds and the answers."""
    gate = asyncio.Semaphore(concurrency)

    async def send(part: dict[str, Any]) -> tuple[float, int]:
        async with gate:
            return await ask(client, part, setting, tokens, question)

    start = time.perf_counter()
    answers = await asyncio.gather(*(send(part) for part in parts))
    return time.perf_counter() - start, answers


async def sweep(url: str, args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    client = openai.AsyncOpenAI(base_url=url, api_key="none", timeout=600, max_retries=0)
    settings: dict[str, dict[str, Any]] = {"off": {"off": True}}
    settings |= {f"keep {keep}": {"method": args.method, "keep": keep} for keep in args.keep}
    seeds = itertools.count()
    records = []
    for concurrency in args.concurrency:
        seconds, answers = defaultdict(list), defaultdict(list)
        for round_ in range(-1, args.rounds):  # the first is a warm-up
            for name, setting in settings.items():
                images = [noise_image(next(seeds), args.size) for _ in range(max(args.requests, concurrency))]
                took, new_answers = await load(client, images, setting, concurrency, args.tokens)
                if round_ >= 0:
                    seconds[name].append(len(images) / took)
                    answers[name] += new_answers
        for name in settings:
            waits = sorted(first for first, _ in answers[name])
            records.append({
                "setting": name, "concurrency": concurrency, "requests_per_second": seconds[name],
                # Ratios per round.
                "speedup": statistics.median(a / b for a, b in zip(seconds[name], seconds["off"], strict=True)),
                "ttft_p50": waits[len(waits) // 2], "ttft_p99": waits[min(len(waits) - 1, int(0.99 * len(waits)))],
                "prompt_tokens": statistics.mean(length for _, length in answers[name]),
            })  # fmt: skip
            console.log(f"concurrency {concurrency}, {name}: {statistics.median(seconds[name]):.2f} requests/s")
    return records


def write(path: Path, args: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    """Write records to a file, one per line, with versions and arguments."""
    import vllm

    import tokenprune

    header = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "cpus": os.cpu_count(),
        "torch": torch.__version__, "vllm": vllm.__version__, "tokenprune": tokenprune.__version__,
        **{key: value for key, value in vars(args).items() if key not in ("json", "allow_load")},
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(header | record) + "\n" for record in records))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or name; default: a random LLaVA (see above)")
    parser.add_argument(
        "--server", nargs=argparse.REMAINDER, default=[], help="more arguments of vLLM's server, must be last"
    )
    parser.add_argument("--method", default="divprune")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8, help="requests per round, at least the concurrency")
    parser.add_argument("--tokens", type=int, default=8, help="tokens per answer")
    parser.add_argument("--size", type=int, default=336, help="edge of the images in pixels")
    parser.add_argument("--json", type=Path)
    add_options(parser, resume=False)
    args = parser.parse_args()
    args.load = Load(args.allow_load).begin  # the server causes load itself, so only the load before it counts
    console = Console()
    with served(args.model, args.server, console) as url:
        records = asyncio.run(sweep(url, args, console))

    table = Table(title=f"{args.method}, {args.model or 'random LLaVA of 100 M parameters'}, {os.cpu_count()} cores")
    for column in ("at once", "setting", "prompt", "requests/s", "over off", "TTFT p50, s", "p99, s"):
        table.add_column(column, justify="left" if column == "setting" else "right")
    for record in records:
        table.add_row(
            str(record["concurrency"]), record["setting"], f"{record['prompt_tokens']:.0f}",
            f"{statistics.median(record['requests_per_second']):.2f}", f"{record['speedup']:.2f}",
            f"{record['ttft_p50']:.3f}", f"{record['ttft_p99']:.3f}",
        )  # fmt: skip
    console.print(table)
    if args.json:
        write(args.json, args, records)


if __name__ == "__main__":
    main()
