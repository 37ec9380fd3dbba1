# SPDX-License-Identifier: Apache-2.0
"""Measure the time that merging frames in the vision tower saves: tower time and time to first token of a video.

    python benchmarks/experiments/video_tower.py --side 224 --rounds 8 --json benchmarks/results/cpu/video_tower.jsonl

The model is LLaVA-OneVision-0.5B with random weights and a quarter of its widths (`--widths 4`), with its depth, 729
patches and 196 tokens per frame (256 and 64 with `--side 224`). The drawn video has scenes in which a smooth image
drifts. The number of merged frames depends on weights and video, so a row has the tokens that entered each block.
`--threshold` is an option of `earlytom`. All settings take turns in one process, each equally often first. Figures are
medians over rounds of ratios per round, of CPU and wall time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import torch
from common import code_version, default_device, header
from rich.console import Console
from rich.table import Table
from rows import Load, add_options, write
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration, Qwen2Config, SiglipVisionConfig

import tokenprune

VIDEO, SCENE = 6, 8  # placeholder token id, frames per scene
METHODS = ("earlytom", "holitom", "evs")


def build(part: int, side: int) -> LlavaOnevisionForConditionalGeneration:
    """Build the model with widths divided by `part`, for frames of `side` pixels."""
    torch.manual_seed(0)
    vision = SiglipVisionConfig(
        hidden_size=1152 // part, intermediate_size=4304 // part, num_hidden_layers=26,
        num_attention_heads=16 // part, image_size=side, patch_size=14,
    )  # fmt: skip
    text = Qwen2Config(
        vocab_size=32, hidden_size=896 // part, intermediate_size=4864 // part, num_hidden_layers=24,
        num_attention_heads=max(1, 14 // part), num_key_value_heads=1, head_dim=64,
    )  # fmt: skip
    config = LlavaOnevisionConfig(vision_config=vision, text_config=text, image_token_id=5, video_token_id=VIDEO)
    return LlavaOnevisionForConditionalGeneration(config).eval()


def clip(frames: int, side: int) -> torch.Tensor:
    """Return frames, shape (1, frames, 3, side, side): scenes of `SCENE` frames that blend two smooth images."""
    g = torch.Generator().manual_seed(0)
    scenes = -(-frames // SCENE)
    ends = torch.nn.functional.interpolate(torch.randn(2 * scenes, 3, 12, 12, generator=g), (side, side))
    shares = torch.rand(scenes, SCENE, generator=g).cumsum(1).view(scenes, SCENE, 1, 1, 1) / SCENE
    turned = ends[::2, None] * (1 - shares) + ends[1::2, None] * shares
    return turned.flatten(0, 1)[None, :frames]


class Stopwatch:
    """CPU and wall seconds of a module's last forward."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.spent, self.start = (0.0, 0.0), (0.0, 0.0)
        module.register_forward_pre_hook(lambda *_: self._begin(), prepend=True)
        module.register_forward_hook(lambda *_: self._end())

    def _begin(self) -> None:
        self.start = now()

    def _end(self) -> None:
        self.spent = tuple(b - a for a, b in zip(self.start, now(), strict=True))  # type: ignore[assignment]


def now() -> tuple[float, float]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.process_time(), time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=32)
    parser.add_argument("--side", type=int, default=384, help="pixels per side of a frame")
    parser.add_argument("--widths", type=int, default=4, help="divisor of the widths")
    parser.add_argument("--keep", type=float, default=0.25)
    parser.add_argument("--threshold", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    add_options(parser, resume=False)
    args = parser.parse_args()
    load, device = Load(args.allow_load), torch.device(default_device())
    settings = {name: getattr(args, name) for name in ("keep", "frames", "widths", "side", "threshold", "rounds")}
    about = header(device, code=code_version(), **settings)
    model = build(args.widths, args.side).to(device)
    pixels = clip(args.frames, args.side).to(device)
    tokens = args.frames * (-(-(args.side // 14) // 2)) ** 2 + 1
    ids = torch.tensor([[1, *[VIDEO] * tokens, *range(8, 24)]], device=device)
    tower = Stopwatch(model.model.vision_tower)
    times_by_setting: dict[str, list[Any]] = {name: [] for name in ("unpatched", *METHODS)}
    counts: dict[str, Any] = {}
    names = list(times_by_setting)
    for round_ in range(-1, args.rounds):
        first = round_ % len(names)  # alternate, because the first in a round finds another memory state
        for name in [*names[first:], *names[:first]]:
            options = {"threshold": args.threshold} if name == "earlytom" else {}
            patch = tokenprune.patched(model, name, keep=args.keep, guard="off", **options)
            with torch.inference_mode(), nullcontext() if name == "unpatched" else patch:
                start = now()
                model(input_ids=ids, pixel_values_videos=pixels, logits_to_keep=1)
                total = tuple(b - a for a, b in zip(start, now(), strict=True))
                if name != "unpatched":
                    counts[name] = tokenprune.stats(model).as_dict()
            if round_ >= 0:
                times_by_setting[name].append((*tower.spent, *total))
    table = Table(title=f"{args.frames} frames, keep {args.keep}, {device}, {torch.get_num_threads()} threads")
    columns = ("tower CPU", "tower", "first token CPU", "first token")
    for title in ("method", "left", *(f"{column}{end}" for column in columns for end in (" ms", " ratio"))):
        table.add_column(title, justify="right")
    records = []
    for name, times in times_by_setting.items():
        ratios = [
            [a / b for a, b in zip(*pair, strict=True)]
            for pair in zip(times, times_by_setting["unpatched"], strict=True)
        ]
        middle = [statistics.median(values) for values in zip(*ratios, strict=True)]
        milliseconds = [1000 * statistics.median(values) for values in zip(*times, strict=True)]
        record: dict[str, Any] = {"method": name}
        record |= {
            "ms": dict(zip(columns, milliseconds, strict=True)),
            "ratio": dict(zip(columns, middle, strict=True)),
        }
        stats = counts.get(name, {})
        record |= {key: stats.get(key) for key in ("visual_tokens_out", "encoder_tokens_per_layer")}
        records.append(record | load.record())
        cells = [cell for ms, ratio in zip(milliseconds, middle, strict=True) for cell in (f"{ms:.0f}", f"{ratio:.3f}")]
        table.add_row(name, str(stats.get("visual_tokens_out", tokens)), *cells)
    Console().print(table)
    if args.json:
        write(args.json, [about, *records])


if __name__ == "__main__":
    main()
