# SPDX-License-Identifier: Apache-2.0
"""How far `dymu` is from its authors' code, rule by rule: thresholds, tokens that are left, merges in each block.

    python benchmarks/experiments/studies/dymu_rules.py           # print the tables
    python benchmarks/experiments/studies/dymu_rules.py --page    # write them into docs/results/methods.md

Both sets of rules are plain loops over images in float64, written from a description of the authors' code, on the demo
model's tower and the held-out images: as it is, without its class token, and without it on 15 x 15 patches, an odd
number. The first half of the images calibrates, as one batch; the other half is merged by the thresholds.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import torch
from common import fill_page
from torch import Tensor, nn

from tokenprune.selection.sites.encoder import Tower
from tokenprune_bench.calibration.merge import count_merges

PAGE = Path(__file__).parents[3] / "docs" / "results" / "methods.md"
BEGIN, END = "<!-- rules:begin (benchmarks/experiments/studies/dymu_rules.py --page) -->", "<!-- rules:end -->"
KEEPS = (0.5, 0.25)
IMAGES = 64
# What the authors merge by linear schedules: of CLIP-L's 576 patches in 24 blocks (LLaVA reads 23), SigLIP-B's in 12.
TOTALS = (504, 384)


@dataclass(frozen=True)
class Rules:
    """What the authors' code does and this library does not; all False are the library's rules.

    reorder: an image that merges nothing has its tokens reordered too, A before B. epsilon: means are divided by the
    size + 1e-4. over_half: of an odd number of tokens more than half may merge. by_similarity: without a class token
    what is left of A comes in order of falling similarity, not of place.
    """

    reorder: bool = False
    epsilon: bool = False
    over_half: bool = False
    by_similarity: bool = False


OURS = Rules()
BATCH = Rules(reorder=True, epsilon=True, over_half=True)  # in calibration, and for several images at once
ALONE = Rules(by_similarity=True)  # for one image


class Merged:
    """One image on its way through a tower, `[n, C]` float64. protected: class tokens in front."""

    def __init__(self, x: Tensor, protected: int) -> None:
        self.x, self.protected, self.size = x, protected, torch.ones(len(x), dtype=torch.double)

    def attend(self, block: nn.Module) -> tuple[Tensor, Tensor]:
        """Add the attention; return for each token of A but the class token its best cosine to one of B, and which."""
        at, h = block.self_attn, block.layer_norm1(self.x)
        q, k, v = (
            p(h).view(len(h), at.num_heads, -1).transpose(0, 1) for p in (at.q_proj, at.k_proj, at.v_proj)
        )  # fmt: skip
        logits = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5 + self.size.log()
        self.x = self.x + at.out_proj((logits.softmax(-1) @ v).transpose(0, 1).flatten(1))
        keys = nn.functional.normalize(k.mean(0), dim=-1)
        best, partner = (keys[::2] @ keys[1::2].T).max(dim=1)
        return best[self.protected :], partner[self.protected :]  # at most one class token, which is in A

    def most(self, rules: Rules) -> int:
        sources = (len(self.x) + 1) // 2 - self.protected
        return sources if rules.over_half else min(sources, (len(self.x) - self.protected) // 2)

    def finish(self, block: nn.Module, best: Tensor, partner: Tensor, number: int, rules: Rules) -> None:
        """Merge the `number` best pairs, and add the MLP."""
        if number or rules.reorder:
            order = best.argsort(descending=True, stable=True) + self.protected  # places in A
            gone, rest = order[:number], order[number:]
            if not rules.by_similarity or self.protected:
                rest = rest.sort().values
            rest = torch.cat([torch.arange(self.protected), rest])
            weighted, size = self.x * self.size[:, None], self.size
            into = partner[gone - self.protected]
            total = weighted[1::2].index_add(0, into, weighted[::2][gone])
            each = size[1::2].index_add(0, into, size[::2][gone])
            weighted, self.size = torch.cat([weighted[::2][rest], total]), torch.cat([size[::2][rest], each])
            self.x = weighted / (self.size + (1e-4 if rules.epsilon else 0))[:, None]
        self.x = self.x + block.mlp(block.layer_norm2(self.x))


@torch.no_grad()
def calibrated(blocks: Sequence[nn.Module], images: Sequence[Tensor], protected: int, plan: Sequence[int],
               rules: Rules) -> list[float]:  # fmt: skip
    """Return each block's threshold: the best pairs of the batch merge, `plan` of them an image; the next one is it."""
    batch, found = [Merged(x, protected) for x in images], []
    for block, number in zip(blocks, plan, strict=True):
        seen = [one.attend(block) for one in batch]
        edges = [
            (float(score), row)
            for row, (best, _) in enumerate(seen)
            for score in best.sort(descending=True).values[: batch[row].most(rules)]
        ]
        edges.sort(key=lambda edge: -edge[0])
        total = min(number * len(batch), len(edges))
        found.append((max(0.0, edges[total][0]) if total < len(edges) else 0.0) if number else 1.0)
        for row, (one, (best, partner)) in enumerate(zip(batch, seen, strict=True)):
            merges = sum(of == row for _, of in edges[:total])
            one.finish(block, best, partner, merges, rules if number else replace(rules, reorder=False, epsilon=False))
    return found


