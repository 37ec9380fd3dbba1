# SPDX-License-Identifier: Apache-2.0
"""The front page of the site: its gallery equals the output of the committed script and of the model."""

from __future__ import annotations

import json
import re

from PIL import Image

from tests.unit.docs.test_docs import ROOT, generator

PAGE = (ROOT / "docs/index.md").read_text()
gallery = generator("gallery")
RECORDED = json.loads(gallery.OUT.read_text())


def test_the_gallery_shows_the_fixed_questions() -> None:
    cells = [
        (question.path.relative_to(ROOT).as_posix(), question.question, method) for question, method in gallery.cells()
    ]
    assert cells == [(cell["image"], cell["question"], cell["method"]) for cell in RECORDED["shown"]]
    assert len(cells) == len(gallery.CELLS)


def test_a_gallery_image_equals_a_new_run() -> None:
    from tokenprune_bench.profiling.model import load_model

    subject = load_model("demo_qwen")
    assert subject.weights == RECORDED["weights"], "run python dev/gallery.py"
    cell, _ = gallery.shown(subject, *gallery.cells()[0])
    recorded = dict(RECORDED["shown"][0])
    del recorded["size"]
    assert cell == recorded


def test_the_page_shows_each_before_and_after_in_order() -> None:
    shown = re.findall(r"\]\((images/gallery/[\w-]+\.webp)\)", PAGE)
    assert len(shown) == 2 * len(RECORDED["shown"]) == len(list(gallery.FOLDER.iterdir()))
    for before, after in zip(shown[::2], shown[1::2], strict=True):
        with Image.open(ROOT / "docs" / before) as before_image, Image.open(ROOT / "docs" / after) as after_image:
            assert before_image.size == after_image.size and max(before_image.size) <= gallery.SIDE
    parts = ("tokenprune.patch(model", "## Start here", "headline:begin", "gallery:begin", "images/sites.svg")
    assert sorted(map(PAGE.index, parts)) == list(map(PAGE.index, parts))
    assert rebased_gallery() in PAGE, "run python dev/readme.py"


def rebased_gallery() -> str:
    readme = generator()
    return readme.rebase(readme.PAGES["docs/index.md"]["gallery"](), "docs/index.md")
