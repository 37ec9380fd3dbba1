# SPDX-License-Identifier: Apache-2.0
"""Functions of textvqa_val_ocr.yaml: lmms-eval's TextVQA without the file for the submission server."""

from __future__ import annotations

from typing import Any

from lmms_eval.tasks.textvqa.utils import textvqa_doc_to_text, textvqa_doc_to_visual, textvqa_process_results

__all__ = ["accuracy", "textvqa_doc_to_text", "textvqa_doc_to_visual"]


def accuracy(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return the VQA accuracy of an answer."""
    return {"exact_match": textvqa_process_results(doc, results)["exact_match"]}
