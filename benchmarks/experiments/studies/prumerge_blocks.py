# SPDX-License-Identifier: Apache-2.0
"""Compare prumerge with attention of different tower blocks, on the shipped models (docs/results/methods.md).

    python benchmarks/experiments/studies/prumerge_blocks.py --json benchmarks/results/prumerge_blocks.jsonl

The authors read the tower's last block, with queries and keys of all heads as one wide head. LLaVA-1.5 uses the
features of the block before it. The shipped models use the last block, so this script compares the last block and the
one before it (for demo_qwen: the last but one block with full attention):

heads: attention per head, averaged over heads.
wide:  one head of full width, which needs a class token (demo_vlm).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import torch
from asking import ask, share
from rich.console import Console
from torch import Tensor

import tokenprune
from tokenprune.methods.pre_llm.prumerge import PruMerge
from tokenprune.methods.tiles import compute_patch_attention
from tokenprune.selection.observable_bases import TowerScores
from tokenprune.selection.observable_registry import register_observable
from tokenprune.selection.segments import ObservedAttention
from tokenprune_bench.profiling.model import load_model
from tokenprune_bench.suite import Bench, BenchPlan

ROW = ("model", "block", "heads", "keep")
BLOCKS = {"demo_vlm": (-1, -2), "demo_qwen": (-1, 2)}


@register_observable("wide_attention")
class WideAttention(TowerScores):
    """Attention of the class token to each patch with all heads as one, float32, shape (segments, 1, tokens)."""

    def compute_per_patch(self, attention: ObservedAttention, protected: int) -> Tensor:
        query, key = (tensor.float().transpose(1, 2).flatten(2) for tensor in (attention.query, attention.key))
        products = query[:, :1] @ key.transpose(1, 2) / query.shape[2] ** 0.5
        return products.softmax(-1)[:, :, protected:]


@dataclass(frozen=True)
class Other(PruMerge):
    """prumerge with another tower block (see `Pruner.encoder_layers`), and optionally all heads as one."""

    block: int = -1
    wide: bool = False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"wide_attention" if self.wide else "encoder_attention"})

    @property
    def encoder_layers(self) -> tuple[int, ...]:
        return (self.block,)

    def compute_attention(self, tokens: Any) -> Tensor:
        return tokens.wide_attention(self.block).mean(1) if self.wide else compute_patch_attention(tokens, self.block)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--models", default="demo_vlm,demo_qwen")
    parser.add_argument("--keeps", default="0.25,0.11")
    parser.add_argument("--json", type=Path, required=True, help="raw file; an existing file is continued")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    lines = args.json.read_text().splitlines() if args.json.exists() else []
    known = [{name: record.get(name) for name in ROW} for record in map(json.loads, lines)]
    with args.json.open("a") as file:
        for model in args.models.split(","):
            subject = load_model(model, device="cpu")
            bench = Bench(subject, BenchPlan(images=args.images, repeats=0))
            if not any(record["model"] == model for record in known):
                file.write(json.dumps(bench.header()) + "\n")
            for block, wide, keep in product(BLOCKS[model], (False, True), map(float, args.keeps.split(","))):
                row = dict(zip(ROW, (model, block, "wide" if wide else "heads", keep), strict=True))
                if row in known or (wide and model != "demo_vlm"):
                    continue
                method = Other(block=block, wide=wide)
                changed = partial(tokenprune.patched, subject.model, method, keep=keep, guard="off")
                right = ask(bench, subject, lambda inputs, changed=changed: changed())
                file.write(json.dumps({"record": "prumerge_blocks", **row, "right": right}) + "\n")
                file.flush()
                Console().print(
                    f"{model:>9} block {block:>2} {row['heads']:>5} {keep:<4}: {share(right)}", highlight=False
                )


if __name__ == "__main__":
    main()
