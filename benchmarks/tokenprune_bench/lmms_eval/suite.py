# SPDX-License-Identifier: Apache-2.0
"""Functions of our lmms-eval tasks: the held-out questions of the package, as `tokenprune bench` asks them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenprune_bench.demo_package import import_demo
from tokenprune_bench.metrics import METRICS


def _only(kind: str) -> Callable[[Any], Any]:
    def process_docs(dataset: Any) -> Any:
        from datasets import Dataset

        rows = [
            {"picture": row["picture"], "question": asked["question"], "answer": asked["answer"]}
            for row in dataset
            for asked in row["questions"]
            if asked["kind"] == kind
        ]
        return Dataset.from_list(rows)

    return process_docs


# A task's YAML names its function.
colour, presence, count, position = _only("colour"), _only("presence"), _only("count"), _only("position")
small, digits, word, grounding = _only("small"), _only("digits"), _only("word"), _only("grounding")


def doc_to_visual(doc: dict[str, Any]) -> list[Any]:
    """Return the question's image."""
    from PIL import Image

    with Image.open(import_demo("heldout").FOLDER / doc["picture"]) as image:
        return [image.convert("RGB")]


def doc_to_text(doc: dict[str, Any], lmms_eval_specific_kwargs: dict[str, str] | None = None) -> str:
    """Return the question, with the task's suffix."""
    return doc["question"] + (lmms_eval_specific_kwargs or {}).get("post_prompt", "")


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return the score of one answer, by the metric `exact` of `tokenprune bench`."""
    (score,) = METRICS["exact"].score(results[:1], [[doc["answer"]]])
    return {"exact": score}
