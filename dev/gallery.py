# SPDX-License-Identifier: Apache-2.0
"""Draw the gallery of docs/index.md: photographs before and after pruning.

python dev/gallery.py    # docs/images/gallery, benchmarks/results/gallery.json; then python dev/readme.py

Images and questions were fixed before the first run: the first six held-out photographs with at least 200 pixels per
side, with one kind of question and one method each. Wrong answers stay. The model is `demo_qwen`, which was not trained
with any method.
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

    photos = [example for example in load_heldout(folder=NATIVE) if example.background == "photo"]
    examples = [example for example in photos if min(example.image.size) >= LEAST]
    numbers = sorted({example.index for example in examples})
    by_image_and_kind = {(example.index, example.kind): example for example in examples}
    return [(by_image_and_kind[index, kind], method) for index, (kind, method) in zip(numbers, CELLS, strict=False)]


def shown(subject: Any, example: Any, method: str) -> tuple[dict[str, Any], Any]:
    """Return the record of a cell and the drawing of the kept patches."""
    from tokenprune_bench.show import side_by_side

    comparison = side_by_side.show(subject, [example.image], example.question, [{"method": method, "keep": KEEP}])
    (view,) = comparison.seen
    told = {
        "image": example.path.relative_to(ROOT).as_posix(),
        "question": example.question,
        "right": example.answer,
        "method": method,
        "keep": KEEP,
        "before": {"tokens": comparison.tokens, "answer": comparison.before.rstrip(".")},
        "after": {
            "tokens": int(view.kept.sum()),
            "average": round(view.stats.visual_tokens_average, 1),
            "answer": view.answer.rstrip("."),
        },
    }
    return told, comparison.panels[1].image


def main() -> None:
    import torch
    import transformers
    from PIL import Image

    from tokenprune_bench.profiling.model import load_model

    subject, told = load_model("demo_qwen"), []
    FOLDER.mkdir(exist_ok=True)
    for example, method in cells():
        record, drawing = shown(subject, example, method)
        resized = example.image.convert("RGB").resize(drawing.size, Image.Resampling.BICUBIC)
        for name, image in (("before", resized), ("after", drawing)):
            image.thumbnail((SIDE, SIDE))
            image.save(FOLDER / f"{method}-{name}.webp", quality=QUALITY, method=6)
        told.append(record | {"size": list(drawing.size)})
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    head = versions | {"model": subject.name, "weights": subject.weights}
    OUT.write_text(json.dumps(head | {"shown": told}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
