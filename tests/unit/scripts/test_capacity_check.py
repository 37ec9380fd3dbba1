# SPDX-License-Identifier: Apache-2.0
"""Test experiments/capacity.py without a server: its errors, and the share of peak compute that it fits."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

from tokenprune.integrations.vllm.gpus import GPU

TEXT, COMPUTE = 20, 0.8


@pytest.fixture(scope="module")
def check(script: Any) -> Any:
    pytest.importorskip("openai", reason="the script sends requests to a server with openai")
    return script("capacity")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=336, patch_size=14
    )
    text = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    LlavaConfig(vision_config=vision, text_config=text, image_token_index=3).save_pretrained(tmp_path)
    return tmp_path


def test_errors_compare_predictions_with_measurements(check: Any, folder: Path) -> None:
    """Simulate a server as fast as the closed forms at another share of peak compute. The script must fit this share,
    and compute errors for the share that the command assumes."""
    cpu, args = GPU("a core", 2**34, 1e10, 1e10, 1e10), argparse.Namespace(at_once=8, tokens=8)
    measured = {}
    for keep in check.KEEPS:
        prediction = check.predicted(folder, cpu, keep, TEXT, args, compute=COMPUTE)
        prompt = round(576 * keep) + TEXT
        assert prediction.prompt == prompt
        # The script uses the median.
        rounds = [(1 / prediction.rate, prompt), (9.0, prompt), (0.01 / prediction.rate, prompt)]
        measured[keep, "answer"] = rounds
        measured[keep, "first token"] = [(2.0, prompt)] * 3
    unpruned, quarter = check.compared(folder, cpu, measured, "small", args)
    for result in (unpruned, quarter):
        assert result["compute_that_fits"] == pytest.approx(COMPUTE, abs=2e-3)
        assert -0.55 < result["rate_error"] < -0.4, "prefill takes half of the predicted time, decoding the same"
        assert result["first_token_error"] == pytest.approx(result["predicted_first_token"] / 2 - 1)
    assert unpruned["prompt"] == 576 + TEXT and quarter["prompt"] == 144 + TEXT
    assert unpruned["measured_gain"] == 1.0 < quarter["measured_gain"]
    assert quarter["predicted_gain"] == pytest.approx(quarter["predicted_rate"] / unpruned["predicted_rate"])
