# SPDX-License-Identifier: Apache-2.0
"""Draw the fixed held-out set: one question of each kind per picture, with balanced answers within a kind.

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

from tokenprune_demo.scenes import COLORS, KINDS, POSITIONS, WORDS, Scene, SceneQuestion, draw_scene, load_photos

ANSWERS = {
    "colour": len(COLORS),
    "presence": 2,
    "count": 5,
    "position": len(POSITIONS),
    "small": len(COLORS),
    "digits": 10,
    "word": len(WORDS),
    "grounding": len(COLORS),
}


def one_of_each(
    rng: np.random.Generator, scene: Scene, counts: Counter, limit: dict[str, int]
) -> list[SceneQuestion] | None:
    """Choose one question of each kind, rarest answer first. Return None if a kind has no answer below its limit."""
    chosen = []
    for kind in KINDS:
        pool = [q for q in scene.of_kind(kind) if counts[kind, q.answer] < limit[kind]]
        if not pool:
            return None
        fewest = min(counts[kind, q.answer] for q in pool)
        pool = [q for q in pool if counts[kind, q.answer] == fewest]
        chosen.append(pool[rng.integers(len(pool))])
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seed", type=int, default=20260101)
    parser.add_argument("--pictures", type=int, default=200)
    parser.add_argument("--quality", type=int, default=92, help="JPEG quality, without color subsampling")
    parser.add_argument("--out", type=Path, default=Path("demo/tokenprune_demo/heldout"))
    args = parser.parse_args()

    rng, photos, counts, rows = np.random.default_rng(args.seed), load_photos("heldout"), Counter(), []
    if len(photos) != 3:
        raise SystemExit("Held-out photographs are missing. Install the training extra (scikit-image and matplotlib).")
    limit = {kind: math.ceil(1.1 * args.pictures / n) for kind, n in ANSWERS.items()}
    fresh = args.out.with_name(f".{args.out.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    (fresh / "pictures").mkdir(parents=True)
    while len(rows) < args.pictures:
        scene = draw_scene(rng, photos)
        chosen = one_of_each(rng, scene, counts, limit)
        if chosen is None:
            continue
        counts.update((q.kind, q.answer) for q in chosen)
        name = f"pictures/{len(rows):03d}.jpg"
        scene.image.save(fresh / name, quality=args.quality, subsampling=0, optimize=True)
        questions = [{"kind": q.kind, "question": q.text, "answer": q.answer, "boxes": q.boxes} for q in chosen]
        rows.append({"picture": name, "background": scene.background, "questions": questions})
    (fresh / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    readme = args.out / "README.md"
    if readme.exists():
        shutil.copy(readme, fresh / "README.md")
    old = args.out.with_name(f".{args.out.name}.old")
    if args.out.exists():
        os.replace(args.out, old)
    os.replace(fresh, args.out)
    shutil.rmtree(old, ignore_errors=True)
    for kind in KINDS:
        print(kind, dict(sorted((answer, n) for (k, answer), n in counts.items() if k == kind)))


if __name__ == "__main__":
    main()
