# SPDX-License-Identifier: Apache-2.0
"""The seven benchmarks of the papers' table: which task of lmms-eval scores each, and from which of its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenprune.errors import OptionError

# lmms-eval's own TextVQA leaves out the OCR tokens that LLaVA's script puts into the prompt.
TASK_FOLDER = Path(__file__).parent / "tasks"


@dataclass(frozen=True)
class BenchmarkSet:
    """One column of the papers' table.

    tasks: names of lmms-eval's tasks that score it on this machine; the first is what the commands ask for, any other
    is accepted. metrics: of such a task, whose sum times `scale` is what papers print. limit: the largest such number.
    split: what is scored here. papers: what LLaVA-1.5's own scripts score, which the papers' tables start from.
    """

    key: str
    title: str
    tasks: tuple[str, ...]
    metrics: tuple[str, ...]
    scale: float
    limit: float
    split: str
    papers: str

    def score(self, measured: Mapping[str, Any]) -> float | None:
        """Return the number that papers print, from one task's part of a results file; None where there is none. Its
        range is not checked here."""
        found = {name.partition(",")[0]: value for name, value in measured.items()}
        values = [found.get(metric) for metric in self.metrics]
        if any(isinstance(one, bool) or not isinstance(one, (int, float)) for one in values):
            return None
        return self.scale * sum(values)


SETS = {
    one.key: one
    for one in (
        BenchmarkSet("gqa", "GQA", ("gqa",), ("exact_match",), 100, 100, "testdev, balanced", "the same"),
        BenchmarkSet(
            "mmb", "MMB", ("mmbench_en_dev_static", "mmbench_en_dev"), ("gpt_eval_score",), 1, 100,
            "dev, circular; answers are read by rules. `mmbench_en_dev` asks a GPT about those that are no option's "
            "letter: it wants `OPENAI_API_KEY`, and guesses without one",
            "dev of 2023-07-12, scored by MMBench's server",
        ),
        BenchmarkSet(
            "mme", "MME", ("mme",), ("mme_perception_score", "mme_cognition_score"), 1, 2800,
            "test; perception + cognition", "the same",
        ),
        BenchmarkSet(
            "pope", "POPE", ("pope",), ("pope_f1_score",), 100, 100, "test; F1 over its three parts together",
            "F1 and accuracy of each part. Our notes say F1 for DART and DivPrune, and nothing for the others",
        ),
        BenchmarkSet(
            "sqa", "SQA", ("scienceqa_img",), ("exact_match",), 100, 100, "test, questions with an image",
            "test, all questions and those with an image",
        ),
        BenchmarkSet(
            "vqav2", "VQAv2", ("vqav2_val", "vqav2_val_lite"), ("exact_match",), 100, 100,
            "val: 214,354 questions, most of the time that all this takes. `vqav2_val_lite` has some hundreds of them",
            "test-dev, scored by VQA's server",
        ),
        BenchmarkSet(
            "textvqa", "TextVQA", ("textvqa_val_ocr", "textvqa_val"), ("exact_match",), 100, 100,
            "val, with OCR tokens in the prompt: a task of ours. lmms-eval's `textvqa_val` leaves them out, by its "
            "`ocr: false`",
            "val, with OCR tokens in the prompt",
        ),
    )
}  # fmt: skip


def chosen(names: str | None) -> list[str]:
    """Return one task for each benchmark that is named, by its own name or by a task's ("gqa,vqav2_val_lite"); all for
    None. Raises OptionError for a name that is neither."""
    if names is None:
        return [one.tasks[0] for one in SETS.values()]
    tasks = []
    for name in filter(None, map(str.strip, names.split(","))):
        task = SETS[name].tasks[0] if name in SETS else name
        if not any(task in one.tasks for one in SETS.values()):
            known = ", ".join([*SETS, *(task for one in SETS.values() for task in one.tasks if task not in SETS)])
            raise OptionError(f"--sets: {name!r} is no benchmark of the papers' table; known are {known}")
        tasks.append(task)
    if not tasks or len({set_of(task) for task in tasks}) < len(tasks):
        raise OptionError(f"--sets {names!r} must name at least one benchmark, and none of them twice")
    return tasks


def set_of(task: str) -> str:
    """Return the key of the benchmark that a task scores."""
    return next(key for key, one in SETS.items() if task in one.tasks)
