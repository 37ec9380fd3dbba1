# SPDX-License-Identifier: Apache-2.0
"""How close the engine comes to its oracle in prefill, on an LM-dominated model of about 100 M random parameters.

    python benchmarks/prefill.py --threads 2 --json benchmarks/results/prefill.jsonl

Patched: the model's forward on 64 text tokens and one picture of 576 visual tokens, of which 64 stay; the picture is
encoded beforehand (`mm_encoder_outputs`, as `generate` does). Oracle: the unpatched language model on a prompt that has
only the kept tokens; for a cut inside the decoder, the times of the full and the short prompt weighted by the layers
that see them. efficiency = oracle time / patched time. All variants run in turn in one process; figures are medians
over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import tokenprune

VISUAL, BEFORE, AFTER, IMAGE_ID = 576, 32, 32, 5


def build() -> LlavaForConditionalGeneration:
    """A LLaVA whose language model holds nearly all of its parameters."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=336, patch_size=14
    )
    text = LlamaConfig(
        vocab_size=16384, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=12, max_position_embeddings=2048,
    )  # fmt: skip
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE_ID, vision_feature_layer=-1)
    return LlavaForConditionalGeneration(config).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--methods", default="random,uniform,divprune,fastv,dart")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device, console = torch.device(args.device), Console()

    model = build().to(device)
    ids = torch.randint(6, 16384, (1, BEFORE + VISUAL + AFTER), device=device)
    ids[:, BEFORE : BEFORE + VISUAL] = IMAGE_ID
    with torch.inference_mode():
        encoded = model.model.get_image_features(torch.randn(1, 3, 336, 336, device=device), return_dict=True)
        full = model.get_input_embeddings()(ids)
        short = full[:, : BEFORE + args.keep + AFTER].clone()

    def patched() -> None:
        model(input_ids=ids, mm_encoder_outputs={"image": encoded}, use_cache=True, logits_to_keep=1)

    def language_model(embeds: torch.Tensor) -> None:
        hidden = model.model.language_model(inputs_embeds=embeds, use_cache=True).last_hidden_state
        model.lm_head(hidden[:, -1:])

    def clock(run) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.inference_mode():
            run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    methods = args.methods.split(",")
    times: dict[str, list[float]] = {name: [] for name in ("unpatched", "oracle_full", "oracle_short", *methods)}
    overhead: dict[str, list[float]] = {name: [] for name in methods}
    for round_ in track(range(-2, args.rounds), description="rounds", console=console):
        runs = {
            "unpatched": patched,
            "oracle_full": lambda: language_model(full),
            "oracle_short": lambda: language_model(short),
        }
        for name, run in runs.items():
            seconds = clock(run)
            times[name] += [seconds] if round_ >= 0 else []
        for name in methods:
            with tokenprune.patched(model, name, keep=args.keep):
                seconds = clock(patched)
                if round_ >= 0:
                    times[name].append(seconds)
                    overhead[name].append(tokenprune.stats(model).overhead_ms)

    layers = model.config.text_config.num_hidden_layers
    middle = {name: statistics.median(values) for name, values in times.items()}
    parameters = sum(p.numel() for p in model.model.language_model.parameters())
    table = Table(
        title=f"Prefill, {VISUAL} -> {args.keep} visual tokens, {BEFORE + AFTER} text tokens, "
        f"{parameters / 1e6:.0f} M parameters, {device}, {args.threads} threads"
    )
    for column in ("method", "ms", "speed-up", "oracle ms", "efficiency", "overhead ms"):
        table.add_column(column, justify="left" if column == "method" else "right")
    table.add_row(
        "unpatched", f"{1000 * middle['unpatched']:.1f}", "1.00", f"{1000 * middle['oracle_full']:.1f}", "", ""
    )
    records = []
    for name in methods:
        depth = tokenprune.method(name).cut_layer / layers
        # Paired by round, so that a drift of the machine's speed cancels.
        ratios = [
            (depth * f + (1 - depth) * s) / p
            for f, s, p in zip(times["oracle_full"], times["oracle_short"], times[name], strict=True)
        ]
        speedups = [u / p for u, p in zip(times["unpatched"], times[name], strict=True)]
        oracle = depth * middle["oracle_full"] + (1 - depth) * middle["oracle_short"]
        efficiency, speedup = statistics.median(ratios), statistics.median(speedups)
        table.add_row(
            name, f"{1000 * middle[name]:.1f}", f"{speedup:.2f}", f"{1000 * oracle:.1f}", f"{efficiency:.3f}",
            f"{statistics.median(overhead[name]):.2f}",
        )  # fmt: skip
        records.append({"method": name, "efficiency": efficiency, "speedup": speedup, "seconds": times[name]})
    console.print(table)
    if args.json:
        header = {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "threads": args.threads,
            "cpus": os.cpu_count(), "torch": torch.__version__, "transformers": transformers.__version__,
            "tokenprune": tokenprune.__version__, "visual": VISUAL, "keep": args.keep, "text": BEFORE + AFTER,
            "parameters": parameters, "rounds": args.rounds,
            **{name: times[name] for name in ("unpatched", "oracle_full", "oracle_short")},
        }  # fmt: skip
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text("\n".join(json.dumps(line) for line in (header, *records)) + "\n")


if __name__ == "__main__":
    main()
