# SPDX-License-Identifier: Apache-2.0
"""transformers' pipeline with tiny checkpoints and real processors."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForImageTextToText, AutoProcessor, pipeline

import tokenprune
from each import each

# Checkpoints of the tests of the vLLM plugin. Their folder cannot be on the path together with this folder.
_spec = importlib.util.spec_from_file_location("checkpoints", Path(__file__).parents[3] / "tests/vllm/checkpoints.py")
checkpoints = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = checkpoints  # dataclasses look up their module here
_spec.loader.exec_module(checkpoints)


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl", "gemma3", "idefics3"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """Return a checkpoint, its model and its processor."""
    checkpoint = checkpoints.CHECKPOINTS[request.param]
    folder = checkpoint.write(tmp_path_factory.mktemp(request.param))
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    model.generation_config.update(do_sample=False, eos_token_id=None, pad_token_id=0)
    return checkpoint, model, AutoProcessor.from_pretrained(folder)


@each("method", ["divprune", "dart"])
def test_pipeline(method: str, case: tuple[Any, Any, Any]) -> None:
    checkpoint, model, processor = case
    processor.tokenizer.padding_side = "left"
    ask = pipeline("image-text-to-text", model=model, processor=processor)
    prompts = [
        dict(text=checkpoint.prompt(1, text), images=checkpoint.images(1, seed))
        for seed, text in enumerate(["a", "is it b"])
    ]
    options = dict(max_new_tokens=8, return_full_text=False)

    def run_pipeline(**batch: int) -> list[str]:
        texts, photos = [prompt["text"] for prompt in prompts], [prompt["images"] for prompt in prompts]
        return [answer["generated_text"] for answer in ask(text=texts, images=photos, **options, **batch)]

    def generate(text: str, images: list) -> str:
        inputs = processor(text=[text], images=[images], return_tensors="pt")
        new_ids = model.generate(**inputs, max_new_tokens=8)[:, inputs["input_ids"].shape[1] :]
        return processor.batch_decode(new_ids, skip_special_tokens=True)[0]

    method_options = {"divprune": {}, "dart": {"layer": 1}}  # the model has three layers
    unpatched = [generate(**prompt) for prompt in prompts]
    with tokenprune.patched(model, method, keep=0.1, **method_options[method]):
        expected = [generate(**prompt) for prompt in prompts]
        assert run_pipeline() == expected
        stats = tokenprune.stats(model)
        assert 0 < stats.visual_tokens_out < stats.visual_tokens_in
        assert run_pipeline(batch_size=2) == expected
    assert expected != unpatched
    assert run_pipeline() == unpatched
