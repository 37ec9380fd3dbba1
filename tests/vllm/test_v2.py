# SPDX-License-Identifier: Apache-2.0
"""Model Runner V2, vLLM's default with Triton. v2/sitecustomize.py interprets its kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from checkpoints import Checkpoint
from conftest import DIVPRUNE, OPTIONS, Engine, check_recomputed
from tokenprune.errors import UnsupportedSetupError

pytestmark = pytest.mark.only_v2
CHUNK, BLOCK = 24, 32
# Settings that read the tower or merge in it, as each family supports them.
OVERRIDES = {
    "qwen2_5_vl": [{}, {"off": True}, {"keep": 30}, {"method": "vscan", "stage2": False, "keep": 0.5}],
    "llava": [{}, {"off": True}, {"method": "visionzip", "keep": 30}, {"method": "tome", "keep": 0.5}],
}


@pytest.fixture(scope="module", params=OVERRIDES)
def engine(request: pytest.FixtureRequest, start: Callable[..., Engine]) -> Engine:
    """Chunks split every image, and long answers to several prompts do not fit into the KV cache together."""
    return start(request.param, DIVPRUNE, max_num_batched_tokens=CHUNK, num_gpu_blocks_override=16, max_model_len=480)


def test_engine_uses_v2(engine: Engine) -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    runner = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    assert isinstance(runner, GPUModelRunner)
    # Only positions with three axes change.
    assert (runner.model_state.mm_pruner is not None) == engine.checkpoint.mrope


def test_mixed_requests_and_once_more_from_the_prefix_cache(
    engine: Engine, reference: Any, checkpoint: Checkpoint
) -> None:
    engine.forget()
    prompt, images = checkpoint.prompt(2), checkpoint.images(2)
    cases = [(prompt, images, override) for override in OVERRIDES[checkpoint.name]]
    if checkpoint.video is not None:
        cases.append(checkpoint.video_case({"keep": 0.5}))
    for _ in range(2):
        outputs = engine.check(reference, cases)
    assert all(output.num_cached_tokens >= BLOCK for output in outputs)


def test_recomputed_requests(engine: Engine, reference: Any, checkpoint: Checkpoint, preempted: list[str]) -> None:
    """Recomputed prompts contain a part of the answer."""
    if not checkpoint.mrope:
        pytest.skip("positions of one axis are vLLM's own")
    engine.forget()
    check_recomputed(engine, reference, preempted, {"keep": 0.9})


def test_items_that_vllm_rebuilds(
    engine: Engine, reference: Any, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33's encoder cache replaces the items of a request with new objects."""
    from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache

    def add_request(self: Any, req_id: str, mm_features: list[Any]) -> None:
        self.mm_features[req_id] = [dataclasses.replace(feature) for feature in mm_features]

    monkeypatch.setattr(EncoderCache, "add_request", add_request)
    engine.forget()
    engine.check(reference, [(checkpoint.prompt(2), checkpoint.images(2))])


def test_the_encoder_gets_what_its_memory_was_measured_for(
    engine: Engine, checkpoint: Checkpoint, encoder_calls: list[int]
) -> None:
    engine.generate([engine.request(checkpoint.prompt(2), checkpoint.images(2), {"keep": 2})])
    assert encoder_calls == [1, 1]


def test_reduction_inside_the_language_model_is_refused_by_name(folder: Any) -> None:
    from vllm.engine.arg_utils import EngineArgs

    dart = {"method": "dart", "keep": 0.25, "pivot_text": 0, "experimental_in_llm": True}
    arguments = OPTIONS | {"mm_processor_kwargs": {"tokenprune": dart}, "disable_chunked_mm_input": True}
    with pytest.raises(UnsupportedSetupError, match=r"V2 model runner: start with .*VLLM_USE_V2_MODEL_RUNNER=0"):
        EngineArgs(str(folder("llava")), **arguments).create_engine_config()
