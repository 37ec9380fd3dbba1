# SPDX-License-Identifier: Apache-2.0
"""Draw the gallery of docs/index.md: photographs as a model sees them, and what a method leaves of each.

python dev/gallery.py    # docs/images/gallery, benchmarks/results/gallery.json; then python dev/readme.py

Images and questions are fixed before anything is asked: the first six held-out images on a photograph whose sides both
have 200 pixels, a kind of question and a method each. Answers stay as they come, wrong ones too. The model is
`demo_qwen`, which was not trained with any method.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER, OUT = ROOT / "docs/images/gallery", ROOT / "benchmarks/results/gallery.json"
KEEP, SIDE, LEAST, QUALITY = 0.25, 400, 200, 82
CELLS = (
    ("word", "divprune"),
    ("colour", "dart"),
    ("small", "visionzip"),
    ("presence", "tome"),
    ("digits", "fastv"),
    ("count", "pixelprune"),
)


def cells() -> list[tuple[Any, str]]:
    """Return each question with its method."""
    from tokenprune_demo.heldout import NATIVE, load_heldout

    photos = [one for one in load_heldout(folder=NATIVE) if one.background == "photo"]
    examples = [one for one in photos if min(one.image.size) >= LEAST]
    numbers = sorted({one.index for one in examples})
    found = {(one.index, one.kind): one for one in examples}
    return [(found[number, kind], method) for number, (kind, method) in zip(numbers, CELLS, strict=False)]


def shown(subject: Any, example: Any, method: str) -> tuple[dict[str, Any], Any]:
    """Return the record of a cell, and the drawing of what is kept."""
    from tokenprune_bench.show import side_by_side

    found = side_by_side.show(subject, [example.image], example.question, [{"method": method, "keep": KEEP}])
    (seen,) = found.seen
    told = {
        "image": example.path.relative_to(ROOT).as_posix(),
        "question": example.question,
        "right": example.answer,
        "method": method,
        "keep": KEEP,
        "before": {"tokens": found.tokens, "answer": found.before.rstrip(".")},
        "after": {
            "tokens": int(seen.kept.sum()),
            "average": round(seen.stats.visual_tokens_average, 1),
            "answer": seen.answer.rstrip("."),
        },
    }
    return told, found.panels[1].image


def main() -> None:
    import torch
    import transformers
    from PIL import Image

    from tokenprune_bench.profiling.model import load_model

    subject, told = load_model("demo_qwen"), []
    FOLDER.mkdir(exist_ok=True)
    for example, method in cells():
        one, drawing = shown(subject, example, method)
        whole = example.image.convert("RGB").resize(drawing.size, Image.Resampling.BICUBIC)
        for name, image in (("before", whole), ("after", drawing)):
            image.thumbnail((SIDE, SIDE))
            image.save(FOLDER / f"{method}-{name}.webp", quality=QUALITY, method=6)
        told.append(one | {"size": list(drawing.size)})
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    head = versions | {"model": subject.name, "weights": subject.weights}
    OUT.write_text(json.dumps(head | {"shown": told}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
