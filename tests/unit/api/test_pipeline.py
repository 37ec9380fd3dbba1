# SPDX-License-Identifier: Apache-2.0
"""transformers' pipeline on checkpoints with real processors: as users run a model who never see a tensor."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForImageTextToText, AutoProcessor, pipeline

import tokenprune
from each import each

# The checkpoints of the tests of the vLLM plugin, whose folder cannot be on the path beside this one.
_spec = importlib.util.spec_from_file_location("checkpoints", Path(__file__).parents[3] / "tests/vllm/checkpoints.py")
checkpoints = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = checkpoints  # its dataclasses look themselves up there
_spec.loader.exec_module(checkpoints)


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl", "gemma3", "idefics3"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """A checkpoint, its model and its processor."""
    one = checkpoints.CHECKPOINTS[request.param]
    folder = one.write(tmp_path_factory.mktemp(request.param))
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    model.generation_config.update(do_sample=False, eos_token_id=None, pad_token_id=0)
    return one, model, AutoProcessor.from_pretrained(folder)


@each("method", ["divprune", "dart"])
def test_pipeline(method: str, case: tuple[Any, Any, Any]) -> None:
    one, model, processor = case
    processor.tokenizer.padding_side = "left"
    ask = pipeline("image-text-to-text", model=model, processor=processor)
    asked = [dict(text=one.prompt(1, text), images=one.images(1, seed)) for seed, text in enumerate(["a", "is it b"])]
    options = dict(max_new_tokens=8, return_full_text=False)

    def answers(**batch: int) -> list[str]:
        texts, photos = [each["text"] for each in asked], [each["images"] for each in asked]
        return [answer["generated_text"] for answer in ask(text=texts, images=photos, **options, **batch)]

    def by_hand(text: str, images: list) -> str:
        inputs = processor(text=[text], images=[images], return_tensors="pt")
        new = model.generate(**inputs, max_new_tokens=8)[:, inputs["input_ids"].shape[1] :]
        return processor.batch_decode(new, skip_special_tokens=True)[0]

    options_of = {"divprune": {}, "dart": {"layer": 1}}  # of three layers
    plain = [by_hand(**each) for each in asked]
    with tokenprune.patched(model, method, keep=0.1, **options_of[method]):
        want = [by_hand(**each) for each in asked]
        assert answers() == want
        stats = tokenprune.stats(model)
        assert 0 < stats.visual_tokens_out < stats.visual_tokens_in
        assert answers(batch_size=2) == want
    assert want != plain
    assert answers() == plain
