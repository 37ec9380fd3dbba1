# SPDX-License-Identifier: Apache-2.0
"""Streams that hold a load on a server for as long as a test takes, while it goes on answering.

A tiny model makes tokens so fast that vLLM's processes leave one another no time: a request with an image waited for
180 s beside one stream, without the plugin too. So each step of the engine waits a little.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor

STEP = 0.02  # seconds
LONG = 30_000  # tokens of a stream, which is dropped before it ends: ten minutes at least
ARGUMENTS = [
    "--logits-processors", "slow_steps:SlowSteps", "--max-model-len", str(LONG + 100),
    "--hf-overrides", json.dumps({"text_config": {"max_position_embeddings": 2 * LONG}}),
]  # fmt: skip


class SlowSteps(LogitsProcessor):
    """Wait in each step of the engine. The logits stay as they are."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        time.sleep(STEP)
        return logits

    def is_argmax_invariant(self) -> bool:
        return False  # what is true is left out of a step whose tokens are all the most likely ones

    def update_state(self, batch_update: Any) -> None:
        pass
