# SPDX-License-Identifier: Apache-2.0
"""Functions of the lmms-eval tasks: the held-out questions as `tokenprune bench` asks them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenprune_bench.demo_package import import_demo
from tokenprune_bench.metrics import METRICS


def _select_kind(kind: str) -> Callable[[Any], Any]:
    def process_docs(dataset: Any) -> Any:
        from datasets import Dataset

        rows = [
            {"picture": row["picture"], "question": question["question"], "answer": question["answer"]}
            for row in dataset
            for question in row["questions"]
            if question["kind"] == kind
        ]
        return Dataset.from_list(rows)

    return process_docs


# The YAML files of the tasks name these functions.
colour, presence, count, position = (
    _select_kind("colour"),
    _select_kind("presence"),
    _select_kind("count"),
    _select_kind("position"),
)
small, digits, word, grounding = (
    _select_kind("small"),
    _select_kind("digits"),
    _select_kind("word"),
    _select_kind("grounding"),
)


def doc_to_visual(doc: dict[str, Any]) -> list[Any]:
    """Return the image of the question."""
    from PIL import Image

    with Image.open(import_demo("heldout").FOLDER / doc["picture"]) as image:
        return [image.convert("RGB")]


def doc_to_text(doc: dict[str, Any], lmms_eval_specific_kwargs: dict[str, str] | None = None) -> str:
    """Return the question with the suffix of the task."""
    return doc["question"] + (lmms_eval_specific_kwargs or {}).get("post_prompt", "")


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return the score of an answer with the metric `exact` of `tokenprune bench`."""
    (score,) = METRICS["exact"].score(results[:1], [[doc["answer"]]])
    return {"exact": score}
