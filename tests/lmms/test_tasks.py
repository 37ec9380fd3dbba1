# SPDX-License-Identifier: Apache-2.0
"""Test that the task package has the questions and the scores of `tokenprune bench`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from lmms_eval.tasks import TaskManager, get_task_dict

from tokenprune_bench.lmms_eval import get_tasks_folder, suite
from tokenprune_bench.metrics import METRICS
from tokenprune_bench.profiling.model import SHORT
from tokenprune_demo.heldout import load_heldout
from tokenprune_demo.scenes import KINDS

VARIANTS = {"": (SHORT, 16), "_plain": ("", 4)}


@pytest.fixture(scope="module")
def manager() -> TaskManager:
    return TaskManager("WARNING", include_path=str(get_tasks_folder()), include_defaults=False)


def test_the_folder_is_printed() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "tokenprune_bench.lmms_eval"], capture_output=True, text=True, check=True
    )
    assert Path(printed.stdout.strip()) == get_tasks_folder()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_group_has_every_kind_of_question(manager: TaskManager, variant: str) -> None:
    assert manager._get_config(f"tokenprune_suite{variant}")["task"] == [
        f"tokenprune_{kind}{variant}" for kind in KINDS
    ]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_task_has_the_questions_of_bench(manager: TaskManager, kind: str, variant: str) -> None:
    suffix, tokens = VARIANTS[variant]
    name = f"tokenprune_{kind}{variant}"
    task = get_task_dict([name], manager, "simple")[name]
    examples = load_heldout(kinds=[kind])
    docs = list(task.test_docs())
    assert [task.doc_to_text(doc) for doc in docs] == [example.question + suffix for example in examples]
    assert [task.doc_to_target(doc) for doc in docs] == [example.answer for example in examples]
    assert task.doc_to_visual(docs[-1])[0].tobytes() == examples[-1].image.tobytes()
    assert task.config.generation_kwargs["max_new_tokens"] == tokens


@pytest.mark.parametrize("answer", ["red", "Red.", " red ", "dark red", "", "reds", "RED.."])
def test_the_metric_equals_bench(answer: str) -> None:
    (expected,) = METRICS["exact"].score([answer], [["red"]])
    assert suite.process_results({"answer": "red"}, [answer]) == {"exact": expected}
