# SPDX-License-Identifier: Apache-2.0
"""Draw what each method keeps of one and the same held-out photograph, for the methods' pages, with a shipped model.

python dev/kept_images.py                # all methods: docs/images/kept/NAME.webp and NAME.json
python dev/kept_images.py dart fastv     # these alone; the others stay as they are

Photograph and question were fixed before any method was drawn on them. Clear patches stay, dark ones are dropped, and
those of one flat colour became one. A method gets a quarter of the tokens, or the smallest of KEEPS that it accepts on
a decoder as shallow as this one. Methods that compare frames get one drawn video instead. The page of a method shows
its image with what its record says (dev/method_pages.py).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs/images/kept"
NUMBER, KIND = 2, "word"  # the photograph, and which of its questions is asked
KEEPS = (0.25, 0.4, 0.5, 0.75)
SIDE, QUALITY = 320, 70


def photograph() -> Any:
    """Return the held-out example that every method on images is drawn on."""
    from tokenprune_demo.heldout import load_heldout

    (example,) = (one for one in load_heldout() if one.index == NUMBER and one.kind == KIND)
    return example


def video() -> Any:
    """Return the drawn example that every method on videos is drawn on."""
    from tokenprune_demo.drawn_sets import draw_set

    return next(one for one in draw_set("small-videos", 1).questions if one.kind == "rare")


def drawn(subject: Any, images: Any, question: str, method: str) -> tuple[dict[str, Any], list[Any]] | None:
    """Return what the method keeps at the first keep that it accepts, and the drawings before and after; None where it
    accepts none, or cannot be drawn."""
    from tokenprune.errors import TokenPruneError
    from tokenprune_bench.show import side_by_side

    reasons = []
    for keep in KEEPS:
        try:
            found = side_by_side.show(subject, images, question, [{"method": method, "keep": keep}])
        except TokenPruneError as error:
            reasons.append(str(error))
            continue
        (seen,) = found.seen
        record = {"model": subject.name, "keep": keep, "tokens": found.tokens, "kept": int(seen.kept.sum())}
        record["answer"] = seen.answer.rstrip(".")
        return record, [found.panels[0].image, found.kept_panels[0].image]
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
        is_video = "video" in tokenprune.method_info(method).cls.__module__.split(".")
        if is_video:
            found = drawn(videos, list(clip.frames), clip.question, method)
        else:  # what cannot act in the first model's tower may act in the second's
            found = drawn(images, [photo.image], photo.question, method)
            found = found or drawn(videos, [photo.image], photo.question, method)
        for old in FOLDER.glob(f"{method}.*"):
            old.unlink()
        if found is None:
            continue
        record, (before, after) = found
        example, shown = (clip, "video") if is_video else (photo, "image")
        question = {"question": example.question, "right": example.answer, "of": shown}
        (FOLDER / f"{method}.json").write_text(json.dumps(question | record, ensure_ascii=False) + "\n")
        save(before, "the-video" if is_video else "the-photograph")  # the same for all
        save(after, method)
        print(method, record)


if __name__ == "__main__":
    main()
