# SPDX-License-Identifier: Apache-2.0
"""Test the script for page questions: features shared by questions and methods must not change results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tokenprune
from tokenprune_bench.profiling.model import load_model
from tokenprune_demo.drawn_pages import draw_pages

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script(script: Any) -> Any:
    return script("pages")


@pytest.fixture(scope="module")
def asked(script: Any) -> Iterator[Any]:
    """Yield the model, two questions about two pages, and their shared inputs and features."""
    pages = draw_pages(np.random.default_rng(0), "spread", (288, 304))
    questions = [
        SimpleNamespace(images=tuple(pages.images), question=question.text) for question in pages.questions[:2]
    ]
    with torch.no_grad():
        subject = load_model("demo_qwen", device="cpu")
        yield subject, questions, script.encode_for_all(subject, questions)


@pytest.mark.parametrize("name", ["divprune", "pool", "vispruner", "visionzip", "tome", "pixelprune"])
def test_one_run_of_the_tower_serves_all_questions(name: str, script: Any, asked: Any) -> None:
    subject, questions, shared = asked
    plain = subject.inputs([question.images for question in questions], [question.question for question in questions])
    with torch.no_grad(), tokenprune.patched(subject.model, name, keep=0.25, guard="off"):
        inputs, encoded = shared if name in script.AFTER else script.encode(subject, questions)
        shared_output = subject.model(
            **inputs, mm_encoder_outputs={"image": script.repeated(encoded, 2)}, logits_to_keep=1
        )
        output = subject.model(**plain, logits_to_keep=1)
        assert (
            tokenprune.stats(subject.model).visual_tokens_out < 0.3 * tokenprune.stats(subject.model).visual_tokens_in
        )
    torch.testing.assert_close(shared_output.logits, output.logits)


def test_methods_that_share_features_read_no_tower_observables(script: Any) -> None:
    for name in script.AFTER:
        info = tokenprune.method_info(name)
        assert info.site is tokenprune.Site.PRE_LLM and not any(
            observable.startswith("encoder") for observable in info.observables
        )
    assert {*script.AFTER} < {name for row in script.METHODS for name in row}
