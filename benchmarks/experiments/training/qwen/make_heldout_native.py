# SPDX-License-Identifier: Apache-2.0
"""Draw the held-out set of random image sizes: one question of each kind per image, with balanced answers.

Training uses other photographs and distant seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from native_scenes import NAMES, draw_native, photographs
from questions import MAIN
from tokenprune_demo.scenes import COLORS, POSITIONS, WORDS

ANSWERS = {
    "colour": len(COLORS),
    "presence": 2,
    "count": 5,
    "position": len(POSITIONS),
    "small": len(COLORS),
    "digits": 10,
    "word": len(WORDS),
    "grounding": len(COLORS),
    "thing": len(NAMES),
}


def size(rng: np.random.Generator, index: int) -> tuple[int, int, float]:
    """Return width, height and scale: 448 x 448 for every tenth image, otherwise random (aspect up to 2:1)."""
    if index % 10 == 9:
        return 448, 448, float(rng.uniform(1.1, 1.6))
    while True:
        side, aspect = np.exp(rng.uniform(np.log(136), np.log(448))), np.exp(rng.uniform(-0.69, 0.69) / 2)
        width, height = round(side * aspect), round(side / aspect)
        if min(width, height) >= 112 and max(width, height) <= 448:
            scale = side / 224 / rng.uniform(0.8, 1.15)
            return width, height, float(np.clip(scale, 0.62, 1.6))


def one_per_kind(rng, scene, counts: Counter, limit: dict[str, int]):
    """Choose one question of each kind, rarest answer first. Return None if a kind has no answer below its limit."""
    chosen = []
    for kind in MAIN:
        pool = [q for q in scene.questions if q.kind == kind and counts[kind, q.answer] < limit[kind]]
        if not pool:
            return None
        fewest = min(counts[kind, q.answer] for q in pool)
        pool = [q for q in pool if counts[kind, q.answer] == fewest]
        chosen.append(pool[rng.integers(len(pool))])
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seed", type=int, default=20260202)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--quality", type=int, default=90, help="JPEG quality, without color subsampling")
    parser.add_argument("--out", type=Path, default=Path("demo/tokenprune_demo/heldout_native"))
    args = parser.parse_args()

    rng, photos, counts, rows = np.random.default_rng(args.seed), photographs("heldout"), Counter(), []
    if len(photos) != 3:
        raise SystemExit("Held-out photographs are missing. Install the training extra (scikit-image and matplotlib).")
    limit = {kind: math.ceil(1.1 * args.images / n) for kind, n in ANSWERS.items()}
    fresh = args.out.with_name(f".{args.out.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    (fresh / "images").mkdir(parents=True)
    while len(rows) < args.images:
        width, height, scale = size(rng, len(rows))
        scene = draw_native(rng, width, height, scale, photos)
        chosen = one_per_kind(rng, scene, counts, limit)
        if chosen is None:
            continue
        counts.update((q.kind, q.answer) for q in chosen)
        name = f"images/{len(rows):03d}.jpg"
        image = Image.fromarray(scene.pixels[0])
        image.save(fresh / name, quality=args.quality, subsampling=0, optimize=True)
        questions = [{"kind": q.kind, "question": q.text, "answer": q.answer, "boxes": q.boxes} for q in chosen]
        rows.append({"image": name, "background": scene.background, "size": scene.size, "questions": questions})
    (fresh / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    readme = args.out / "README.md"
    if readme.exists():
        shutil.copy(readme, fresh / "README.md")
    old = args.out.with_name(f".{args.out.name}.old")
    if args.out.exists():
        os.replace(args.out, old)
    os.replace(fresh, args.out)
    shutil.rmtree(old, ignore_errors=True)


if __name__ == "__main__":
    main()
