# SPDX-License-Identifier: Apache-2.0
"""Draw the held-out set of the third demo model. All answers of a kind are equally frequent.

Training uses other photographs and distant seeds.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from smol_scenes import NAMES, SMOL_PHOTOS, NativeScene, draw, photographs
from tokenprune_demo.scenes import COLORS, POSITIONS, WORDS, SceneQuestion

SEED = 20261123
# Questions about one image of each sort, while enough questions are missing.
AT_ONCE = {"shapes": 4, "photo": 4, "sparse": 1, "sign": 2, "document": 2, "chart": 2}
PATIENCE = 100  # failed draws of a sort before one question fewer per image is accepted
SEVERAL = ("thing", "document", "chart")  # kinds with up to two questions per image
# The answers of each kind, and the number of questions for each.
WANTED: dict[str, dict[str, int]] = {
    "colour": dict.fromkeys(COLORS, 8),
    "presence": {"yes": 30, "no": 30},
    "position": dict.fromkeys(POSITIONS, 15),
    "count": dict.fromkeys("01234", 12),
    "digits": dict.fromkeys("0123456789", 6),
    "word": dict.fromkeys(WORDS, 5),
    "thing": dict.fromkeys(NAMES, 2),
    "sparse": dict.fromkeys(COLORS, 3) | dict.fromkeys(NAMES, 1),
    "document": dict.fromkeys(WORDS, 2) | dict.fromkeys("123456789", 4),
    "chart": dict.fromkeys(COLORS, 8),
}
# The kinds asked about each sort of scene.
ASKED = {
    "shapes": ("colour", "presence", "position", "count", "digits", "word"),
    "photo": ("colour", "presence", "position", "thing"),
    "sparse": ("sparse",),
    "sign": ("digits", "word"),
    "document": ("document",),
    "chart": ("chart",),
}


def choose(
    rng: np.random.Generator, questions: list[SceneQuestion], counts: Counter, max_questions: int
) -> list[SceneQuestion]:
    """Choose questions that are still needed, of different kinds except for kinds in SEVERAL."""
    chosen: list[SceneQuestion] = []
    for index in rng.permutation(len(questions)):
        question = questions[index]
        is_repeated = question.kind not in SEVERAL and question.kind in [earlier.kind for earlier in chosen]
        if (
            len(chosen) < max_questions
            and not is_repeated
            and counts[question.kind, question.answer] < WANTED[question.kind][question.answer]
        ):
            chosen.append(question)
    return chosen


def scenes(seed: int = SEED) -> Iterator[tuple[NativeScene, list[SceneQuestion]]]:
    """Yield scenes with their questions until all answers in WANTED are covered."""
    rng, photos, counts, failed = np.random.default_rng(seed), photographs("heldout"), Counter(), Counter()
    if len(photos) != len(SMOL_PHOTOS["heldout"]):
        raise SystemExit(
            "Held-out photographs are missing. Install the training extra, and unpack the Debian package "
            "lomiri-wallpapers-16.04 into the folder named by TOKENPRUNE_PHOTOS."
        )
    while True:
        left = {
            kind: sum(n - counts[kind, answer] for answer, n in requested.items()) for kind, requested in WANTED.items()
        }
        need = np.array([sum(left[kind] for kind in kinds) for kinds in ASKED.values()], float)
        if not need.any():
            return
        sort = list(ASKED)[int(rng.choice(len(ASKED), p=need / need.sum()))]
        scene = draw(rng, photos, sort)
        chosen = choose(rng, scene.questions, counts, AT_ONCE[sort])
        if len(chosen) < max(1, AT_ONCE[sort] - failed[sort] // PATIENCE):
            failed[sort] += 1
            continue
        counts.update((question.kind, question.answer) for question in chosen)
        yield scene, chosen


def encoded(scene: NativeScene) -> bytes:
    """Return the image as progressive JPEG of quality 90 without color subsampling."""
    file = io.BytesIO()
    Image.fromarray(scene.pixels[0]).save(file, "JPEG", quality=90, subsampling=0, optimize=True, progressive=True)
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, default=Path("runs/heldout_smol"))
    args = parser.parse_args()

    fresh = args.out.with_name(f".{args.out.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    (fresh / "images").mkdir(parents=True)
    rows = []
    for index, (scene, chosen) in enumerate(scenes(args.seed)):
        name = f"images/{index:03d}.jpg"
        (fresh / name).write_bytes(encoded(scene))
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
