# SPDX-License-Identifier: Apache-2.0
"""Measure how well the guard separates images of text from other images, at the input sizes of vision towers.

python experiments/guard_images.py            # measure and rewrite results/guard_images.jsonl (2 minutes)
python benchmarks/experiments/guard_images.py --roc      # print the tables of the committed file

Documents are drawn. Photographs come from scikit-image, scikit-learn and matplotlib. The shipped suite's images (a word
and a digit among shapes) count as images without text. The limit was chosen on seed 0. Seed 1 tests it with other
drawings, other crops of the same photographs, and other images of the suite.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import calm_threads  # noqa: F401
import numpy as np
import torch
from guard_documents import documents, photographs
from PIL import Image

from tokenprune.integrations.hf.guard.images import compute_text_shares, split_blocks
from tokenprune.integrations.hf.guard.settings import TEXT_LIMIT
from tokenprune_demo.heldout import load_heldout

RESULTS = Path(__file__).parents[1] / "results/guard_images.jsonl"
LIMITS = (0.15, 0.2, 0.25, 0.3, 0.35, 0.4)


def fit(image: Image.Image, width: int, height: int) -> Image.Image:
    return image.resize((width, height), Image.Resampling.BICUBIC)


def cropped(side: int) -> Callable[[Image.Image], Image.Image]:
    """CLIP and LLaVA-1.5: scale the shorter edge to `side`, then crop the center."""

    def make(image: Image.Image) -> Image.Image:
        scale = side / min(image.size)
        image = fit(image, max(side, round(image.width * scale)), max(side, round(image.height * scale)))
        left, top = (image.width - side) // 2, (image.height - side) // 2
        return image.crop((left, top, left + side, top + side))

    return make


def tiled(image: Image.Image, side: int = 448, max_tiles: int = 6) -> Image.Image:
    """InternVL: use the tile grid with the closest aspect ratio."""
    grids = ((a, b) for a in range(1, max_tiles + 1) for b in range(1, max_tiles + 1) if a * b <= max_tiles)
    wide, high = min(grids, key=lambda grid: abs(grid[0] / grid[1] - image.width / image.height))
    return fit(image, wide * side, high * side)


def native(image: Image.Image, factor: int = 28, max_pixels: int = 1280 * 28 * 28) -> Image.Image:
    """Qwen2.5-VL: keep the image size, up to a limit."""
    scale = min(1.0, (max_pixels / (image.width * image.height)) ** 0.5)
    return fit(image, *(max(factor, round(edge * scale / factor) * factor) for edge in image.size))


SIZES = {
    "224 crop": cropped(224),
    "336 crop": cropped(336),
    "384 square": lambda image: fit(image, 384, 384),
    "448 tiles": tiled,
    "native": native,
}


def images(seed: int) -> Iterator[tuple[str, str, Image.Image]]:
    """Yield (set, name, image)."""
    yield from (("document", name, image) for name, image in documents(9, seed))
    yield from (("photograph", name, image) for name, image in photographs(3, seed))
    examples = {example.index: example for example in load_heldout(["word"])}
    for index in range(60 * seed, 60 * seed + 60):
        yield "suite", examples[index].background, examples[index].image


def measure(image: Image.Image) -> float:
    blocks = split_blocks(torch.from_numpy(np.array(image, np.float32)).permute(2, 0, 1)[None])[0]
    return float(compute_text_shares(blocks, torch.zeros(len(blocks), dtype=torch.long), 1))


def records() -> Iterator[dict[str, object]]:
    for seed in (0, 1):
        for kind, name, image in images(seed):
            for size, prepare in SIZES.items():
                value = measure(prepare(image))
                yield {"seed": seed, "set": kind, "name": name, "size": size, "looks": round(value, 4)}


def rates(rows: list[dict], limit: float) -> tuple[float, float, float]:
    """Return the shares of documents, photographs and suite images above a limit."""
    flags_by_set = {kind: [row["looks"] > limit for row in rows if row["set"] == kind] for kind in SETS}
    return tuple(sum(flags) / max(1, len(flags)) for flags in flags_by_set.values())


SETS = ("document", "photograph", "suite")  # the shipped suite's own images


def auc(rows: list[dict]) -> float:
    """Return the probability that a document has a higher score than another image."""
    text = np.array([row["looks"] for row in rows if row["set"] == "document"])
    other = np.array([row["looks"] for row in rows if row["set"] != "document"])
    return float((text[:, None] > other).mean() + (text[:, None] == other).mean() / 2)


def read() -> list[dict]:
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def table(rows: list[dict]) -> str:
    """Return the table of rates and area under the curve per size, on seed 1."""
    lines = [
        "| size | documents found | photographs taken for text | suite images taken for text | area under ROC |",
        "|---|---|---|---|---|",
    ]
    checks = [row for row in rows if row["seed"] == 1]
    for size in (*SIZES, "all"):
        part = [row for row in checks if size in (row["size"], "all")]
        shares = " | ".join(f"{100 * share:.1f} %" for share in rates(part, TEXT_LIMIT))
        lines.append(f"| {size} | {shares} | {auc(part):.3f} |")
    return "\n".join(lines)


def roc(rows: list[dict]) -> str:
    """Return the table of rates at other limits, on both seeds."""
    lines = ["| limit | " + " | ".join(f"seed {seed}: {kind}" for seed in (0, 1) for kind in SETS) + " |"]
    lines.append("|---" * 7 + "|")
    for limit in LIMITS:
        shares = [share for seed in (0, 1) for share in rates([row for row in rows if row["seed"] == seed], limit)]
        lines.append(f"| {limit:g} | " + " | ".join(f"{100 * share:.1f} %" for share in shares) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--roc", action="store_true")
    if not parser.parse_args().roc:
        lines = [json.dumps(record) for record in records()]
        RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.stdout.write(f"{table(read())}\n\n{roc(read())}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
