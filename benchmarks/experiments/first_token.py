# SPDX-License-Identifier: Apache-2.0
"""Measure time to first token, from pixels on, with tokens dropped after, inside or before the vision tower.

    python benchmarks/experiments/first_token.py --resume
    python benchmarks/experiments/first_token.py --shape internvl --resume

qwen: Qwen2.5-VL with random weights, with one eighth of the 7 B model's widths, all 32 tower blocks with their windows,
and `--layers` of the 28 decoder layers. With the default of 14, the tower takes about half of the unpatched first
token, as on an H200 (docs/guides/gpu.md). One image of 1,024 visual tokens and 64 text tokens.

internvl: InternVL3-2B with random weights, one eighth of the widths, all 24 blocks and 28 layers; four tiles with 1,024
visual tokens. In the 2 B model, the tower has 49 % of the FLOPs and, by `tokenprune.cost`, 69 % of the time on an H200.

Each run is a forward of the model with a cache, in float32. Variants: unpatched; `divprune` after the tower; `tome` in
every block; `towerdrop` at the input of three blocks; and a smaller image (or fewer tiles) with the same number of
tokens. The processor's time is not included (experiments/preprocessing.py measures it).

The variants take turns in one process, in a different order each round. A figure is the median over rounds of unpatched
time / variant time, for wall time and CPU time of the process. tower: share of the tower in the unpatched time. The
rows go to benchmarks/results/DEVICE/first_token.jsonl (or first_token-internvl.jsonl).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import calm_threads  # noqa: F401
import torch
from common import (
    AFTER,
    BEFORE,
    DECODERS,
    IMAGE_ID,
    Clock,
    Rows,
    add_options,
    code_version,
    default_device,
    header,
    internvl,
    prompt,
    qwen,
    results_path,
)
from rich.console import Console
from rich.table import Table

import tokenprune

SIDE = 64  # patches per side of the image: 1,024 tokens
WIDTHS = dict(hidden_size=448, intermediate_size=2368, num_attention_heads=7, num_key_value_heads=1, vocab_size=4096)
TOWER = dict(
    depth=32, hidden_size=160, intermediate_size=428, num_heads=4, patch_size=14, window_size=112,
    fullatt_block_indexes=[7, 15, 23, 31],
)  # fmt: skip
TILES = 4  # of 256 tokens each
NARROW = dict(hidden_size=192, intermediate_size=1120, num_attention_heads=3, num_key_value_heads=1, vocab_size=4096)
TILE_TOWER = dict(
    num_hidden_layers=24, hidden_size=128, intermediate_size=512, num_attention_heads=2, image_size=[448, 448],
    patch_size=[14, 14],
)  # fmt: skip
DEVICE = torch.device(default_device())
Way = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Shape:
    """A model to be timed.

    Attributes:
        file: Stem of the results file.
        layers: Default number of decoder layers.
        model: Build the model with a number of decoder layers.
        inputs: Build the inputs of an image with a share of the visual tokens.
        tower: Run the vision tower on the inputs.
        blocks: Blocks at which `towerdrop` drops.
        smaller: Name of the variant with a smaller image.
    """

    file: str
    layers: int
    model: Callable[[int], Any]
    inputs: Callable[[Any, float], dict[str, torch.Tensor]]
    tower: Callable[[Any, dict[str, torch.Tensor]], Any]
    blocks: tuple[int, ...]
    smaller: str

    @property
    def ways(self) -> dict[str, Way]:
        return {
            "unpatched": ("", {}),
            "divprune, after the tower": ("divprune", {}),
            "tome, in every block": ("tome", {}),
            **{f"towerdrop, block {block}": ("towerdrop", {"layer": block}) for block in self.blocks},
            self.smaller: ("", {}),
        }


COLUMNS = {
    "way": "way",
    "keep": "keep",
    "tokens": "tokens",
    "seconds": "s",
    "times": "times as fast",
    "cpu": "of CPU time",
}


def model_of(layers: int) -> Any:
    DECODERS["an eighth"] = dict(num_hidden_layers=layers, **WIDTHS)
    return qwen("an eighth", DEVICE, torch.float32, TOWER)


def tiled_model_of(layers: int) -> Any:
    DECODERS["an eighth"] = dict(num_hidden_layers=layers, **NARROW)
    return internvl("an eighth", DEVICE, torch.float32, TILE_TOWER)


def tiles_of(model: Any, share: float) -> dict[str, torch.Tensor]:
    """Return tiles of noise on coarse blocks, and the prompt around them."""
    tiles, generator = round(TILES * share), torch.Generator().manual_seed(0)
    side, patch = TILE_TOWER["image_size"][0], TILE_TOWER["patch_size"][0]
    coarse = torch.randn(tiles, 3, 4, 4, generator=generator)
    pixels = torch.nn.functional.interpolate(coarse, (side, side)) + 0.3 * torch.randn(
        tiles, 3, side, side, generator=generator
    )
    ids = prompt(tiles * (side // patch // 2) ** 2, torch.device("cpu"), vocabulary=4000)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def inputs_of(model: Any, side: int) -> dict[str, torch.Tensor]:
    """Return an image of `side` x `side` patches with noise on coarse blocks, and the prompt around it."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(side // 8, side // 8, 3 * 2 * 14 * 14, generator=generator)
    pixels = coarse.repeat_interleave(8, 0).repeat_interleave(8, 1) + 0.3 * torch.randn(
        side, side, 3 * 2 * 14 * 14, generator=generator
    )
    squares = pixels.unflatten(0, (-1, 2)).unflatten(2, (-1, 2)).transpose(1, 2)  # patches of a token are adjacent
    ids = torch.randint(100, 4000, (1, BEFORE + side * side // 4 + AFTER), generator=generator)
    ids[:, BEFORE : BEFORE + side * side // 4] = model.config.image_token_id
    ids[:, BEFORE - 1] = model.config.vision_start_token_id
    kinds = (ids == model.config.image_token_id).int()
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds,
        "pixel_values": squares.flatten(0, 3), "image_grid_thw": torch.tensor([[1, side, side]]),
    }  # fmt: skip


def image_of(model: Any, share: float) -> dict[str, torch.Tensor]:
    return inputs_of(model, round(SIDE * share**0.5 / 8) * 8)


SHAPES = {
    "qwen": Shape(
        "first_token", 14, model_of, image_of,
        lambda model, inputs: model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"]),
        (8, 2, 0), "a smaller image",
    ),
    "internvl": Shape(
        "first_token-internvl", 28, tiled_model_of, tiles_of,
        lambda model, inputs: model.model.vision_tower(pixel_values=inputs["pixel_values"]), (6, 3, 0), "fewer tiles",
    ),
}  # fmt: skip


def of_way(shape: Shape, model: Any, name: str, keep: float) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a variant's patch and its inputs."""
    method, options = shape.ways[name]
    patched = tokenprune.patched(model, method, keep=keep, guard="off", **options) if method else nullcontext()
    return patched, shape.inputs(model, keep if name == shape.smaller else 1.0)


def measure(shape: Shape, model: Any, keep: float, rounds: int) -> list[dict[str, Any]]:
    """Return the rows of a budget."""
    clock, ways = Clock(DEVICE), [*shape.ways]
    times_of: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    tokens: dict[str, int] = {}
    towers, image = [], shape.inputs(model, 1.0)
    for round_ in range(-1, rounds):  # the first is a warm-up
        turn = round_ % len(ways)
        for name in ways[turn:] + ways[:turn]:
            patched, inputs = of_way(shape, model, name, keep)
            tokens[name] = int((inputs["input_ids"] == IMAGE_ID).sum())
            with patched:
                time = clock(lambda inputs=inputs: model(**inputs, use_cache=True, logits_to_keep=1))
                if shape.ways[name][0]:
                    tokens[name] = tokenprune.stats(model).visual_tokens_per_layer[-1]
            if round_ >= 0:
                times_of[name].append(time)
        tower_seconds = clock(lambda: shape.tower(model, image))[0]
        if round_ >= 0:
            towers.append(tower_seconds)
    unpatched = times_of["unpatched"]
    rows = []
    for name, times in times_of.items():
        ratios = [
            [base[which] / other[which] for base, other in zip(unpatched, times, strict=True)] for which in (0, 1)
        ]
        rows.append({
            "way": name, "keep": keep, "tokens": tokens[name], "seconds": statistics.median(wall for wall, _ in times),
            "times": statistics.median(ratios[0]), "least": min(ratios[0]), "most": max(ratios[0]),
            "cpu": statistics.median(ratios[1]),
            "tower": statistics.median(a / b for a, (b, _) in zip(towers, unpatched, strict=True)),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, help="number of decoder layers")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.25, 0.5])
    add_options(parser)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    layers = args.layers or shape.layers
    model = shape.model(layers)
    about = header(DEVICE, layers=layers, columns=COLUMNS)
    same = dict(code=code_version(), layers=layers, rounds=args.rounds)
    file = Rows(results_path(DEVICE, shape.file), about, args, **same)
    table = Table(title="Time to first token, from pixels on")
    for column in COLUMNS.values():
        table.add_column(column)
    for keep in args.keep:
        for row in file.measure(("keep", keep), lambda keep=keep: measure(shape, model, keep, args.rounds)):
            table.add_row(*(f"{row[key]:.3g}" if isinstance(row[key], float) else str(row[key]) for key in COLUMNS))
    Console().print(table)


if __name__ == "__main__":
    main()
