# SPDX-License-Identifier: Apache-2.0
"""learned with a fitted file: answers match the patched transformers model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import CHECKPOINTS
from tokenprune.integrations.hf.families import get_adapter
from tokenprune.methods.selector import NUM_STATISTICS, Selector
from tokenprune.models.fingerprint import compute_fingerprint


def write_selector(path: Path, model: Any, features: int, question: bool = False) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    inputs = features + NUM_STATISTICS
    weights = {
        "mean": torch.zeros(inputs), "std": torch.ones(inputs), "hidden_bias": torch.zeros(6),
        "hidden_weight": torch.randn(6, inputs, generator=g) / 4, "out_weight": torch.randn(6, generator=g),
    }  # fmt: skip
    if question:
        weights |= {"question_mean": torch.zeros(features), "question_std": torch.ones(features)}
        weights["question_weight"] = torch.randn(6, features, generator=g)
    Selector(weights, compute_fingerprint(get_adapter(model).decoder)).save(path)
    return {"method": "learned", "selector": str(path), "keep": 0.4}


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_a_fitted_file_gives_the_tokens_of_transformers(name: str, start: Any, reference: Any, tmp_path: Path) -> None:
    model, checkpoint = reference(name).model, CHECKPOINTS[name]
    setting = write_selector(tmp_path / "s.safetensors", model, get_adapter(model).text_config.hidden_size)
    engine = start(name, setting)
    asked = (checkpoint.prompt(2), checkpoint.images(2))
    (learned, divprune) = engine.check(reference, [asked, (*asked, {"method": "divprune"})])
    assert len(learned.prompt_token_ids) == len(divprune.prompt_token_ids)


def test_a_file_of_another_width_is_refused(start: Any, reference: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hidden size of 24, not 64"):
        start("llava", write_selector(tmp_path / "s.safetensors", reference("llava").model, 24))


def test_a_head_that_reads_the_question_is_refused(start: Any, reference: Any, tmp_path: Path) -> None:
    model = reference("llava").model
    setting = write_selector(tmp_path / "s.safetensors", model, get_adapter(model).text_config.hidden_size, True)
    with pytest.raises(ValueError, match="it reads the question"):
        start("llava", setting)


def test_a_damaged_file_is_refused(start: Any, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match="cannot read"):
        start("llava", {"method": "learned", "selector": str(path), "keep": 0.4})
