# SPDX-License-Identifier: Apache-2.0
"""experiments/capacity.py without a server: what it calls an error, and the share of the peak that it says fits."""

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
    pytest.importorskip("openai", reason="the script asks a server through openai")
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


def test_errors_are_of_what_was_measured(check: Any, folder: Path) -> None:
    """A server that is as fast as the closed forms say at another share of the peak: this share fits, and the error is
    that of the share which the command assumes."""
    cpu, args = GPU("a core", 2**34, 1e10, 1e10, 1e10), argparse.Namespace(at_once=8, tokens=8)
    found = {}
    for keep in check.KEEPS:
        true = check.predicted(folder, cpu, keep, TEXT, args, compute=COMPUTE)
        prompt = round(576 * keep) + TEXT
        assert true.prompt == prompt
        rounds = [(1 / true.rate, prompt), (9.0, prompt), (0.01 / true.rate, prompt)]  # the median counts
        found[keep, "answer"] = rounds
        found[keep, "first token"] = [(2.0, prompt)] * 3
    whole, quarter = check.compared(folder, cpu, found, "small", args)
    for one in (whole, quarter):
        assert one["compute_that_fits"] == pytest.approx(COMPUTE, abs=2e-3)
        assert -0.55 < one["rate_error"] < -0.4, "half the share of the peak, and as much decoding"
        assert one["first_token_error"] == pytest.approx(one["predicted_first_token"] / 2 - 1)
    assert whole["prompt"] == 576 + TEXT and quarter["prompt"] == 144 + TEXT
    assert whole["measured_gain"] == 1.0 < quarter["measured_gain"]
    assert quarter["predicted_gain"] == pytest.approx(quarter["predicted_rate"] / whole["predicted_rate"])
