# SPDX-License-Identifier: Apache-2.0
"""Test drawn documents and pages: each question has a single answer, and much of a document repeats exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tokenprune
from tokenprune_demo.drawn_documents import DOCUMENT_KINDS, LAYOUTS, TEXT_KINDS, draw_document, get_document_answers
from tokenprune_demo.drawn_pages import PAGE_LAYOUTS, PAGE_SIZES, draw_pages
from tokenprune_demo.drawn_sets import draw_set
from tokenprune_demo.scenes import COLORS

ANSWERS = {"word": "bus", "digits": "7", "colour": "cyan", "small": "pink"}
CASES = [(draw_document, layout, (448, 320)) for layout in LAYOUTS]
CASES += [(draw_pages, layout, size) for layout in PAGE_LAYOUTS for size in PAGE_SIZES[layout]]


def list_images(drawn: Any) -> list[Any]:
    return list(drawn.images) if hasattr(drawn, "images") else [drawn.image]


def check_boxes(questions: list[Any], images: list[Any]) -> None:
    """Check that the answer boxes of an item are inside its images and do not overlap."""
    boxes: list[tuple[int, ...]] = []
    for question in questions:
        (((page_index, (left, top, right, bottom)),),) = question.looks
        assert 0 <= left < right <= images[page_index].width and 0 <= top < bottom <= images[page_index].height
        assert all(
            other_index != page_index or c < left or right < a or d < top or bottom < b
            for other_index, a, b, c, d in boxes
        )
        boxes.append((page_index, left, top, right, bottom))


@pytest.mark.parametrize(("draw", "layout", "size"), CASES)
def test_an_item_is_drawn_from_its_seed_and_holds_what_is_asked(draw: Any, layout: str, size: tuple[int, int]) -> None:
    drawn, again = (draw(np.random.default_rng(3), layout, size, ANSWERS) for _ in range(2))
    images = list_images(drawn)
    assert [image.tobytes() for image in images] == [image.tobytes() for image in list_images(again)]
    assert len(images) == (2 if layout == "spread" else 1) and {image.size for image in images} == {size}
    assert [question.kind for question in drawn.questions] == list(DOCUMENT_KINDS)
    assert {question.kind: question.answer for question in drawn.questions} == ANSWERS
    check_boxes(drawn.questions, images)
    for question in drawn.questions:
        (((page_index, (left, top, right, bottom)),),) = question.looks
        if question.kind in TEXT_KINDS:  # dark and light letters
            inside = np.asarray(images[page_index].convert("L"))[top:bottom, left:right]
            assert inside.min() < 60 and inside.max() > (200 if draw is draw_document else 220)
            continue
        exact = [(np.asarray(page) == COLORS[question.answer]).all(-1) for page in images]
        count = exact[page_index][top:bottom, left:right].sum()
        assert count > 20 and sum(page.sum() for page in exact) == count  # no other area has this color
    if layout == "spread":
        assert sorted(question.looks[0][0][0] for question in drawn.questions) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("draw", "layout", "size", "message"),
    [
        (draw_document, "poster", (320, 320), "page, screen, chart, at least 160 pixels"),
        (draw_document, "page", (320, 100), "page, screen, chart, at least 160 pixels"),
        (draw_pages, "poster", (512, 512), "letter, table, receipt, spread, at least 288 pixels"),
        (draw_pages, "letter", (512, 240), "letter, table, receipt, spread, at least 288 pixels"),
    ],
)
def test_layouts_and_sizes_that_cannot_be_drawn_raise(
    draw: Any, layout: str, size: tuple[int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        draw(np.random.default_rng(0), layout, size)


@pytest.mark.parametrize(
    ("name", "items", "questions", "groups"),
    [("documents", 30, 120, {"pages", "screens", "charts"}), ("pages", 0, 300, None)],
)
def test_a_set_is_even(name: str, items: int, questions: int, groups: set[str] | None) -> None:
    drawn = draw_set(name, items)
    assert len(drawn.questions) == questions and (
        set(drawn.groups) == groups if groups else len(set(drawn.groups)) == 4
    )
    assert draw_set(name, 5).about() == draw_set(name, 5).about() != draw_set(name, 4).about()
    for kind, options in get_document_answers().items():
        answers = [question.answer for question in drawn.questions if question.kind == kind]
        counts = [answers.count(answer) for answer in options]
        assert max(counts) - min(counts) <= 1
    for start in range(0, questions, len(DOCUMENT_KINDS)):
        first, *_ = item = drawn.questions[start : start + len(DOCUMENT_KINDS)]
        check_boxes(item, first.images)
        assert all(side % 16 == 0 for page in first.images for side in page.size)
        if name == "pages":  # at least a thousand visual tokens
            assert 1024 <= sum(page.width * page.height for page in first.images) / 256 <= 1280
    assert drawn.questions[0].where == {"documents": "drawn page 0", "pages": "drawn letter 0"}[name]
    assert name == "documents" or drawn.questions[12].where == "drawn spread 3"
    assert drawn.questions[12].sources == drawn.questions[12].images


def test_most_of_a_document_repeats_and_no_letter_does() -> None:
    """Pixelprune's predictions restore the image from the kept units of 16 x 16 pixels."""
    from tokenprune.methods.encoder.prediction import predict_anchored

    for index in range(3):
        question = draw_set("documents", 3).questions[4 * index]
        image = torch.from_numpy(np.asarray(question.images[0]).astype(np.float32) / 255)
        height, width = (side // 16 for side in image.shape[:2])
        units = image.view(height, 16, width, 16, 3).transpose(1, 2).reshape(1, height, width, -1)
        predicted = predict_anchored(units, 0.0, "max")
        assert torch.equal(units.flatten(0, 2)[predicted.source.flatten()], units.flatten(0, 2))
        keep = tokenprune.method("pixelprune").keep_units(units, 10**6)
        assert torch.equal(keep, predicted.keep) and 0.1 < float(keep.float().mean()) < 0.7
