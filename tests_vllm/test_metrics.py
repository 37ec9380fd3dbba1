# SPDX-License-Identifier: Apache-2.0
"""The counters of visual tokens, without a server; see test_server.py for what a client reads at /metrics."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, multiprocess

from checkpoints import CHECKPOINTS
from conftest import DIVPRUNE
from test_pixels import photos, processor

TOTAL = "tokenprune:visual_tokens_total"


def counted(model: str) -> tuple[float, float]:
    return tuple(
        REGISTRY.get_sample_value(TOTAL, {"model_name": model, "stage": stage}) or 0 for stage in ("in", "out")
    )


@pytest.mark.parametrize("name", ["mistral3", "llava_next", "internvl", "qwen3_vl"])
def test_requests_are_counted(folder: Callable[[str], Path], name: str) -> None:
    """With breaks and tiles between the placeholders; hits of the cache too, and nothing when memory is measured."""
    from vllm.multimodal.cache.base import MultiModalProcessorOnlyCache

    checkpoint = CHECKPOINTS[name]
    made = processor(folder(name), DIVPRUNE, served_model_name=name)
    cache = MultiModalProcessorOnlyCache(made.info.ctx.model_config)
    token = made.info.get_hf_config().image_token_id

    def ask(images: list[Any], override: dict[str, Any] | None = None) -> tuple[int, tuple[float, float]]:
        """Placeholders of the prompt, and what is counted."""
        before = counted(name)
        kwargs = {} if override is None else {"tokenprune": override}
        items = made.info.parse_mm_data({"image": images})
        ids = made(checkpoint.prompt(len(images)), items, hf_processor_mm_kwargs=kwargs, cache=cache)[
            "prompt_token_ids"
        ]
        return ids.count(token), tuple(b - a for a, b in zip(before, counted(name), strict=True))

    images = photos(checkpoint)[1:]
    whole, sums = ask(images, {"off": True})
    assert sums == (whole, whole)
    for _ in range(2):
        left, sums = ask(images)
        # Where line breaks travel among an image's rows (Mistral 3), placeholders stand for them too.
        assert sums[0] == whole and sums[1] <= left and sums[1] == pytest.approx(whole / 4, abs=2)
    if name != "internvl":
        for method in ("downsample", ["downsample", "uniform"]):
            left, sums = ask(images, {"method": method, "keep": 0.5})
            assert sums[0] == whole and sums[1] <= left < whole
    before = counted(name)
    made.get_dummy_mm_inputs({"image": 1})
    assert counted(name) == before


def test_several_processes_are_added_up(tmp_path: Path) -> None:
    """As vLLM's API servers do it."""
    code = (
        "from types import SimpleNamespace; from tokenprune.integrations.vllm.front.metrics import count; "
        "count(SimpleNamespace(served_model_name='m'), 8, 2)"
    )
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, str(tmp_path))
    values = [registry.get_sample_value(TOTAL, {"model_name": "m", "stage": stage}) for stage in ("in", "out")]
    assert values == [16, 4]
