# SPDX-License-Identifier: Apache-2.0
"""The seven benchmarks of the papers' table, with the task and metrics of lmms-eval that score each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenprune.errors import OptionError

# lmms-eval's TextVQA omits the OCR tokens that LLaVA's script adds to the prompt.
TASK_FOLDER = Path(__file__).parent / "tasks"


@dataclass(frozen=True)
class BenchmarkSet:
    """A column of the papers' table.

    Attributes:
        key: Short name.
        title: Title of the column.
        tasks: Tasks of lmms-eval that score it. The commands run the first; results of the others are accepted.
        metrics: Metrics of such a task. Papers print their sum times `scale`.
        scale: Factor of the sum.
        limit: Maximum of the number.
        split: The split that is scored here.
        papers: The split that LLaVA-1.5's scripts score, on which the papers' tables are based.
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
        """Return the number that papers print from a task's part of a results file, or None.

        The range is not checked.
        """
        by_metric = {name.partition(",")[0]: value for name, value in measured.items()}
        values = [by_metric.get(metric) for metric in self.metrics]
        if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in values):
            return None
        return self.scale * sum(values)


SETS = {
    benchmark.key: benchmark
    for benchmark in (
        BenchmarkSet("gqa", "GQA", ("gqa",), ("exact_match",), 100, 100, "testdev, balanced", "the same"),
        BenchmarkSet(
            "mmb", "MMB", ("mmbench_en_dev_static", "mmbench_en_dev"), ("gpt_eval_score",), 1, 100,
            "dev, circular; answers are read by rules. `mmbench_en_dev` sends answers that are not an option's letter "
            "to a GPT: it needs `OPENAI_API_KEY`, and guesses without it",
            "dev of 2023-07-12, scored by MMBench's server",
        ),
        BenchmarkSet(
            "mme", "MME", ("mme",), ("mme_perception_score", "mme_cognition_score"), 1, 2800,
            "test; perception + cognition", "the same",
        ),
        BenchmarkSet(
            "pope", "POPE", ("pope",), ("pope_f1_score",), 100, 100, "test; F1 over its three parts together",
            "F1 and accuracy of each part. Our notes have F1 for DART and DivPrune, and no entry for the others",
        ),
        BenchmarkSet(
            "sqa", "SQA", ("scienceqa_img",), ("exact_match",), 100, 100, "test, questions with an image",
            "test, all questions, and questions with an image",
        ),
        BenchmarkSet(
            "vqav2", "VQAv2", ("vqav2_val", "vqav2_val_lite"), ("exact_match",), 100, 100,
            "val: 214,354 questions, most of the total time. `vqav2_val_lite` has some hundred questions",
            "test-dev, scored by VQA's server",
        ),
        BenchmarkSet(
            "textvqa", "TextVQA", ("textvqa_val_ocr", "textvqa_val"), ("exact_match",), 100, 100,
            "val, with OCR tokens in the prompt: our task. lmms-eval's `textvqa_val` omits them (`ocr: false`)",
            "val, with OCR tokens in the prompt",
        ),
    )
}  # fmt: skip


def chosen(names: str | None) -> list[str]:
    """Return one task for each benchmark in a comma-separated list of benchmarks or tasks, or for all with None.

    Raises OptionError for unknown or repeated names.
    """
    if names is None:
        return [benchmark.tasks[0] for benchmark in SETS.values()]
    tasks = []
    for name in filter(None, map(str.strip, names.split(","))):
        task = SETS[name].tasks[0] if name in SETS else name
        if not any(task in benchmark.tasks for benchmark in SETS.values()):
            tasks_of_sets = (task for benchmark in SETS.values() for task in benchmark.tasks if task not in SETS)
            raise OptionError(
                f"--sets: {name!r} is not a benchmark. Choose from: {', '.join([*SETS, *tasks_of_sets])}."
            )
        tasks.append(task)
    if not tasks or len({set_of(task) for task in tasks}) < len(tasks):
        raise OptionError(f"--sets {names!r} must name at least one benchmark, and each only once.")
    return tasks


def set_of(task: str) -> str:
    """Return the key of the benchmark of a task."""
    return next(key for key, benchmark in SETS.items() if task in benchmark.tasks)
