# SPDX-License-Identifier: Apache-2.0
"""Compare `dymu` with the rules of its authors' code: thresholds, kept tokens, and merges per block.

    python benchmarks/experiments/studies/dymu_rules.py           # print the tables
    python benchmarks/experiments/studies/dymu_rules.py --page    # write them into docs/results/methods.md

Both sets of rules are plain loops over images in float64, written from a description of the authors' code. They run on
the demo model's tower and the held-out images: unchanged, without class token, and without it on 15 x 15 patches (an
odd number). The first half of the images calibrates the thresholds as one batch, which then merge the other half.
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
# Total merges of the authors' linear schedules: of CLIP-L's 576 patches in 24 blocks (LLaVA reads 23), and SigLIP-B's
# in 12.
TOTALS = (504, 384)


@dataclass(frozen=True)
class Rules:
    """Rules of the authors' code that differ from this library. With all False, the rules are the library's.

    Attributes:
        reorder: Reorder the tokens of images without merges, too: set A before set B.
        epsilon: Divide means by size + 1e-4.
        over_half: Allow more than half of an odd number of tokens to merge.
        by_similarity: Without a class token, order the remaining tokens of A by decreasing similarity.
    """

    reorder: bool = False
    epsilon: bool = False
    over_half: bool = False
    by_similarity: bool = False


OURS = Rules()
BATCH = Rules(reorder=True, epsilon=True, over_half=True)  # for calibration and batches of images
ALONE = Rules(by_similarity=True)  # for a single image


class Merged:
    """State of one image in a tower, float64, shape (tokens, hidden), with `protected` class tokens in front."""

    def __init__(self, x: Tensor, protected: int) -> None:
        self.x, self.protected, self.size = x, protected, torch.ones(len(x), dtype=torch.double)

    def attend(self, block: nn.Module) -> tuple[Tensor, Tensor]:
        """Add the attention. Return the best cosine of each token of A (without class token) to B, and its partner."""
        attention, h = block.self_attn, block.layer_norm1(self.x)
        q, k, v = (
            project(h).view(len(h), attention.num_heads, -1).transpose(0, 1)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )  # fmt: skip
        logits = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5 + self.size.log()
        self.x = self.x + attention.out_proj((logits.softmax(-1) @ v).transpose(0, 1).flatten(1))
        keys = nn.functional.normalize(k.mean(0), dim=-1)
        best, partner = (keys[::2] @ keys[1::2].T).max(dim=1)
        return best[self.protected :], partner[self.protected :]  # at most one class token, which is in A

    def max_merges(self, rules: Rules) -> int:
        sources = (len(self.x) + 1) // 2 - self.protected
        return sources if rules.over_half else min(sources, (len(self.x) - self.protected) // 2)

    def finish(self, block: nn.Module, best: Tensor, partner: Tensor, count: int, rules: Rules) -> None:
        """Merge the `count` best pairs, and add the MLP."""
        if count or rules.reorder:
            order = best.argsort(descending=True, stable=True) + self.protected  # indices in A
            sources, rest = order[:count], order[count:]
            if not rules.by_similarity or self.protected:
                rest = rest.sort().values
            rest = torch.cat([torch.arange(self.protected), rest])
            weighted, size = self.x * self.size[:, None], self.size
            targets = partner[sources - self.protected]
            total = weighted[1::2].index_add(0, targets, weighted[::2][sources])
            merged_sizes = size[1::2].index_add(0, targets, size[::2][sources])
            weighted, self.size = torch.cat([weighted[::2][rest], total]), torch.cat([size[::2][rest], merged_sizes])
            self.x = weighted / (self.size + (1e-4 if rules.epsilon else 0))[:, None]
        self.x = self.x + block.mlp(block.layer_norm2(self.x))


@torch.no_grad()
def calibrated(blocks: Sequence[nn.Module], images: Sequence[Tensor], protected: int, plan: Sequence[int],
               rules: Rules) -> list[float]:  # fmt: skip
    """Return each block's threshold: the next score after `plan` merges per image on average."""
    batch, thresholds = [Merged(x, protected) for x in images], []
    for block, count in zip(blocks, plan, strict=True):
        matches = [image.attend(block) for image in batch]
        edges = [
            (float(score), row)
            for row, (best, _) in enumerate(matches)
            for score in best.sort(descending=True).values[: batch[row].max_merges(rules)]
        ]
        edges.sort(key=lambda edge: -edge[0])
        total = min(count * len(batch), len(edges))
        thresholds.append((max(0.0, edges[total][0]) if total < len(edges) else 0.0) if count else 1.0)
        for row, (image, (best, partner)) in enumerate(zip(batch, matches, strict=True)):
            merges = sum(edge_row == row for _, edge_row in edges[:total])
            image.finish(block, best, partner, merges, rules if count else replace(rules, reorder=False, epsilon=False))
    return thresholds


