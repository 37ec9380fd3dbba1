# SPDX-License-Identifier: Apache-2.0
"""Time to the first token, from pixels on, where tokens leave after the vision tower, inside it, or before it.

    python experiments/first_token.py --resume

Qwen2.5-VL with random weights, every width an eighth of the 7 B model's, all 32 blocks of its tower with their windows,
and `--layers` of the decoder's 28, so that the tower takes about half of the unpatched first token, as it does on an
H200 (docs/guide/gpu.md). One image of 1,024 visual tokens and 64 of text around it; a forward of the whole model that
caches, in float32. Ways: the model as it is; `divprune` after the tower; `tome` in every block; `towerdrop` at the
input of blocks 8, 2 and 0; and a smaller image of as many tokens as the others keep. The processor's work, which a
smaller image saves too, is left out.

All ways take turns in one process, each round in another order; a figure is the median over rounds of the unpatched
model's time over the way's, wall time and CPU time of the process. tower: the share of the unpatched time that the
tower takes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import calm_threads  # noqa: F401
import torch
from common import (
    AFTER,
    BEFORE,
    DECODERS,
    Clock,
    Rows,
    add_options,
    code_version,
    default_device,
    header,
    qwen,
    results_path,
)
from rich.console import Console
from rich.table import Table

import tokenprune

SIDE = 64  # patches of the image's sides: 1,024 tokens
WIDTHS = dict(hidden_size=448, intermediate_size=2368, num_attention_heads=7, num_key_value_heads=1, vocab_size=4096)
TOWER = dict(
    depth=32, hidden_size=160, intermediate_size=428, num_heads=4, patch_size=14, window_size=112,
    fullatt_block_indexes=[7, 15, 23, 31],
)  # fmt: skip
DEVICE = torch.device(default_device())
Way = tuple[str, dict[str, Any]]
WAYS: dict[str, Way] = {
    "unpatched": ("", {}),
    "divprune, after the tower": ("divprune", {}),
    "tome, in every block": ("tome", {}),
    "towerdrop, block 8": ("towerdrop", {"layer": 8}),
    "towerdrop, block 2": ("towerdrop", {"layer": 2}),
    "towerdrop, block 0": ("towerdrop", {"layer": 0}),
    "a smaller image": ("", {}),
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


def inputs_of(model: Any, side: int) -> dict[str, torch.Tensor]:
    """Return an image of `side` times `side` patches of noise, smooth in part, and the prompt around it."""
    made = torch.Generator().manual_seed(0)
    coarse = torch.randn(side // 8, side // 8, 3 * 2 * 14 * 14, generator=made)
    pixels = coarse.repeat_interleave(8, 0).repeat_interleave(8, 1) + 0.3 * torch.randn(
        side, side, 3 * 2 * 14 * 14, generator=made
    )
    squares = pixels.unflatten(0, (-1, 2)).unflatten(2, (-1, 2)).transpose(1, 2)  # patches stand square by square
    ids = torch.randint(100, 4000, (1, BEFORE + side * side // 4 + AFTER), generator=made)
    ids[:, BEFORE : BEFORE + side * side // 4] = model.config.image_token_id
    ids[:, BEFORE - 1] = model.config.vision_start_token_id
    kinds = (ids == model.config.image_token_id).int()
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds,
        "pixel_values": squares.flatten(0, 3), "image_grid_thw": torch.tensor([[1, side, side]]),
    }  # fmt: skip


def of_way(model: Any, name: str, keep: float) -> tuple[Any, Callable[[], Any]]:
    """Return a way's patch, and its run."""
    method, options = WAYS[name]
    small = name == "a smaller image"
    inputs = inputs_of(model, round(SIDE * keep**0.5 / 8) * 8 if small else SIDE)
    patched = tokenprune.patched(model, method, keep=keep, guard="off", **options) if method else nullcontext()
    return patched, lambda: model(**inputs, use_cache=True, logits_to_keep=1)


def measure(model: Any, keep: float, rounds: int) -> list[dict[str, Any]]:
    """Return the rows of a budget."""
    clock = Clock(DEVICE)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    tokens: dict[str, int] = {}
    towers, image = [], inputs_of(model, SIDE)
    tower = partial(model.model.visual, image["pixel_values"], grid_thw=image["image_grid_thw"])
    for number in range(-1, rounds):  # one to warm up
        turn = number % len(WAYS)
        for name in [*WAYS][turn:] + [*WAYS][:turn]:
            patched, run = of_way(model, name, keep)
            with patched:
                time = clock(run)
                if WAYS[name][0]:
                    tokens[name] = tokenprune.stats(model).visual_tokens_per_layer[-1]
            if number >= 0:
                taken[name].append(time)
        alone = clock(tower)[0]
        if number >= 0:
            towers.append(alone)
    whole = taken["unpatched"]
    rows = []
    for name, times in taken.items():
        ratios = [[one[which] / other[which] for one, other in zip(whole, times, strict=True)] for which in (0, 1)]
        left = tokens.get(name, SIDE * SIDE // 4 if name == "unpatched" else (round(SIDE * keep**0.5 / 8) * 4) ** 2)
        rows.append({
            "way": name, "keep": keep, "tokens": left, "seconds": statistics.median(one for one, _ in times),
            "times": statistics.median(ratios[0]), "least": min(ratios[0]), "most": max(ratios[0]),
            "cpu": statistics.median(ratios[1]),
            "tower": statistics.median(a / b for a, (b, _) in zip(towers, whole, strict=True)),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=14, help="of the decoder")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.25, 0.5])
    add_options(parser)
    args = parser.parse_args()
    model = model_of(args.layers)
    path = results_path(DEVICE, "first_token", False)
    about = header(DEVICE, layers=args.layers, columns=COLUMNS)
    file = Rows(path, about, args, code=code_version(), layers=args.layers, rounds=args.rounds)
    table = Table(title="First token, from pixels on")
    for column in COLUMNS.values():
        table.add_column(column)
    for keep in args.keep:
        for row in file.measure(("keep", keep), lambda keep=keep: measure(model, keep, args.rounds)):
            table.add_row(*(f"{row[key]:.3g}" if isinstance(row[key], float) else str(row[key]) for key in COLUMNS))
    Console().print(table)


if __name__ == "__main__":
    main()
