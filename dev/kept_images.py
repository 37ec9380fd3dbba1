# SPDX-License-Identifier: Apache-2.0
"""Draw the kept tokens of each method on one held-out photograph, with a shipped model, for the methods' pages.

python dev/kept_images.py                # all methods: docs/images/kept/NAME.webp and NAME.json
python dev/kept_images.py dart fastv     # only these methods

Photograph and question were fixed before the first drawing. Kept patches are clear, removed patches are dark, merged
patches share one flat colour. A method keeps a quarter of the tokens, or the smallest of KEEPS that it accepts on this
shallow decoder. Methods that compare frames get one drawn video instead. The page of a method shows its image and
its record (dev/method_pages.py).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs/images/kept"
NUMBER, KIND = 2, "word"  # index of the photograph, kind of its question
KEEPS = (0.25, 0.4, 0.5, 0.75)
SIDE, QUALITY = 320, 70


def photograph() -> Any:
    """Return the held-out example for methods on images."""
    from tokenprune_demo.heldout import load_heldout

    (example,) = (candidate for candidate in load_heldout() if candidate.index == NUMBER and candidate.kind == KIND)
    return example


def video() -> Any:
    """Return the drawn example for methods on videos."""
    from tokenprune_demo.drawn_sets import draw_set

    return next(question for question in draw_set("small-videos", 1).questions if question.kind == "rare")


def drawn(subject: Any, images: Any, question: str, method: str) -> tuple[dict[str, Any], list[Any]] | None:
    """Return the record at the first accepted keep, and the drawings before and after.

    Returns None if the method accepts no keep, or cannot be drawn.
    """
    from tokenprune.errors import TokenPruneError
    from tokenprune_bench.show import side_by_side

    reasons = []
    for keep in KEEPS:
        try:
            comparison = side_by_side.show(subject, images, question, [{"method": method, "keep": keep}])
        except TokenPruneError as error:
            reasons.append(str(error))
            continue
        (view,) = comparison.seen
        record = {"model": subject.name, "keep": keep, "tokens": comparison.tokens, "kept": int(view.kept.sum())}
        record["answer"] = view.answer.rstrip(".")
        return record, [comparison.panels[0].image, comparison.kept_panels[0].image]
    print(f"{method}: no image. {reasons[-1]}")
    return None


def save(image: Any, name: str) -> None:
    image = image.convert("RGB")
    image.thumbnail((SIDE, SIDE * 2))
    image.save(FOLDER / f"{name}.webp", quality=QUALITY, method=6)


def main() -> None:
    import tokenprune
    from tokenprune_bench.profiling.model import load_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", metavar="METHOD")
    methods = parser.parse_args().methods or tokenprune.available_methods()
    photo, clip = photograph(), video()
    images, videos = load_model("demo_vlm"), load_model("demo_qwen")
    FOLDER.mkdir(exist_ok=True)
    for method in methods:
        if tokenprune.method_info(method).cls.default_equals:
            continue  # it needs a fitted file
        is_video = "video" in tokenprune.method_info(method).cls.__module__.split(".")
        if is_video:
            drawing = drawn(videos, list(clip.frames), clip.question, method)
        else:  # a method that cannot act in the first model's tower may act in the second's
            drawing = drawn(images, [photo.image], photo.question, method)
            drawing = drawing or drawn(videos, [photo.image], photo.question, method)
        for old in FOLDER.glob(f"{method}.*"):
            old.unlink()
        if drawing is None:
            continue
        record, (before, after) = drawing
        example, shown = (clip, "video") if is_video else (photo, "image")
        question = {"question": example.question, "right": example.answer, "of": shown}
        (FOLDER / f"{method}.json").write_text(json.dumps(question | record, ensure_ascii=False) + "\n")
        save(before, "the-video" if is_video else "the-photograph")  # the same for all
        save(after, method)
        print(method, record)


if __name__ == "__main__":
    main()
