# SPDX-License-Identifier: Apache-2.0
"""Test the script for scores and blocks of towers: its question sets, its settings, and its right answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenprune_bench.profiling.model import load_model
from tokenprune_demo.heldout import get_heldout_folder

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script(script: Any) -> Any:
    return script("tower_blocks")


def test_a_tower_of_tiles_is_asked_about_its_own_set(script: Any) -> None:
    family = SimpleNamespace(tower_rows=None)
    subject = SimpleNamespace(heldout=get_heldout_folder("demo_smol"), adapter=SimpleNamespace(family=family))
    sets = script.sets_of(subject, 3)
    assert [*sets] == ["photographs", "documents", "charts"] and all(len(images) == 3 for images in sets.values())
    for (kind, images), background in zip(sets.items(), ("photo", "document", "chart"), strict=True):
        assert {question.background for questions in images for question in questions} == {background}, kind
        assert all(len({question.index for question in questions}) == 1 for questions in images)


def test_every_score_at_every_block_but_the_last(script: Any) -> None:
    cases = [
        case for case in script.cases(4, ("diverse", "change")) if case["method"] == "towerdrop" and case["keep"] < 0.5
    ]
    assert {case["layer"] for case in cases if case["score"] == "diverse"} == {0, 1, 2}
    assert {case["layer"] for case in cases if case["score"] == "change"} == {1, 2}


def test_answers_equal_those_of_single_questions(script: Any) -> None:
    with torch.no_grad():
        subject = load_model("demo_qwen")
        (questions,) = script.sets_of(subject, 1)["photographs"]
        right = script.answers(subject, [questions])
        answers = [subject.generate(subject.inputs([question.image], [question.question]))[0] for question in questions]
    assert right == "".join(
        str(int(question.is_right(answer))) for question, answer in zip(questions, answers, strict=True)
    )
    assert set(right) == {"0", "1"}
