# SPDX-License-Identifier: Apache-2.0
"""Test experiments/retrieval.py: questions with a single right document, merging of vectors, and the table of the
page."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script(script: Any) -> Any:
    pytest.importorskip("transformers", "5.1", reason="ColQwen2 holds its model in another way")
    return script("retrieval")


def test_the_page_has_the_table(script: Any) -> None:
    assert script.table(script.read(script.RESULTS)[1]) in script.DOCS.read_text()


def test_a_question_has_one_right_document(script: Any) -> None:
    first, second, other = (script.Page(None, facts.split()) for facts in ("a b c d", "a b c e", "f g h i"))
    questions = script.unique_questions([first, second, other])
    assert [(page, text) for page, text in questions if page == 0] == [(0, "b c d"), (0, "a c d"), (0, "a b d")]
    assert len([page for page, _ in questions if page == 2]) == 4


def test_merged_vectors(script: Any) -> None:
    torch.manual_seed(0)
    ends = torch.nn.functional.normalize(torch.randn(3, script.WIDTH), dim=-1)
    vectors = ends.repeat_interleave(4, 0)
    for merge in (script.ward, script.row_means):
        merged = merge(vectors, 3)
        assert merged.shape == ends.shape
        assert torch.allclose((merged @ ends.T).amax(0), torch.ones(3), atol=1e-5)
    attention = torch.rand(5, script.TOKENS)
    assert script.docpruner(attention, 28).sum() == 5 * 28


def test_documents_are_reproducible(script: Any) -> None:
    training = importlib.import_module("retrieval_training")
    document, again = training.draw(1, 2), training.draw(1, 2)
    assert (
        document.facts == again.facts and len(document.facts) == 4 and document.image.tobytes() == again.image.tobytes()
    )
    assert training.question(document, 0) == " ".join(document.facts[1:])