@torch.no_grad()
def left(blocks: Sequence[nn.Module], images: Sequence[Tensor], protected: int, thresholds: Sequence[float],
         rules: Rules) -> list[int]:  # fmt: skip
    """Return the number of tokens of each image that the thresholds keep."""
    counts = []
    for x in images:
        image = Merged(x, protected)
        for block, threshold in zip(blocks, thresholds, strict=True):
            best, partner = image.attend(block)
            above = min(int((best > threshold).sum()), image.max_merges(rules)) if threshold < 1 else 0
            image.finish(block, best, partner, above, rules)
        counts.append(len(image.x) - protected)
    return counts


def authors_schedule(total: int, blocks: int) -> list[int]:
    """Return the merges per block of the authors' linear schedule.

    It starts at twice the mean and decreases by equal steps, all rounded down, until the sum is `total`. Later blocks
    do not merge.
    """
    first, counts = 2 * total // blocks, []
    for block in range(blocks):
        counts.append(min(int(first - block * first / blocks), total - sum(counts)))
    return counts


def inputs(side: int | None, class_token: bool) -> tuple[Sequence[nn.Module], list[Tensor], int]:
    """Return the demo tower's blocks, the input of the first block for each held-out image, and the class tokens."""
    from PIL import Image

    from tokenprune_bench.profiling.model import load_model
    from tokenprune_demo.heldout import load_heldout

    subject = load_model(device="cpu")
    tower: Any = copy.deepcopy(subject.model.model.vision_tower).double()
    tower = getattr(tower, "vision_model", tower)
    paths = sorted({example.path for example in load_heldout()})
    paths = [paths[index * len(paths) // IMAGES] for index in range(IMAGES)]
    pixels = subject.processor.image_processor(images=[Image.open(path).convert("RGB") for path in paths],
                                               return_tensors="pt")["pixel_values"].double()  # fmt: skip
    with torch.no_grad():
        embedded = tower.pre_layrnorm(tower.embeddings(pixels))
    if not class_token:
        embedded = embedded[:, 1:]
        grid_side = int(embedded.shape[1] ** 0.5)
        embedded = embedded.unflatten(1, (grid_side, grid_side))[:, :side, :side].flatten(1, 2)
    return tower.encoder.layers, list(embedded), int(class_token)


def thresholds_table(keeps: Sequence[float] = KEEPS, count: int = IMAGES) -> str:
    """Return the Markdown table of the effects of the rules."""
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
            thresholds = calibrated(blocks, first, protected, plan, OURS)
            differences = []
            for rules in (*(Rules(**{rule.name: True}) for rule in fields(Rules)[:3]), BATCH):
                authors_thresholds = calibrated(blocks, first, protected, plan, rules)
                differences.append(max(abs(a - b) for a, b in zip(thresholds, authors_thresholds, strict=True)))
            mean_counts = [
                sum(left(blocks, others, protected, taus, rules)) / len(others)
                for taus, rules in ((thresholds, OURS), (authors_thresholds, ALONE), (authors_thresholds, BATCH))
            ]
            cells = [f"{value:.1e}" if value else "0" for value in differences] + [
                f"{value:.1f}" for value in mean_counts
            ]
            lines.append(f"| {label}, {shape.patches} patches | {keep:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def schedules_table() -> str:
    """Return the Markdown table of the differences between linear schedules."""
    lines = [
        "| tower | merges in total | schedule | largest difference in a block | authors' merges in the unused block |",
        "|---|---:|---|---:|---:|",
    ]
    towers = (("CLIP-L, 23 of 24 blocks read", 577, 1, 24, 23), ("SigLIP-B, 12 blocks", 576, 0, 12, 12))
    for label, tokens, protected, blocks, read in towers:
        shape = Tower(tokens, protected, blocks, read)
        for total in TOTALS:
            for schedule in ("linear", "reverse_linear"):
                authors_counts = authors_schedule(total, blocks)
                authors_counts = authors_counts if schedule == "linear" else authors_counts[::-1]
                counts = count_merges(shape, shape.patches - total, schedule)
                difference = max(abs(a - b) for a, b in zip(counts, authors_counts, strict=True))
                lines.append(f"| {label} | {total} | {schedule} | {difference} | {sum(authors_counts[read:])} |")
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
