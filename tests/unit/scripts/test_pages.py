# SPDX-License-Identifier: Apache-2.0
"""The script that asks about pages: what it shares between questions and methods is what the whole model would make."""

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
    """The model, two questions about two pages, their arguments and what the tower makes of them."""
    made = draw_pages(np.random.default_rng(0), "spread", (288, 304))
    questions = [SimpleNamespace(images=tuple(made.images), question=one.text) for one in made.questions[:2]]
    with torch.no_grad():
        subject = load_model("demo_qwen", device="cpu")
        yield subject, questions, script.encode_for_all(subject, questions)


@pytest.mark.parametrize("name", ["divprune", "pool", "vispruner", "visionzip", "tome", "pixelprune"])
def test_one_run_of_the_tower_serves_all_questions(name: str, script: Any, asked: Any) -> None:
    subject, questions, shared = asked
    plain = subject.inputs([one.images for one in questions], [one.question for one in questions])
    with torch.no_grad(), tokenprune.patched(subject.model, name, keep=0.25, guard="off"):
        inputs, encoded = shared if name in script.AFTER else script.encode(subject, questions)
        ours = subject.model(**inputs, mm_encoder_outputs={"image": script.repeated(encoded, 2)}, logits_to_keep=1)
        whole = subject.model(**plain, logits_to_keep=1)
        assert (
            tokenprune.stats(subject.model).visual_tokens_out < 0.3 * tokenprune.stats(subject.model).visual_tokens_in
        )
    torch.testing.assert_close(ours.logits, whole.logits)


def test_what_is_encoded_once_reads_nothing_of_the_tower(script: Any) -> None:
    for name in script.AFTER:
        info = tokenprune.method_info(name)
        assert info.site is tokenprune.Site.PRE_LLM and not any(one.startswith("encoder") for one in info.observables)
    assert {*script.AFTER} < {name for row in script.METHODS for name in row}
