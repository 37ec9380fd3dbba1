# SPDX-License-Identifier: Apache-2.0
"""A model on two devices, here two processes, gives the answers of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from conftest import DIVPRUNE, Engine, stop

pytestmark = [pytest.mark.thorough, pytest.mark.only_v1("V2 was not tried on several devices")]
# Reading the tower and merging in it need all heads, but each worker holds only some of the heads.
METHODS: list[dict[str, Any]] = [{}, {"method": "visionzip"}, {"method": "tome", "keep": 0.5}]


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Allow two workers on one memory node. By default vLLM binds each worker to a separate node."""
    from vllm import envs

    envs.disable_envs_cache()
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    yield
    stop()
    envs.disable_envs_cache()


def compare(engine: Engine, reference: Any) -> None:
    checkpoint = engine.checkpoint
    cases = [(checkpoint.prompt(n), checkpoint.images(n), method) for method in METHODS for n in (1, 2)]
    engine.check(reference, cases)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_tensor_parallel(start: Callable[..., Engine], reference: Any, workers: None, name: str) -> None:
    compare(start(name, DIVPRUNE, tensor_parallel_size=2), reference)


def test_pipeline_parallel(start: Callable[..., Engine], reference: Any, workers: None) -> None:
    """The second stage receives hidden states, but no images."""
    engine = start("llava", DIVPRUNE, pipeline_parallel_size=2)
    # With --enforce-eager vLLM 0.32's CPU build skips this step, which makes the second stage's buffers.
    engine.llm.collective_rpc(lambda worker: worker.model_runner._dummy_run(1) and None)
    compare(engine, reference)
