# SPDX-License-Identifier: Apache-2.0
"""Drawn letters, tables, receipts and two pages at once: each question has one answer on them."""

from __future__ import annotations

import numpy as np
import pytest

from tokenprune_demo.drawn_documents import DOCUMENT_KINDS, TEXT_KINDS, get_document_answers
from tokenprune_demo.drawn_pages import PAGE_LAYOUTS, PAGE_SIZES, draw_pages
from tokenprune_demo.drawn_sets import draw_set
from tokenprune_demo.scenes import COLORS

WANTED = {"word": "bus", "digits": "7", "colour": "cyan", "small": "pink"}


@pytest.mark.parametrize("layout", PAGE_LAYOUTS)
def test_pages_are_drawn_from_their_seed_and_hold_what_is_asked(layout: str) -> None:
    for seed, size in enumerate(PAGE_SIZES[layout]):
        made, again = (draw_pages(np.random.default_rng(seed), layout, size, WANTED) for _ in range(2))
        assert [one.tobytes() for one in made.images] == [one.tobytes() for one in again.images]
        assert len(made.images) == (2 if layout == "spread" else 1) and {one.size for one in made.images} == {size}
        assert [one.kind for one in made.questions] == list(DOCUMENT_KINDS)
        assert {one.kind: one.answer for one in made.questions} == WANTED
        for one in made.questions:
            (((number, (left, top, right, bottom)),),) = one.looks
            if one.kind in TEXT_KINDS:  # dark and light, as nothing outside of plates and outlines is
                inside = np.asarray(made.images[number].convert("L"))[top:bottom, left:right]
                assert inside.min() < 60 and inside.max() > 220
                continue
            exact = [(np.asarray(page) == COLORS[one.answer]).all(-1) for page in made.images]
            here = exact[number][top:bottom, left:right].sum()
            assert here > 20 and sum(page.sum() for page in exact) == here
        if layout == "spread":
            assert sorted(one.looks[0][0][0] for one in made.questions) == [0, 0, 1, 1]


@pytest.mark.parametrize(("layout", "size"), [("poster", (512, 512)), ("letter", (512, 240))])
def test_what_cannot_be_drawn_is_said(layout: str, size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="letter, table, receipt, spread, at least 288 pixels"):
        draw_pages(np.random.default_rng(0), layout, size)


def test_the_set_is_even_and_of_a_thousand_tokens_and_more() -> None:
    asked = draw_set("pages", 0)
    assert len(asked.questions) == 300 and len(set(asked.groups)) == 4
    assert draw_set("pages", 5).about() == draw_set("pages", 5).about() != draw_set("pages", 4).about()
    for kind, options in get_document_answers().items():
        counts = [[one.answer for one in asked.questions if one.kind == kind].count(answer) for answer in options]
        assert max(counts) - min(counts) <= 1
    for at in range(0, 300, len(DOCUMENT_KINDS)):
        prompt, boxes = asked.questions[at], set()
        for one in asked.questions[at : at + len(DOCUMENT_KINDS)]:
            (((number, (left, top, right, bottom)),),) = one.looks
            assert 0 <= left < right <= one.images[number].width and 0 <= top < bottom <= one.images[number].height
            assert all(page != number or c < left or right < a or d < top or bottom < b for page, a, b, c, d in boxes)
            boxes.add((number, left, top, right, bottom))
        assert all(side % 16 == 0 for page in prompt.images for side in page.size)
        assert 1024 <= sum(page.width * page.height for page in prompt.images) / 256 <= 1280
    assert asked.questions[12].where == "drawn spread 3" and asked.questions[12].sources == asked.questions[12].images
