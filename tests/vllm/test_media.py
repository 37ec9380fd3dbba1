# SPDX-License-Identifier: Apache-2.0
"""`max_visual_tokens` in the engine: images are decoded at the scale that the budget of their request needs."""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from checkpoints import CHECKPOINTS
from conftest import ALL, Engine, check_same
from test_pixels import process_prompt, processor
from tokenprune.errors import BudgetError, OptionError
from tokenprune.integrations.vllm import compat, plugin
from tokenprune.integrations.vllm.settings.rules import LimitError

SETTING = {"max_visual_tokens": 16, "method": "divprune", "keep": 0.5}
OVERRIDES: list[dict[str, Any]] = [
    {},
    {"off": True},
    {"max_visual_tokens": 64},
    {"max_visual_tokens": 4, "keep": 1.0},
    {"method": "fastervlm", "keep": 0.5},
]


def jpeg(height: int = 448, width: int = 560, seed: int = 0) -> bytes:
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 255, (8, 10, 3)).astype(np.uint8))
    file = io.BytesIO()
    coarse.resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=92)
    return file.getvalue()


def fetch(model_config: Any, data: bytes, override: Any = None) -> Any:
    """Return an image as the chat endpoint fetches it for a request with this setting."""
    from vllm.renderers.chat_utils import MultiModalContentParser

    tracker = SimpleNamespace(
        model_config=model_config, media_io_kwargs=None, allowed_local_media_path="", allowed_media_domains=None
    )
    kwargs = None if override is None else {"tokenprune": override}
    parser = MultiModalContentParser(tracker, mm_processor_kwargs=kwargs)
    return parser._connector.fetch_image("data:image/jpeg;base64," + base64.b64encode(data).decode())


@pytest.fixture(scope="module")
def engine(start: Callable[..., Engine]) -> Engine:
    return start("qwen2_5_vl", SETTING)


def ask(engine: Engine, index: int, scaled: bool = True) -> dict[str, Any]:
    override, data = OVERRIDES[index % len(OVERRIDES)], jpeg(seed=index % 3)
    image = fetch(engine.llm.model_config, data, override) if scaled else Image.open(io.BytesIO(data)).convert("RGB")
    return engine.request(engine.checkpoint.prompt(1), [image], override)


def test_a_hundred_mixed_requests_match_single_requests(engine: Engine) -> None:
    engine.forget()
    batched = engine.generate([ask(engine, index) for index in range(100)])
    engine.forget()
    for index, expected in enumerate(batched[:15]):
        (output,) = engine.generate([ask(engine, index)])
        assert output.prompt_token_ids == expected.prompt_token_ids
    for index, output in enumerate(batched):
        first = batched[index % 15]
        assert output.prompt_token_ids == first.prompt_token_ids
        assert output.outputs[0].token_ids == first.outputs[0].token_ids


def test_prompt_matches_the_complete_image(engine: Engine, reference: Any) -> None:
    """For "off", the answer equals the reference's answer for the complete image."""
    reference_model, prompt = reference("qwen2_5_vl"), engine.checkpoint.prompt(1)
    for index in range(len(OVERRIDES)):
        engine.forget()
        (scaled,) = engine.generate([ask(engine, index)])
        engine.forget()
        (plain,) = engine.generate([ask(engine, index, scaled=False)])
        assert scaled.prompt_token_ids == plain.prompt_token_ids
        if OVERRIDES[index].get("off"):
            tokens, logprobs = reference_model.greedy(
                prompt, [Image.open(io.BytesIO(jpeg(seed=index % 3)))], len(plain.outputs[0].token_ids), None
            )
            check_same(scaled, tokens, logprobs)


def test_scales_and_cache_keys(engine: Engine) -> None:
    from vllm.multimodal import MULTIMODAL_REGISTRY

    config, data = engine.llm.model_config, jpeg()
    images = [fetch(config, data, override) for override in OVERRIDES]
    assert [image.size for image in images] == [(140, 112), (560, 448), (280, 224), (70, 56), (140, 112)]
    mm_processor = MULTIMODAL_REGISTRY.create_processor(config)
    keys = []
    for image, override in zip(images, OVERRIDES, strict=True):
        items = mm_processor.info.parse_mm_data({"image": [image]})
        result = mm_processor(engine.checkpoint.prompt(1), items, hf_processor_mm_kwargs={"tokenprune": override})
        keys += result["mm_hashes"]["image"]
    assert len(set(keys)) == len(keys)


