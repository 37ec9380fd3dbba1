# SPDX-License-Identifier: Apache-2.0
"""Find the reason for the low accuracy of some methods on the shipped model (docs/results/accuracy.md).

    python benchmarks/experiments/studies/losers.py --json benchmarks/results/losers.jsonl

tome, dymu (merging in the tower), three variants with the same groups of patches:

both:  the method: the tower's blocks run on merged tokens, and the language model sees one token per group.
tower: the tower merges, but the language model sees all 256 features. Its loss is the tower's loss.
after: an unpatched tower, whose embeddings are averaged by the same groups. Its loss is the loss of the groups.

uniform, two variants of even distances:

raster: the method: every n-th patch in row-major order, which on a square grid selects the same columns in each row.
grid:   the same number of patches, evenly spaced in rows and columns.

benchmarks/results/bench.jsonl has the same questions, with the other methods.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import torch
from asking import Replay, ask, share
from rich.console import Console
from torch import Tensor

import tokenprune
from tokenprune.integrations.hf.sequence.record import get_record
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_bench.suite import Bench, BenchPlan

SIDE = 16  # patches per side of the shipped model's grid
KEEPS = (0.5, 0.25, 0.11)


def groups_of(subject: Model, inputs: Any, method: str, keep: float) -> Tensor:
    """Return the first patch of each patch's group, long, shape (images, 256)."""
    model = subject.model
    with torch.no_grad(), tokenprune.patched(model, method, keep=keep, guard="off"):
        output = model.model.get_image_features(inputs["pixel_values"])
    return torch.stack(get_record(output).groups)


@contextmanager
def run_variant(subject: Model, inputs: Any, method: str, keep: float, how: str) -> Iterator[None]:
    """Run the model as a variant prescribes, for the length of a `with` block."""
    model = subject.model
    with ExitStack() as stack:
        if how == "both":
            stack.enter_context(tokenprune.patched(model, method, keep=keep, guard="off"))
        elif how == "tower":
            with tokenprune.patched(model, method, keep=keep, guard="off"), torch.no_grad():
                output = model.model.get_image_features(inputs["pixel_values"])
            features = torch.stack(list(output.pooler_output))
            stack.callback(model.model.multi_modal_projector.register_forward_hook(lambda *_: features).remove)
        elif how == "after":
            groups = groups_of(subject, inputs, method, keep)
            Replay.kept = groups == torch.arange(groups.shape[1])

            def average(module: Any, args: tuple, embeds: Tensor) -> Tensor:
                spread = groups[..., None].expand(embeds.shape)
                return torch.zeros_like(embeds).scatter_reduce_(1, spread, embeds, "mean", include_self=False)

            stack.callback(model.model.multi_modal_projector.register_forward_hook(average).remove)
            stack.enter_context(tokenprune.patched(model, "replay", keep=0.5, guard="off"))
        elif how == "raster":
            stack.enter_context(tokenprune.patched(model, "uniform", keep=keep, guard="off"))
        else:
            Replay.kept = even_on_grid(round(keep * SIDE**2)).expand(len(inputs["pixel_values"]), -1)
            stack.enter_context(tokenprune.patched(model, "replay", keep=0.5, guard="off"))
        yield


def even_on_grid(count: int) -> Tensor:
    """Return a mask of about `count` evenly spaced patches, shape (256,), with every other row shifted."""
    per_row = max(1, round(count**0.5))
    rows = max(1, round(count / per_row))
    kept = torch.zeros(SIDE, SIDE, dtype=torch.bool)
    for index in range(rows):
        row = int((index + 0.5) * SIDE / rows)
        shift = 0.25 if index % 2 else 0.75
        for column in range(per_row):
            kept[row, int((column + shift) * SIDE / per_row)] = True
    return kept.flatten()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=50)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    console, subject = Console(), load_model(device="cpu")
    bench = Bench(subject, BenchPlan(images=args.images, repeats=0))
    plan = [(method, variant) for method in ("tome", "dymu") for variant in ("both", "tower", "after")]
    plan += [("uniform", "raster"), ("uniform", "grid")]
    with args.json.open("w") as file:
        file.write(json.dumps(bench.header()) + "\n")
        for keep in KEEPS:
            for method, variant in plan:
                counts: list[float] = []

                def record_counts(rows: int, counts: list[float] = counts) -> None:
                    if tokenprune.is_patched(subject.model):
                        counts.append(tokenprune.stats(subject.model).visual_tokens_out / rows)

                changed = partial(run_variant, subject, method=method, keep=keep, how=variant)
                right = ask(bench, subject, changed, record_counts)
                tokens = sum(counts) / len(counts) if counts else SIDE**2
                record = {
                    "method": method,
                    "reading": variant,
                    "keep": keep,
                    "tokens_in_decoder": tokens,
                    "right": right,
                }
                file.write(json.dumps({"record": "losers", **record}) + "\n")
                file.flush()
                line = f"{method:>8} {variant:>6} {keep:<5} {tokens:5.0f} tokens: {share(right)}"
                console.print(line, highlight=False)


if __name__ == "__main__":
    main()
