# SPDX-License-Identifier: Apache-2.0
"""Test whether the shipped model's tower can use patches of two sizes without training.

The result is negative (benchmarks/experiments/studies/README.md).

    python benchmarks/experiments/studies/patch_sizes.py --json benchmarks/results/patch_sizes.jsonl

The Adaptive Patch Transformer (arXiv 2510.18091) replaces smooth cells of 2 x 2 patches by one token: the cell resized
to one patch. Here, the cells with the lowest entropy of gray values become coarse, as many as the budget requires. A
coarse token gets the mean of its patches' position embeddings. No weights change. Three variants:

tower: coarse tokens in the tower; afterwards each patch gets its cell's feature, so the language model sees 256 tokens.
both:  the same, but the language model sees one token per coarse cell.
after: an unpatched tower, whose embeddings are averaged by the same cells. The difference to `both` is the tower's loss
       by two sizes.

benchmarks/results/bench.jsonl has the same questions, with the other methods.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import torch
from asking import Replay, ask, share
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

import tokenprune
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_bench.suite import Bench, BenchPlan

READINGS = ("both", "after", "tower")


def entropy(pixels: Tensor, cell: int) -> Tensor:
    """Return the entropy of each cell's gray values in bits, shape (images, cells).

    The gray values are stretched to the image's range. `pixels` has shape (images, 3, height, width).
    """
    grey = torch.einsum("bchw,c->bhw", pixels, torch.tensor([0.2989, 0.5870, 0.1140]))
    low, high = grey.amin((1, 2), keepdim=True), grey.amax((1, 2), keepdim=True)
    levels = ((grey - low) / (high - low).clamp(min=1e-6) * 255).long()
    side = levels.shape[-1] // cell
    levels = levels.view(-1, side, cell, side, cell).transpose(2, 3).reshape(-1, side * side, cell * cell)
    histogram = torch.zeros(*levels.shape[:2], 256).scatter_add_(2, levels, torch.ones(levels.shape)) / cell**2
    return torch.special.entr(histogram).sum(-1) / torch.log(torch.tensor(2.0))


def cells_of(pixels: Tensor, patch: int, tokens: int) -> Tensor:
    """Return the first patch of each patch's cell, shape (images, patches), with up to `tokens` cells in total."""
    side = pixels.shape[-1] // patch
    coarse = -(-(side**2 - tokens) // 3)
    order = entropy(pixels, 2 * patch).argsort(dim=1, stable=True)[:, :coarse]
    chosen = torch.zeros(len(pixels), (side // 2) ** 2, dtype=torch.bool).scatter_(1, order, True)
    fine = torch.arange(side**2).view(side, side)
    first = fine[::2, ::2].repeat_interleave(2, 0).repeat_interleave(2, 1).flatten()
    inside = chosen.view(-1, side // 2, side // 2).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)
    return torch.where(inside, first, fine.flatten())


@contextmanager
def two_sizes(subject: Model, reading: str, tokens: int) -> Iterator[None]:
    """Let the tower use two patch sizes, for the length of a `with` block."""
    base = subject.model.model
    embeddings, state = base.vision_tower.embeddings, {}

    def embed(module: Any, args: tuple, fine: Tensor) -> Tensor:
        pixels, patch = args[0], module.patch_size
        cells = state["cells"] = cells_of(pixels, patch, tokens)
        indices = torch.arange(cells.shape[1])
        Replay.kept = cells == indices
        if reading == "after":
            return fine
        small = F.interpolate(pixels, scale_factor=0.5, mode="bilinear", antialias=True)
        coarse = module.patch_embedding(small).flatten(2).transpose(1, 2)
        side = pixels.shape[-1] // patch
        table = module.position_embedding.weight[1:].view(side // 2, 2, side // 2, 2, -1).mean((1, 3)).flatten(0, 1)
        index = (indices // side // 2) * (side // 2) + indices % side // 2
        several = (torch.zeros_like(cells).scatter_add_(1, cells, torch.ones_like(cells)) > 1)[..., None]
        mixed = torch.where(several, (coarse + table)[:, index], fine[:, 1:])
        kept = Replay.kept.nonzero()[:, 1].view(len(pixels), -1)
        return torch.cat([fine[:, :1], mixed.gather(1, kept[..., None].expand(-1, -1, mixed.shape[-1]))], dim=1)

    def unmerge(module: Any, args: tuple) -> tuple:
        cell_index = (Replay.kept.cumsum(1) - 1).gather(1, state["cells"])
        return (args[0].gather(1, cell_index[..., None].expand(-1, -1, args[0].shape[-1])),)

    def average(module: Any, args: tuple, embeds: Tensor) -> Tensor:
        spread = state["cells"][..., None].expand(embeds.shape)
        return torch.zeros_like(embeds).scatter_reduce_(1, spread, embeds, "mean", include_self=False)

    with ExitStack() as stack:
        stack.callback(embeddings.register_forward_hook(embed).remove)
        if reading == "after":
            stack.callback(base.multi_modal_projector.register_forward_hook(average).remove)
        else:
            stack.callback(base.multi_modal_projector.register_forward_pre_hook(unmerge).remove)
        if reading != "tower":
            stack.enter_context(tokenprune.patched(subject.model, "replay", keep=tokens, guard="off"))
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=50)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    console, subject = Console(), load_model(device="cpu")
    bench = Bench(subject, BenchPlan(images=args.images, repeats=0))
    with args.json.open("w") as file:
        file.write(json.dumps(bench.header()) + "\n")
        for keep in (0.5, 0.25):
            for reading in READINGS:
                right = ask(bench, subject, lambda _, r=reading, k=keep: two_sizes(subject, r, round(256 * k)))
                cells = int(Replay.kept[0].sum())
                record = {
                    "reading": reading,
                    "keep": keep,
                    "tokens_in_tower": 256 if reading == "after" else cells,
                    "tokens_in_decoder": 256 if reading == "tower" else cells,
                    "right": right,
                }
                file.write(json.dumps({"record": "patch_sizes", **record}) + "\n")
                file.flush()
                line = f"{reading:>6} {keep:<5} {cells} tokens: {share(right)}"
                console.print(line, highlight=False)


if __name__ == "__main__":
    main()