def test_an_image_decoded_for_another_setting_is_decoded_again(engine: Engine) -> None:
    """The server's load may change the profile after the image was decoded."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    config, data = engine.llm.model_config, jpeg()
    mm_processor = MULTIMODAL_REGISTRY.create_processor(config)
    prompt = engine.checkpoint.prompt(1)
    for override in OVERRIDES:
        right, wrong = fetch(config, data, override), fetch(config, data, {"max_visual_tokens": 1})
        pixels = []
        for image in (right, wrong):
            items = mm_processor.info.parse_mm_data({"image": [image]})
            result = mm_processor(prompt, items, hf_processor_mm_kwargs={"tokenprune": override})
            pixels.append(result["mm_kwargs"]["image"][0]["pixel_values"].data)
        assert pixels[0].equal(pixels[1])


@pytest.mark.parametrize("damage", ["cut", "noise", "none"])
def test_damaged_files_are_refused_as_by_vllm(engine: Engine, damage: str) -> None:
    data = {"cut": jpeg()[:2000], "noise": b"\xff\xd8\xff" + bytes(range(256)), "none": b""}[damage]
    with pytest.raises(ValueError):
        fetch(engine.llm.model_config, data, {"max_visual_tokens": 4})


def test_limit_of_pixels_applies(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.envs as envs

    monkeypatch.setattr(envs, "VLLM_MAX_IMAGE_PIXELS", 1000, raising=False)
    with pytest.raises(ValueError, match="exceed the maximum of 1000 pixels"):
        fetch(engine.llm.model_config, jpeg(), {"max_visual_tokens": 4})


def test_other_settings_are_refused(engine: Engine) -> None:
    for override, error, says in [
        ({"max_visual_tokens": 0}, BudgetError, "must be a number of tokens"),
        ({"max_visual_tokens": "64"}, BudgetError, "must be a number of tokens"),
        ({"max_visual_tokens": True}, BudgetError, "must be a number of tokens"),
        ({"method": "downsample", "keep": 0.5}, OptionError, "Leave out one"),
    ]:
        image = fetch(engine.llm.model_config, jpeg(), override)
        with pytest.raises(error, match=says):
            engine.generate([engine.request(engine.checkpoint.prompt(1), [image], override)])


# -- without an engine: processors with a setting that limits tokens

NATIVE = [("smolvlm", 9), ("idefics3", 9), ("internvl", 4), ("glm4v", 6)]


@pytest.mark.parametrize(("name", "budget"), NATIVE)
def test_the_processors_own_setting(folder: Callable[..., Any], name: str, budget: int) -> None:
    """No image gets more placeholders than the budget, or than the processor's smallest setting."""
    import tokenprune

    mm_processor, checkpoint = processor(folder(name), {"off": True}), ALL[name]
    hf_processor = mm_processor.info.get_hf_processor()
    for image in checkpoint.images(3):
        prompt = checkpoint.prompt(1)
        full = len(process_prompt(mm_processor, prompt, [image], {"off": True}))
        smallest = tokenprune.count_visual_tokens(hf_processor, 20, 20)
        limited = process_prompt(mm_processor, prompt, [image], {"max_visual_tokens": max(budget, smallest)})
        assert len(limited) <= full
        assert sum(token == mm_processor.info.get_hf_config().image_token_id for token in limited) <= max(
            budget, smallest
        )


def test_rules_of_the_server(folder: Callable[..., Any]) -> None:
    mm_processor = processor(folder("qwen2_5_vl"), {"method": "divprune", "keep": 0.5, "methods": ["divprune"]})
    prompt, images = CHECKPOINTS["qwen2_5_vl"].prompt(1), CHECKPOINTS["qwen2_5_vl"].images(1)
    with pytest.raises(LimitError, match="does not allow downsample"):
        process_prompt(mm_processor, prompt, images, {"max_visual_tokens": 4})


def test_missing_hook_logs_a_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(compat.HOOKS, "media", {"vllm.multimodal.media:NO_SUCH_REGISTRY": ""})
    with caplog.at_level(logging.WARNING):
        plugin._decode_small()
    assert [record.message for record in caplog.records if "full size" in record.message]


def test_unknown_message_parser_logs_a_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

    from tokenprune.integrations.vllm.frontend import media

    monkeypatch.setitem(MEDIA_CONNECTOR_REGISTRY.name2class, "http", MediaConnector)
    monkeypatch.setattr(media, "find_parsers", list)
    with caplog.at_level(logging.WARNING):
        media.install_connector()
    assert [record.message for record in caplog.records if "full size" in record.message]
    assert MEDIA_CONNECTOR_REGISTRY.name2class["http"] is MediaConnector
