# SPDX-License-Identifier: Apache-2.0
"""Test whether combinations of known ideas beat the best published method at equal cost, without training.

    python experiments/studies/combinations.py    # a quarter of demo_smol's held-out images; continues an existing file

Each combination is a method of a few lines that acts at the decoder's entry, as `divprune` and `scope`. It is compared
with the best published method by a one-sided McNemar test. With p below .05, it would have been tested on the remaining
images and on another model. The raw file is results/combinations.jsonl.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import calm_threads  # noqa: F401
import torch
from all_methods import Rows
from rich.table import Table
from torch import Tensor

from tokenprune.cli.common import get_console
from tokenprune.kernels.coverage import cosine_products, cosines, greedy_cover
from tokenprune.kernels.farthest import farthest
from tokenprune.kernels.pairs import Relation
from tokenprune.kernels.take import top_mask
from tokenprune.methods.pre_llm.pool import split_into_rectangles
from tokenprune.methods.registry import register
from tokenprune.methods.scores import compute_saliency, rescale
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens
from tokenprune_bench.cli.common import show_progress
from tokenprune_bench.profiling.model import load_model
from tokenprune_bench.results import read_records, summarise
from tokenprune_bench.significance import better_p, interleave_seeds
from tokenprune_bench.suite import Bench, BenchPlan
from tokenprune_demo.heldout import load_heldout

OUT = Path(__file__).parents[2] / "results/combinations.jsonl"
PUBLISHED = ("divprune", "scope", "cdpruner", "mmtok")
PAPER = "none (a study)"


def asked(tokens: VisualTokens) -> Tensor:
    """Return scores, float32, shape (segments, tokens): similarity to the best word of the question.

    The mean similarity of the image's tokens to the word is subtracted.
    """
    text, mask = tokens.text, tokens.mask
    if not text.mask.shape[1]:
        return mask.float()
    cosine = cosines(tokens.hidden, text.hidden, mask)
    mean = (cosine * mask.unsqueeze(2)).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
    return (cosine - mean).masked_fill(~text.mask.unsqueeze(1), -torch.inf).amax(2)


def covering(tokens: VisualTokens, factor: Tensor) -> Tensor:
    """Return a mask, shape (segments, tokens), of tokens that cover the image best. `factor` weights the gains."""
    relation = Relation(cosine_products(tokens.hidden, tokens.mask))
    return greedy_cover([relation], tokens.mask, tokens.budget, max(tokens.keep), factor)


def merge_dropped(tokens: VisualTokens, keep: Tensor) -> Selection:
    """Merge each dropped token into the most similar token of `keep`."""
    cosine = cosines(tokens.hidden, mask=tokens.mask).masked_fill(~keep.unsqueeze(1), -torch.inf)
    assign = torch.where(keep, torch.arange(keep.shape[1]), cosine.argmax(2)).masked_fill(~tokens.mask, -1)
    return Selection(keep, assign, counts=tokens.keep)


@register("cover_merge", site=Site.PRE_LLM, needs=("encoder_attention",), paper=PAPER, merges=True)
@dataclass(frozen=True)
class CoverMerge(Pruner):
    """Select as `scope`, and merge all other tokens into the most similar selected token."""

    def select(self, tokens: VisualTokens) -> Selection:
        return merge_dropped(tokens, covering(tokens, rescale(compute_saliency(tokens), tokens.mask, 1e-6)))


@register("cover_asked", site=Site.PRE_LLM, paper=PAPER)
@dataclass(frozen=True)
class CoverAsked(Pruner):
    """Coverage weighted by similarity to a word of the question instead of `scope`'s saliency."""

    def select(self, tokens: VisualTokens) -> Selection:
        return Selection(covering(tokens, rescale(asked(tokens), tokens.mask, 0.05)), counts=tokens.keep)


@register("cover_both", site=Site.PRE_LLM, needs=("encoder_attention",), paper=PAPER)
@dataclass(frozen=True)
class CoverBoth(Pruner):
    """Coverage weighted by the product of `scope`'s saliency and similarity to a word of the question."""

    def select(self, tokens: VisualTokens) -> Selection:
        salient = rescale(compute_saliency(tokens), tokens.mask, 1e-6)
        return Selection(covering(tokens, salient * rescale(asked(tokens), tokens.mask, 0.05)), counts=tokens.keep)


@register("half_asked", site=Site.PRE_LLM, paper=PAPER)
@dataclass(frozen=True)
class HalfAsked(Pruner):
    """Half of the budget by similarity to a word of the question, the other half by `divprune`."""

    def select(self, tokens: VisualTokens) -> Selection:
        half = tokens.budget // 2
        named = top_mask(asked(tokens), tokens.mask, half, max(tokens.keep))
        others = farthest(tokens.hidden, tokens.mask & ~named, tokens.budget - half, max(tokens.keep))
        return Selection(named | others, counts=tokens.keep)


@register("pool_distinct", site=Site.PRE_LLM, paper=PAPER, merges=True)
@dataclass(frozen=True)
class PoolDistinct(Pruner):
    """A quarter of the budget as means of rectangles that cover the image, the rest by `divprune`."""

    def select(self, tokens: VisualTokens) -> Selection:
        size = tokens.mask.shape
        middles, assign = torch.zeros(size, dtype=torch.bool), torch.full(size, -1)
        for row, (count, budget, grid) in enumerate(zip(tokens.counts, tokens.keep, tokens.grids, strict=True)):
            cell, middle = split_into_rectangles(count, max(1, budget // 4), grid)
            middles[row, middle], assign[row, :count] = True, middle[cell]
        rest = tokens.budget - middles.sum(1)
        keep = middles | farthest(tokens.hidden, tokens.mask & ~middles, rest, max(tokens.keep))
        return Selection(keep, torch.where(keep, torch.arange(size[1]), assign), counts=tokens.keep)


COMBINATIONS = ("cover_merge", "cover_asked", "cover_both", "half_asked", "pool_distinct")


def ask(out: Path, threads: int) -> None:
    """Ask the baselines, the published methods and the combinations about images 1, 5, 9 ... of demo_smol."""
    torch.set_num_threads(threads)
    subject = load_model("demo_smol", device="cpu", dtype="bfloat16")
    questions: list[Any] = [example for example in load_heldout(folder=subject.heldout) if example.index % 4 == 1]
    plan = BenchPlan((*PUBLISHED, *COMBINATIONS), (0.25, 0.11), batch_size=16, repeats=0, seeds=(0,))
    with show_progress() as step, Rows(out, Bench(subject, plan, questions=questions).header()) as rows:
        list(Bench(subject, plan, step, questions=questions, folder=rows).records())


def table(path: Path) -> Table:
    """Return the accuracy of each method, and the p-values of the combinations against the best published method."""
    results = summarise(read_records(path))
    table = Table("method", "keep", "right, %", "p against the best published")
    for keep in (0.25, 0.11):
        right = {
            name: interleave_seeds(answers.right)
            for (name, answer_keep), answers in results.answers.items()
            if answer_keep == keep
        }
        best = max(PUBLISHED, key=lambda name: sum(map(int, right[name])))
        for row in (row for row in results.rows[1:] if row.keep == keep):
            share = row.overall
            p = f"{better_p(right[row.method], right[best]):.2f} ({best})" if row.method in COMBINATIONS else ""
            table.add_row(row.method, f"{keep}", f"{100 * share.value:.1f} [{share.low:.0%}, {share.high:.0%}]", p)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    ask(args.out, args.threads)
    get_console().print(table(args.out))


if __name__ == "__main__":
    main()
