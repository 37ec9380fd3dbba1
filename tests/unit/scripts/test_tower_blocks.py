# SPDX-License-Identifier: Apache-2.0
"""The script that asks by score and block of a tower: its sets, its settings, and what it counts as right."""

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
    for (kind, images), ground in zip(sets.items(), ("photo", "document", "chart"), strict=True):
        assert {one.background for questions in images for one in questions} == {ground}, kind
        assert all(len({one.index for one in questions}) == 1 for questions in images)


def test_every_score_at_every_block_but_the_last(script: Any) -> None:
    asked = [
        one for one in script.cases(4, ("diverse", "change")) if one["method"] == "towerdrop" and one["keep"] < 0.5
    ]
    assert {one["layer"] for one in asked if one["score"] == "diverse"} == {0, 1, 2}
    assert {one["layer"] for one in asked if one["score"] == "change"} == {1, 2}


def test_answers_are_those_of_each_question_alone(script: Any) -> None:
    with torch.no_grad():
        subject = load_model("demo_qwen")
        (questions,) = script.sets_of(subject, 1)["photographs"]
        right = script.answers(subject, [questions])
        said = [subject.generate(subject.inputs([one.image], [one.question]))[0] for one in questions]
    assert right == "".join(str(int(one.is_right(answer))) for one, answer in zip(questions, said, strict=True))
    assert set(right) == {"0", "1"}
