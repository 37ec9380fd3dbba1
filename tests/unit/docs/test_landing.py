# SPDX-License-Identifier: Apache-2.0
"""The front page of the site: what its gallery shows is what the committed script draws and the model answers."""

from __future__ import annotations

import json
import re

from PIL import Image

from tests.unit.docs.test_docs import ROOT, generator

PAGE = (ROOT / "docs/index.md").read_text()
gallery = generator("gallery")
RECORDED = json.loads(gallery.OUT.read_text())


def test_the_gallery_is_of_the_questions_that_were_fixed_before() -> None:
    asked = [(one.path.relative_to(ROOT).as_posix(), one.question, method) for one, method in gallery.cells()]
    assert asked == [(one["image"], one["question"], one["method"]) for one in RECORDED["shown"]]
    assert len(asked) == len(gallery.CELLS)


def test_an_image_of_the_gallery_is_what_the_model_makes_of_it() -> None:
    from tokenprune_bench.profiling.model import load_model

    subject = load_model("demo_qwen")
    assert subject.weights == RECORDED["weights"], "run python dev/gallery.py"
    told, _ = gallery.shown(subject, *gallery.cells()[0])
    recorded = dict(RECORDED["shown"][0])
    del recorded["size"]
    assert told == recorded


def test_the_page_shows_each_before_and_after_in_order() -> None:
    shown = re.findall(r"\]\((images/gallery/[\w-]+\.webp)\)", PAGE)
    assert len(shown) == 2 * len(RECORDED["shown"]) == len(list(gallery.FOLDER.iterdir()))
    for before, after in zip(shown[::2], shown[1::2], strict=True):
        with Image.open(ROOT / "docs" / before) as one, Image.open(ROOT / "docs" / after) as other:
            assert one.size == other.size and max(one.size) <= gallery.SIDE
    parts = ("tokenprune.patch(model", "## Start here", "headline:begin", "gallery:begin", "images/sites.svg")
    assert sorted(map(PAGE.index, parts)) == list(map(PAGE.index, parts))
    assert rebased_gallery() in PAGE, "run python dev/readme.py"


def rebased_gallery() -> str:
    readme = generator()
    return readme.rebase(readme.PAGES["docs/index.md"]["gallery"](), "docs/index.md")
