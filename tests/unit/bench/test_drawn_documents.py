# SPDX-License-Identifier: Apache-2.0
"""Drawn pages, screens and charts: what is asked is there, once, and much of them repeats to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tokenprune
from tokenprune_demo.drawn_documents import DOCUMENT_KINDS, LAYOUTS, draw_document, get_document_answers
from tokenprune_demo.drawn_sets import draw_set
from tokenprune_demo.scenes import COLORS


def test_a_document_is_drawn_from_its_seed_and_holds_what_is_asked() -> None:
    wanted = {"word": "bus", "digits": "7", "colour": "cyan", "small": "pink"}
    for layout in LAYOUTS:
        made = draw_document(np.random.default_rng(3), layout, (448, 320), wanted)
        again = draw_document(np.random.default_rng(3), layout, (448, 320), wanted)
        assert made.image.size == (448, 320) and made.image.tobytes() == again.image.tobytes()
        assert {one.kind: one.answer for one in made.questions} == wanted
        pixels = np.asarray(made.image).astype(int)
        boxes = []
        for kind in DOCUMENT_KINDS:
            ((one,),) = (made.of_kind(kind),)
            (((image, (left, top, right, bottom)),),) = one.looks
            boxes.append((left, top, right, bottom))
            inside = pixels[top:bottom, left:right]
            assert image == 0 and 0 <= left < right <= 448 and 0 <= top < bottom <= 320
            if kind in ("colour", "small"):  # in its own colour, and nothing outside is
                exact = (pixels == COLORS[one.answer]).all(-1)
                assert exact[top:bottom, left:right].sum() > 20 and exact.sum() == exact[top:bottom, left:right].sum()
            else:
                assert inside.max() > 200 and inside.min() < 60
        for i, (a, b, c, d) in enumerate(boxes):
            assert all(c < x or z < a or d < y or w < b for x, y, z, w in boxes[:i])


@pytest.mark.parametrize(("layout", "size"), [("poster", (320, 320)), ("page", (320, 100))])
def test_what_cannot_be_drawn_is_said(layout: str, size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="page, screen, chart, at least 160 pixels"):
        draw_document(np.random.default_rng(0), layout, size)


def test_the_set_is_even_and_of_three_groups() -> None:
    asked = draw_set("documents", 30)
    assert len(asked.questions) == 120 and set(asked.groups) == {"pages", "screens", "charts"}
    assert asked.about() == draw_set("documents", 30).about() != draw_set("documents", 3).about()
    digits = [one.answer for one in asked.questions if one.kind == "digits"]
    assert {digits.count(answer) for answer in get_document_answers()["digits"]} == {3}
    assert all(side % 16 == 0 for one in asked.questions for side in one.images[0].size)
    assert asked.questions[0].where == "drawn page 0"


def test_most_of_a_document_repeats_and_no_letter_does() -> None:
    """Of what pixelprune leaves, in units of 16 x 16 pixels, a decoder of its predictions makes the image itself."""
    from tokenprune.methods.encoder.prediction import predict_anchored

    for number in range(3):
        question = draw_set("documents", 3).questions[4 * number]
        image = torch.from_numpy(np.asarray(question.images[0]).astype(np.float32) / 255)
        height, width = (side // 16 for side in image.shape[:2])
        units = image.view(height, 16, width, 16, 3).transpose(1, 2).reshape(1, height, width, -1)
        found = predict_anchored(units, 0.0, "max")
        assert torch.equal(units.flatten(0, 2)[found.source.flatten()], units.flatten(0, 2))
        keep = tokenprune.method("pixelprune").keep_units(units, 10**6)
        assert torch.equal(keep, found.keep) and 0.1 < float(keep.float().mean()) < 0.7
