# SPDX-License-Identifier: Apache-2.0
"""Measure the time that merging saves in a vision tower of the size of ViT-B, and its efficiency against an oracle.

    python benchmarks/experiments/encoder.py --json benchmarks/results/encoder.jsonl

The tower is a CLIP with 12 blocks of width 768, 577 tokens (336 pixels, patches of 14) and random weights, in a LLaVA
whose language model never runs. Patched: the tower's forward with `tome` or `dymu` at keep 0.5. `dymu` is calibrated on
the same images. Oracle: the same blocks, run by hand at the token counts of the merger (attention on the tokens before
a block's merge, MLP on the tokens after it). The oracle slices instead of matching and merging.
ratio = patched time / unpatched time; efficiency = oracle time / patched time. All variants take turns in one process;
figures are medians over rounds of the ratios per round. The file also has CPU time of all threads of the process
(GOMP_SPINCOUNT=0 excludes waiting), which other work on the machine does not disturb.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import calm_threads  # noqa: F401
import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rows import Load, add_options
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import tokenprune
from tokenprune_bench.calibration import calibrate


def build() -> LlavaForConditionalGeneration:
    """Build a LLaVA with a CLIP tower. The default initialization makes images differ in their mergeable tokens."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, image_size=336,
        patch_size=14,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=5, vision_feature_layer=-1)
    return LlavaForConditionalGeneration(config).eval()


def images(rows: int) -> torch.Tensor:
    """Return noise images with decreasing detail: the first without similar patches, the last smooth."""
    g = torch.Generator().manual_seed(0)
    out = []
    for row in range(rows):
        side = max(4, 336 >> row)
        coarse = torch.randn(1, 3, side, side, generator=g)
        out.append(torch.nn.functional.interpolate(coarse, size=(336, 336), mode="bilinear"))
    return torch.cat(out)


def oracle(tower: torch.nn.Module, pixels: torch.Tensor, counts: list[list[int]]) -> torch.Tensor:
    """Run the tower's blocks on given token counts.

    Args:
        counts: Tokens of each row before each block and after the last. Rows are padded to the longest, as in the
            patched run.
    """
    hidden = tower.pre_layrnorm(tower.embeddings(pixels))
    for block, after in zip(tower.encoder.layers, counts[1:], strict=True):
        hidden = hidden + block.self_attn(block.layer_norm1(hidden))[0]
        hidden = hidden[:, : max(after)]
        hidden = hidden + block.mlp(block.layer_norm2(hidden))
    return hidden


def counts_of(tower: torch.nn.Module, pixels: torch.Tensor) -> list[list[int]]:
    """Return the tokens of each row before each block of a patched tower and after the last."""
    from tokenprune.integrations.shared.towers.reducer import TowerReducer, TowerRun

    runs = []
    end = TowerReducer.end

    def spy(self: TowerReducer) -> TowerRun | None:
        run = end(self)
        if run is not None:
            runs.append([*run.counts, run.units.num_units])
        return run

    TowerReducer.end = spy
    try:
        tower(pixels)
    finally:
        TowerReducer.end = end
    return runs[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2], help="images per batch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    add_options(parser, resume=False)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device, console = torch.device(args.device), Console()
    model = build().to(device)
    tower = model.model.vision_tower

    def clock(run: Callable[[], object]) -> tuple[float, float]:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start[0], time.process_time() - start[1]

    table = Table(title=f"CLIP tower 12 x 768, 577 tokens, keep {args.keep}, {device}, {args.threads} threads")
    for column in ("batch", "method", "left", "ms", "ratio", "efficiency", "CPU ms", "CPU ratio", "CPU efficiency"):
        table.add_column(column, justify="left" if column == "method" else "right")
    records = []
    for rows in args.batches:
        load = Load(args.allow_load)
        pixels = images(rows).to(device)
        thresholds = calibrate(model, pixels, keep=args.keep, batch_size=rows, progress=False)
        options = {"tome": {}, "dymu": {"thresholds": thresholds}}
        counts = {}
        with torch.inference_mode():
            for name in options:
                with tokenprune.patched(model, name, keep=args.keep, guard="off", **options[name]):
                    counts[name] = counts_of(tower, pixels)
        times: dict[str, list[tuple[float, float]]] = {
            name: [] for name in ("unpatched", *options, *(f"oracle of {name}" for name in options))
        }
        for round_ in track(range(-2, args.rounds), description=f"batch {rows}", console=console):
            seconds_of = {"unpatched": clock(lambda: tower(pixels))}  # noqa: B023
            for name in options:
                seconds_of[f"oracle of {name}"] = clock(lambda: oracle(tower, pixels, counts[name]))  # noqa: B023
                with tokenprune.patched(model, name, keep=args.keep, guard="off", **options[name]):
                    seconds_of[name] = clock(lambda: tower(pixels))  # noqa: B023
            if round_ >= 0:
                for name, seconds in seconds_of.items():
                    times[name].append(seconds)
        unpatched = times["unpatched"]
        middle = [f"{1000 * statistics.median(clocks):.0f}" for clocks in zip(*unpatched, strict=True)]
        table.add_row(str(rows), "unpatched", str(577 * rows), middle[0], "1.000", "", middle[1], "1.000", "")
        for name in options:
            ours, best = times[name], times[f"oracle of {name}"]
            record = {"method": name, "batch": rows, "keep": args.keep, "counts": counts[name]}
            cells = [str(rows), name, str(sum(counts[name][-1]))]
            for which, index in (("wall", 0), ("cpu", 1)):
                # Ratios per round cancel drifts of the machine's speed.
                ratio = statistics.median(a[index] / b[index] for a, b in zip(ours, unpatched, strict=True))
                efficiency = statistics.median(a[index] / b[index] for a, b in zip(best, ours, strict=True))
                median = 1000 * statistics.median(a[index] for a in ours)
                cells += [f"{median:.0f}", f"{ratio:.3f}", f"{efficiency:.3f}"]
                record[which] = {
                    "ratio": ratio, "efficiency": efficiency, "seconds": [a[index] for a in ours],
                    "oracle_seconds": [a[index] for a in best], "unpatched_seconds": [a[index] for a in unpatched],
                }  # fmt: skip
            table.add_row(*cells)
            records.append(record | load.record())
    console.print(table)
    if args.json:
        header = {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "threads": args.threads,
            "cpus": os.cpu_count(), "torch": torch.__version__, "transformers": transformers.__version__,
            "tokenprune": tokenprune.__version__, "rounds": args.rounds,
        }  # fmt: skip
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text("\n".join(json.dumps(line) for line in (header, *records)) + "\n")


if __name__ == "__main__":
    main()
