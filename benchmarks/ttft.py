# SPDX-License-Identifier: Apache-2.0
"""Time to the first token, time per further token, and peak memory, on models of true 7B shape with random weights.

    python benchmarks/ttft.py            # on a GPU
    python benchmarks/ttft.py --tiny     # the same code on a CPU, in seconds, with tiny decoders

LLaVA-1.5-7B with 576 visual tokens, LLaVA-NeXT-7B with 2880, Qwen2.5-VL-7B with 4k and 16k tokens of video, in bf16.
The weights are made on the device itself. From encoded images on: the vision tower, which none of these methods
shortens, is a small one that is not run. TTFT is the model's forward on the prompt up to the choice of a token; then
steps of decoding, one by one. Peak memory is what both take beside the weights.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import torch
from common import (
    IMAGE_ID,
    VIDEO_ID,
    Clock,
    Peak,
    Rows,
    add_options,
    code_version,
    default_device,
    encoded,
    header,
    ladder,
    llava,
    prompt,
    qwen,
    results_path,
)
from rich.console import Console
from rich.table import Table

import tokenprune

KEEPS = (0.33, 0.22, 0.11)
METHODS = "random,divprune,fastv,dart"


@dataclass(frozen=True)
class Shape:
    """A model and the visual tokens of its prompt; grid: of a video, (frames, height, width) in tokens."""

    label: str
    build: Callable[..., Any]
    decoder: str
    visual: int
    grid: tuple[int, int, int] | None = None

    def smaller(self) -> Shape:
        """The same with an eighth of the tokens, and a tiny decoder."""
        grid = None if self.grid is None else (self.grid[0] // 8, *self.grid[1:])
        return replace(self, decoder="tiny", visual=self.visual // 8, grid=grid)


SHAPES = (
    Shape("LLaVA-1.5-7B", llava, "vicuna-7b", 576),
    Shape("LLaVA-NeXT-7B", llava, "vicuna-7b", 2880),
    Shape("Qwen2.5-VL-7B, 4k video", qwen, "qwen2.5-7b", 4096, (16, 16, 16)),
    Shape("Qwen2.5-VL-7B, 16k video", qwen, "qwen2.5-7b", 16384, (64, 16, 16)),
)


def arguments(shape: Shape, model: Any, device: torch.device) -> dict[str, Any]:
    """What the forward on the prompt is called with."""
    config = model.config.text_config
    ids = prompt(shape.visual, device, VIDEO_ID if shape.grid else IMAGE_ID, config.vocab_size)
    features = torch.randn(shape.visual, config.hidden_size, device=device, dtype=model.dtype)
    if shape.grid is None:
        return {"input_ids": ids, "mm_encoder_outputs": {"image": encoded([features])}}
    t, h, w = shape.grid
    merge = model.config.vision_config.spatial_merge_size
    return {
        "input_ids": ids, "mm_encoder_outputs": {"video": encoded([features])},
        "video_grid_thw": torch.tensor([[t, h * merge, w * merge]], device=device),
        "mm_token_type_ids": 2 * (ids == VIDEO_ID).long(),
    }  # fmt: skip


def run(model: Any, given: dict[str, Any], steps: int, clock: Clock) -> tuple[float, list[float]]:
    """Seconds to the first token, and those of each further one."""
    state: dict[str, Any] = {}

    def first() -> None:
        out = model(**given, use_cache=True, logits_to_keep=1)
        state.update(cache=out.past_key_values, token=out.logits[:, -1:].argmax(-1))

    def further() -> None:
        out = model(input_ids=state["token"], past_key_values=state["cache"], use_cache=True)
        state.update(token=out.logits[:, -1:].argmax(-1))

    return clock(first)[0], [clock(further)[0] for _ in range(steps)]


def measure(shape: Shape, model: Any, ways: list[tuple[str | None, float]], args: argparse.Namespace) -> list[dict]:
    """One record for each (method, keep); None is the unpatched model."""
    device = torch.device(args.device)
    given, clock = arguments(shape, model, device), Clock(device)
    firsts: dict[Any, list[float]] = {way: [] for way in ways}
    steps: dict[Any, list[float]] = {way: [] for way in ways}
    peaks, told = {}, {}
    for round_ in range(-1, args.rounds):
        for way in ways:
            name, keep = way
            with tokenprune.patched(model, name, keep=keep, guard="off") if name else nullcontext():
                with Peak(device) as peak:
                    ttft, each = run(model, given, args.steps, clock)
                if name:
                    stats = tokenprune.stats(model)
                    told[way] = {"visual_tokens_out": stats.visual_tokens_out, "kv_bytes": stats.kv_bytes}
            peaks[way] = peak.bytes
            if round_ >= 0:
                firsts[way].append(1000 * ttft)
                steps[way] += [1000 * second for second in each]
    whole = firsts[ways[0]]
    return [
        {
            "model": shape.label, "visual": shape.visual, "method": way[0] or "unpatched", "keep": way[1],
            "ttft_ms": ladder(firsts[way]), "token_ms": ladder(steps[way]), "peak": peaks[way],
            "ttft_speedup": ladder([a / b for a, b in zip(whole, firsts[way], strict=True)]), **told.get(way, {}),
        }
        for way in ways
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--keeps", type=float, nargs="+", default=KEEPS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of decoding, in each round")
    parser.add_argument("--device", default=default_device())
    add_options(parser)
    parser.add_argument("--tiny", action="store_true", help="prove the code in seconds, with tiny decoders")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/<device>/ttft.jsonl")
    args = parser.parse_args()
    device, console = torch.device(args.device), Console()
    if args.tiny:
        args.rounds, args.steps, args.keeps = 1, 2, args.keeps[-1:]
    ways = [(None, 1.0), *((name, keep) for name in args.methods.split(",") for keep in args.keeps)]
    rows = Rows(
        args.json or results_path(device, "ttft", args.tiny), header(device, rounds=args.rounds, steps=args.steps),
        args, code=code_version(), rounds=args.rounds, steps=args.steps,
    )  # fmt: skip
    model, made = None, None
    table = Table(title=f"bf16, random weights, {rows.first['device']}" if not args.tiny else "tiny decoders")
    for column in ("model", "method", "keep", "TTFT ms", "speed-up", "token ms", "peak MiB"):
        table.add_column(column, justify="left" if column in ("model", "method") else "right")
    for shape in (one.smaller() for one in SHAPES) if args.tiny else SHAPES:
        if (shape.build, shape.decoder) != made:
            model = None
            gc.collect()  # room for the next one
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            model = shape.build(shape.decoder, device, dtype)
            made = (shape.build, shape.decoder)
        for one in rows.measure((shape.label, shape.visual), partial(measure, shape, model, ways, args)):
            table.add_row(
                one["model"], one["method"], f"{one['keep']:g}", f"{one['ttft_ms']['p50']:.1f}",
                f"{one['ttft_speedup']['p50']:.2f}", f"{one['token_ms']['p50']:.2f}", f"{one['peak'] / 2**20:.0f}",
            )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    main()
