# SPDX-License-Identifier: Apache-2.0
"""One budget for all images of a prompt: equal shares beside shares by what the images hold.

    python benchmarks/experiments/shared_budget.py
    python dev/readme.py

A prompt shows 2, 4 or 8 images, dealt from photographs, other scenes and drawn documents, and has a quarter, a ninth or
a twentieth of their tokens. Ways to deal these out:

equal:    the same share to each image.
entropy:  by the entropy of a token's grey levels, mean over the image.
detail:   by how far neighbouring pixels differ, mean over the image.
compete:  as many as `divprune` takes of each where all tokens of the prompt compete (`per="prompt"`).

The total is the same, to the token. demo_qwen was trained on one image and can hardly tell six apart, so each question
is asked about its image alone, at the number of tokens that the image has in the prompt; `divprune` chooses them.

What was expected: nothing or a few points for "entropy" and "detail" where documents and scenes share a prompt, since
half of what counts in these images is small and plain; a loss for "compete", which takes what is unusual in the prompt.
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
TOKEN = 16  # pixels a side of a visual token of demo_qwen
SCENES = ("photo", "texture", "plain")


def grey(image: Any) -> np.ndarray:
    """Return an image's grey levels by token, `[tokens, pixels of one]`."""
    values = np.asarray(image.convert("L"))
    rows, columns = values.shape[0] // TOKEN, values.shape[1] // TOKEN
    cells = values[: rows * TOKEN, : columns * TOKEN].reshape(rows, TOKEN, columns, TOKEN)
    return cells.swapaxes(1, 2).reshape(-1, TOKEN, TOKEN)


def entropy(image: Any) -> float:
    """Return the entropy of a token's grey levels in nats, mean over the image."""
    shares = np.stack([np.bincount(cell.ravel(), minlength=256) for cell in grey(image)]) / TOKEN**2
    return float(-(shares * np.log(np.where(shares > 0, shares, 1))).sum(1).mean())


def detail(image: Any) -> float:
    """Return how far neighbouring pixels of a token differ, the mean of squares, mean over the image."""
    cells = grey(image).astype(np.float64)
    return float((np.diff(cells, axis=1) ** 2).mean() + (np.diff(cells, axis=2) ** 2).mean())


def dealt(total: int, weights: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """Return how many of `total` tokens each image gets, in proportion to its weight: at least 1, at most its size.

    What a full image cannot take goes to the others; the last tokens to the largest remainders."""
    share, least, most = np.array(weights, dtype=float) + 1e-9, np.ones(len(sizes)), np.array(sizes, dtype=float)
    low, high = 0.0, total / share.min()
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(middle * share, least, most).sum() < total else (low, middle)
    exact = np.clip(high * share, least, most)
    counts = np.floor(exact + 1e-6).astype(int)
    for place in np.argsort(counts - exact, kind="stable"):
        if counts.sum() < total and counts[place] < sizes[place]:
            counts[place] += 1
    return counts.tolist()


def competing(subject: Model, images: Sequence[Any], sizes: Sequence[int], keep: float) -> list[int]:
    """Return how many tokens of each image `divprune` keeps where all of a prompt compete."""
    inputs = subject.inputs([list(images)], ["what is shown?"])
    visual = (inputs["input_ids"][0] == subject.model.config.image_token_id).nonzero()[:, 0]
    image_of = np.repeat(np.arange(len(images)), sizes)
    with tokenprune.patched(subject.model, "divprune", keep=Budget(keep=keep, per="prompt"), guard="off", record=True):
        subject.model(**inputs)
        left = tokenprune.stats(subject.model).cuts[0].kept[0]
    return np.bincount(image_of[np.isin(visual.numpy(), np.asarray(left))], minlength=len(images)).tolist()


def prompts(pool: Sequence[Sequence[Any]], size: int, rounds: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of `size` images, as places in `pool`; each image stands in `rounds` of them."""
    rng, found = np.random.default_rng((seed, size)), []
    for _ in range(rounds):
        order = rng.permutation(len(pool)).tolist()
        found += [order[at : at + size] for at in range(0, len(order) - size + 1, size)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=16, help="of each kind")
    parser.add_argument("--rounds", type=int, default=1, help="prompts in which each image stands")
    parser.add_argument("--json", type=Path, default=FILE)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    subject, console = load_model("demo_qwen"), Console()
    sets = {one: heldout(subject, one, args.images) for one in SCENES} | {"document": documents(args.images)}
    pool = [questions for one in sets.values() for questions in one]
    kinds = [name for name, one in sets.items() for _ in one]
    images = [questions[0].images[0] for questions in pool]
    sizes = [subject.visual_tokens(subject.inputs([image], ["?"])) for image in images]
    said: dict[tuple[int, int], str] = {}

    def asked(place: int, count: int) -> str:
        if (place, count) not in said:
            with tokenprune.patched(subject.model, "divprune", keep=Budget(tokens=count), guard="off"):
                said[place, count] = answers(subject, [pool[place]])
        return said[place, count]

    with args.json.open("w") as file:
        header = {"record": "header", **subject.environment(), "images": args.images, "rounds": args.rounds}
        print(json.dumps(header), file=file, flush=True)
        for keep in KEEPS:
            for number in IMAGES:
                for prompt in prompts(pool, number, args.rounds):
                    total = sum(max(1, round(keep * sizes[one])) for one in prompt)
                    weights = {
                        "equal": [sizes[one] for one in prompt],
                        "entropy": [sizes[one] * entropy(images[one]) for one in prompt],
                        "detail": [sizes[one] * math.sqrt(detail(images[one])) for one in prompt],
                    }
                    counts = {way: dealt(total, of, [sizes[one] for one in prompt]) for way, of in weights.items()}
                    counts["compete"] = competing(
                        subject, [images[one] for one in prompt], [sizes[one] for one in prompt], keep
                    )
                    right = {
                        way: [asked(one, count) for one, count in zip(prompt, of, strict=True)]
                        for way, of in counts.items()
                    }
                    row = {"keep": keep, "images": number, "kinds": [kinds[one] for one in prompt], "total": total}
                    print(json.dumps({**row, "counts": counts, "right": right}), file=file, flush=True)
                console.print(keep, number)


if __name__ == "__main__":
    main()
