# SPDX-License-Identifier: Apache-2.0
"""Compare ways to share one budget among the images of a prompt.

    python benchmarks/experiments/shared_budget.py
    python dev/readme.py

A prompt shows 2, 4 or 8 images (photographs, other scenes and drawn documents) and keeps a quarter, a ninth or a
twentieth of their tokens. Ways to share the budget:

equal:    the same share for each image.
entropy:  by the entropy of the gray levels within a token, averaged over the image.
detail:   by the differences of neighboring pixels, averaged over the image.
compete:  the counts that `divprune` keeps if all tokens of the prompt compete (`per="prompt"`).

The total number of tokens is the same. demo_qwen was trained on single images and hardly separates six of them, so each
question is asked about its image only, with the number of tokens that the image has in the prompt. `divprune` selects
the tokens. The raw file is results/shared_budget.jsonl.

Expectations before the first run: zero to a few points for "entropy" and "detail" in prompts with documents and scenes,
since half of the important content in these images is small and plain; a loss for "compete", which prefers tokens that
are unusual in the prompt.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import numpy as np
import torch
from documents import documents
from rich.console import Console
from tower_blocks import answers, heldout

import tokenprune
from tokenprune import Budget
from tokenprune_bench.profiling.model import Model, load_model

FILE = Path(__file__).parents[1] / "results/shared_budget.jsonl"
WAYS = ("equal", "entropy", "detail", "compete")
KEEPS = (0.25, 0.11, 0.05)
IMAGES = (2, 4, 8)
TOKEN = 16  # pixels per side of a visual token of demo_qwen
SCENES = ("photo", "texture", "plain")


def grey(image: Any) -> np.ndarray:
    """Return an image's gray levels by token, shape (tokens, TOKEN, TOKEN)."""
    values = np.asarray(image.convert("L"))
    rows, columns = values.shape[0] // TOKEN, values.shape[1] // TOKEN
    cells = values[: rows * TOKEN, : columns * TOKEN].reshape(rows, TOKEN, columns, TOKEN)
    return cells.swapaxes(1, 2).reshape(-1, TOKEN, TOKEN)


def entropy(image: Any) -> float:
    """Return the entropy of a token's gray levels in nats, averaged over the image."""
    shares = np.stack([np.bincount(cell.ravel(), minlength=256) for cell in grey(image)]) / TOKEN**2
    return float(-(shares * np.log(np.where(shares > 0, shares, 1))).sum(1).mean())


def detail(image: Any) -> float:
    """Return the mean squared difference of neighboring pixels in a token, averaged over the image."""
    cells = grey(image).astype(np.float64)
    return float((np.diff(cells, axis=1) ** 2).mean() + (np.diff(cells, axis=2) ** 2).mean())


def dealt(total: int, weights: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """Return the tokens of each image in proportion to its weight: at least 1, at most its size, `total` in all.

    Images that reach their size pass the remaining tokens on to the others. Rounding favors the largest remainders.
    """
    share, min_counts, max_counts = (
        np.array(weights, dtype=float) + 1e-9,
        np.ones(len(sizes)),
        np.array(sizes, dtype=float),
    )
    low, high = 0.0, total / share.min()
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(middle * share, min_counts, max_counts).sum() < total else (low, middle)
    exact = np.clip(high * share, min_counts, max_counts)
    counts = np.floor(exact + 1e-6).astype(int)
    for index in np.argsort(counts - exact, kind="stable"):
        if counts.sum() < total and counts[index] < sizes[index]:
            counts[index] += 1
    return counts.tolist()


def competing(subject: Model, images: Sequence[Any], sizes: Sequence[int], keep: float) -> list[int]:
    """Return the number of tokens of each image that `divprune` keeps if all tokens of the prompt compete."""
    inputs = subject.inputs([list(images)], ["what is shown?"])
    visual = (inputs["input_ids"][0] == subject.model.config.image_token_id).nonzero()[:, 0]
    image_of = np.repeat(np.arange(len(images)), sizes)
    with tokenprune.patched(subject.model, "divprune", keep=Budget(keep=keep, per="prompt"), guard="off", record=True):
        subject.model(**inputs)
        kept = tokenprune.stats(subject.model).cuts[0].kept[0]
    return np.bincount(image_of[np.isin(visual.numpy(), np.asarray(kept))], minlength=len(images)).tolist()


def prompts(pool: Sequence[Sequence[Any]], size: int, rounds: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of `size` images, as indices into `pool`. Each image appears in `rounds` prompts."""
    rng, groups = np.random.default_rng((seed, size)), []
    for _ in range(rounds):
        order = rng.permutation(len(pool)).tolist()
        groups += [order[start : start + size] for start in range(0, len(order) - size + 1, size)]
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=16, help="number of images of each kind")
    parser.add_argument("--rounds", type=int, default=1, help="number of prompts per image")
    parser.add_argument("--json", type=Path, default=FILE)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    subject, console = load_model("demo_qwen"), Console()
    sets = {scene: heldout(subject, scene, args.images) for scene in SCENES} | {"document": documents(args.images)}
    pool = [questions for image_set in sets.values() for questions in image_set]
    kinds = [name for name, image_set in sets.items() for _ in image_set]
    images = [questions[0].images[0] for questions in pool]
    sizes = [subject.visual_tokens(subject.inputs([image], ["?"])) for image in images]
    known: dict[tuple[int, int], str] = {}

    def asked(index: int, count: int) -> str:
        if (index, count) not in known:
            with tokenprune.patched(subject.model, "divprune", keep=Budget(tokens=count), guard="off"):
                known[index, count] = answers(subject, [pool[index]])
        return known[index, count]

    with args.json.open("w") as file:
        header = {"record": "header", **subject.environment(), "images": args.images, "rounds": args.rounds}
        print(json.dumps(header), file=file, flush=True)
        for keep in KEEPS:
            for num_images in IMAGES:
                for prompt in prompts(pool, num_images, args.rounds):
                    total = sum(max(1, round(keep * sizes[index])) for index in prompt)
                    weights = {
                        "equal": [sizes[index] for index in prompt],
                        "entropy": [sizes[index] * entropy(images[index]) for index in prompt],
                        "detail": [sizes[index] * math.sqrt(detail(images[index])) for index in prompt],
                    }
                    counts = {
                        way: dealt(total, weight_of, [sizes[index] for index in prompt])
                        for way, weight_of in weights.items()
                    }
                    counts["compete"] = competing(
                        subject, [images[index] for index in prompt], [sizes[index] for index in prompt], keep
                    )
                    right = {
                        way: [asked(index, count) for index, count in zip(prompt, count_of, strict=True)]
                        for way, count_of in counts.items()
                    }
                    row = {
                        "keep": keep,
                        "images": num_images,
                        "kinds": [kinds[index] for index in prompt],
                        "total": total,
                    }
                    print(json.dumps({**row, "counts": counts, "right": right}), file=file, flush=True)
                console.print(keep, num_images)


if __name__ == "__main__":
    main()