@torch.no_grad()
def left(blocks: Sequence[nn.Module], images: Sequence[Tensor], protected: int, thresholds: Sequence[float],
         rules: Rules) -> list[int]:  # fmt: skip
    """Return how many tokens of each image the thresholds leave."""
    numbers = []
    for x in images:
        one = Merged(x, protected)
        for block, threshold in zip(blocks, thresholds, strict=True):
            best, partner = one.attend(block)
            above = min(int((best > threshold).sum()), one.most(rules)) if threshold < 1 else 0
            one.finish(block, best, partner, above, rules)
        numbers.append(len(one.x) - protected)
    return numbers


def authors_schedule(total: int, blocks: int) -> list[int]:
    """Return how many tokens each block merges by the authors' linear schedule: it begins at twice the mean, rounded
    down, and falls by equal steps, each count rounded down, until `total` is reached; the blocks behind merge none."""
    first, counts = 2 * total // blocks, []
    for block in range(blocks):
        counts.append(min(int(first - block * first / blocks), total - sum(counts)))
    return counts


def inputs(side: int | None, class_token: bool) -> tuple[Sequence[nn.Module], list[Tensor], int]:
    """The demo tower's blocks, and what enters the first one of them for each held-out image."""
    from PIL import Image

    from tokenprune_bench.profiling.model import load_model
    from tokenprune_demo.heldout import load_heldout

    subject = load_model(device="cpu")
    tower: Any = copy.deepcopy(subject.model.model.vision_tower).double()
    tower = getattr(tower, "vision_model", tower)
    paths = sorted({example.path for example in load_heldout()})
    paths = [paths[place * len(paths) // IMAGES] for place in range(IMAGES)]
    pixels = subject.processor.image_processor(images=[Image.open(path).convert("RGB") for path in paths],
                                               return_tensors="pt")["pixel_values"].double()  # fmt: skip
    with torch.no_grad():
        embedded = tower.pre_layrnorm(tower.embeddings(pixels))
    if not class_token:
        embedded = embedded[:, 1:]
        whole = int(embedded.shape[1] ** 0.5)
        embedded = embedded.unflatten(1, (whole, whole))[:, :side, :side].flatten(1, 2)
    return tower.encoder.layers, list(embedded), int(class_token)


def thresholds_table(keeps: Sequence[float] = KEEPS, count: int = IMAGES) -> str:
    """Return the table of what the rules change, as Markdown."""
    lines = [
        "| tower | keep | thresholds: reordering | + 1e-4 | over half | all three "
        "| kept, tokenprune | kept, authors, one image | kept, authors, batch |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    towers = (("unchanged", None, True), ("no class token", None, False), ("no class token, 15 x 15", 15, False))
    for label, side, class_token in towers:
        blocks, images, protected = inputs(side, class_token)
        half = count // 2
        first, others = images[:half], images[half:count]
        shape = Tower(len(images[0]), protected, len(blocks), len(blocks))
        for keep in keeps:
            plan = count_merges(shape, round(keep * shape.patches), "constant")
            own = calibrated(blocks, first, protected, plan, OURS)
            apart = []
            for rules in (*(Rules(**{one.name: True}) for one in fields(Rules)[:3]), BATCH):
                theirs = calibrated(blocks, first, protected, plan, rules)
                apart.append(max(abs(a - b) for a, b in zip(own, theirs, strict=True)))
            numbers = [
                sum(left(blocks, others, protected, taus, rules)) / len(others)
                for taus, rules in ((own, OURS), (theirs, ALONE), (theirs, BATCH))
            ]
            cells = [f"{one:.1e}" if one else "0" for one in apart] + [f"{one:.1f}" for one in numbers]
            lines.append(f"| {label}, {shape.patches} patches | {keep:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def schedules_table() -> str:
    """Return the table of how the linear schedules differ, as Markdown."""
    lines = [
        "| tower | merges in total | schedule | largest difference in a block | authors' merges in the unused block |",
        "|---|---:|---|---:|---:|",
    ]
    towers = (("CLIP-L, 23 of 24 blocks read", 577, 1, 24, 23), ("SigLIP-B, 12 blocks", 576, 0, 12, 12))
    for label, tokens, protected, blocks, read in towers:
        shape = Tower(tokens, protected, blocks, read)
        for total in TOTALS:
            for schedule in ("linear", "reverse_linear"):
                theirs = authors_schedule(total, blocks)
                theirs = theirs if schedule == "linear" else theirs[::-1]
                own = count_merges(shape, shape.patches - total, schedule)
                apart = max(abs(a - b) for a, b in zip(own, theirs, strict=True))
                lines.append(f"| {label} | {total} | {schedule} | {apart} | {sum(theirs[read:])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the tables into docs/results/methods.md")
    torch.set_num_threads(1)
    args = parser.parse_args()
    tables = f"{thresholds_table()}\n\n{schedules_table()}"
    if not args.page:
        print(tables)
        return
    fill_page(PAGE, BEGIN, END, tables)


if __name__ == "__main__":
    main()
