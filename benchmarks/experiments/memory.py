# SPDX-License-Identifier: Apache-2.0
"""Measure the peak memory of a prefill beyond model and prompt, by kind: token pairs, logits, rest.

    python benchmarks/experiments/memory.py --threads 1

The model has a narrow decoder with random weights and sdpa attention, and gets one image that is encoded beforehand.
"padded" is the same prompt with 64 padding tokens on the left, as in a batch. transformers then builds a mask over all
token pairs, which torch converts to floats in each layer. "pairs" are masks and other tensors with an entry per token
pair. The script counts live tensors, so other work on the machine does not matter. It writes
benchmarks/results/DEVICE/memory.jsonl.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import torch
from common import Live, default_device, encoded, header, llava, prompt, results_path, write
from rich.console import Console
from rich.progress import track
from rich.table import Table

import tokenprune

METHODS = "divprune,pool,fastv,pyramiddrop"
PADDING, LARGE = 64, 256
MAX_TOKENS = 16384  # limit with padding (masks need over 5 GB beyond it) and with logits of all tokens


def kind_of(vocabulary: int) -> Any:
    """Return a function that returns the kind of a tensor."""

    def kind(tensor: torch.Tensor) -> str:
        if tensor.ndim > 1 and tensor.shape[-1] == vocabulary:
            return "logits"
        return "pairs" if tensor.ndim > 1 and min(tensor.shape[-2:]) > LARGE else "rest"

    return kind


def measure(model: Any, method: str, visual: int, keep: float, padded: bool, last: bool) -> dict[str, Any]:
    """Return the memory of one prefill. If `last` is set, only the logits of the last token are computed."""
    device, text = model.device, model.config.text_config
    torch.manual_seed(0)
    ids = prompt(visual, device, model.config.image_token_id)
    mask = torch.ones_like(ids)
    if padded:
        ids, mask = (torch.nn.functional.pad(tensor, (PADDING, 0)) for tensor in (ids, mask))
    images = {"image": encoded([torch.randn(visual, text.hidden_size, device=device)])}
    patched = nullcontext() if method == "unpatched" else tokenprune.patched(model, method, keep=keep, guard="off")
    with patched, torch.no_grad(), Live(kind_of(text.vocab_size)) as live:
        out = model(
            input_ids=ids, attention_mask=mask, mm_encoder_outputs=images, use_cache=True, logits_to_keep=int(last)
        )
    return {
        "method": method, "visual": visual, "keep": keep, "prompt": "padded" if padded else "plain",
        "logits": "last" if last else "all", "peak": live.bytes, "kinds": live.kinds,
        "kv": sum(layer.keys.nbytes + layer.values.nbytes for layer in out.past_key_values.layers),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[4096, 16384, 32768])
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--keep", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--tiny", action="store_true", help="check the code in seconds")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/<device>/memory.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device, console = torch.device(args.device), Console()
    counts = [600] if args.tiny else args.counts
    model = llava("narrow", device, torch.float32)
    lines = [header(device, keep=args.keep, parameters=sum(parameter.numel() for parameter in model.parameters()))]
    ways = [(False, True), (False, False), (True, True)]
    todo = [
        (visual, method, padded, last)
        for visual in counts
        for padded, last in ways
        for method in ["unpatched", *args.methods.split(",")]
        if (last and not padded) or visual <= MAX_TOKENS
    ]
    table = Table(title=f"Peak of a prefill, MiB, keep {args.keep:g}")
    for column in ("visual tokens", "prompt", "logits", "method", "peak", "pairs", "logits", "rest", "cache"):
        table.add_column(column)
    for visual, method, padded, last in track(todo, description="memory", console=console):
        record = measure(model, method, visual, args.keep, padded, last)
        lines.append(record)
        sizes = [record["peak"], *(record["kinds"].get(kind, 0) for kind in ("pairs", "logits", "rest")), record["kv"]]
        table.add_row(
            str(visual), record["prompt"], record["logits"], method, *(f"{size / 2**20:.1f}" for size in sizes)
        )
        write(args.json or results_path(device, "memory", args.tiny), lines)
    console.print(table)


if __name__ == "__main__":
    main()
