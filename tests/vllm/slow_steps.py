# SPDX-License-Identifier: Apache-2.0
"""Streams that load a server throughout a test, while it answers other requests.

With a tiny model, vLLM's processes starve each other: a request with an image waited 180 s beside one stream, even
without the plugin. So each step of the engine sleeps.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor
else:
    from vllm.v1.sample.logits_processor import LogitsProcessor

STEP = 0.02  # seconds
LONG = 30_000  # tokens of a stream: at least ten minutes, and tests close it earlier
ARGUMENTS = [
    "--logits-processors", "slow_steps:SlowSteps", "--max-model-len", str(LONG + 100),
    "--hf-overrides", json.dumps({"text_config": {"max_position_embeddings": 2 * LONG}}),
]  # fmt: skip


class SlowSteps(LogitsProcessor):
    """Sleep in each step of the engine, and leave the logits unchanged. The runners pass different arguments."""

    def __init__(self, *args: Any) -> None:
        pass

    def apply(self, logits: torch.Tensor, *args: Any) -> torch.Tensor:
        time.sleep(STEP)
        return logits

    def is_argmax_invariant(self) -> bool:
        return False  # vLLM skips argmax-invariant processors in greedy steps

    def update_state(self, batch_update: Any) -> None:
        pass
