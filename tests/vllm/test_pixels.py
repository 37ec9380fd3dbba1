# SPDX-License-Identifier: Apache-2.0
"""Methods that act on pixels, in the real engine: answers match the Hugging Face model with the patched processor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from checkpoints import CHECKPOINTS, Checkpoint, page
from conftest import DIVPRUNE, Engine
from front_end import photos, processor
from tokenprune.errors import OptionError
from tokenprune.integrations.vllm.frontend.request import get_policy
from tokenprune.integrations.vllm.settings.keys import NO_SETTING

RESIZED = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_next", "llava_onevision", "mistral3", "pixtral"]
FIXED = ["llava", "internvl", "gemma3", "smolvlm", "idefics3"]
SETTINGS = {
    "off": {"off": True},
    "downsample": {"method": "downsample", "keep": 0.4},
    "dynres": {"method": "dynres", "keep": 0.5},
    "dynres without guard": {"method": "dynres", "keep": 0.3, "text_guard": False, "min_scale": 0.5},
    "downsample, divprune": {"method": ["downsample", "divprune"], "keep": [0.6, 0.5]},
    "pool, dynres": {"method": ["pool", {"method": "dynres", "min_scale": 0.4}], "keep": 0.6},
}


@pytest.fixture(scope="module", params=RESIZED)
def engine(request: pytest.FixtureRequest, start: Callable[..., Engine]) -> Engine:
    return start(request.param, SETTINGS["downsample"])


def check(engine: Engine, reference: Any, cases: list[tuple]) -> list[Any]:
    """Compare answers, and prompts of settings without a cut after the encoder; return the outputs."""
    outputs = engine.check(reference, cases)
    for (prompt, images, override, *videos), output in zip(cases, outputs, strict=True):
        setting = engine.resolve(override)
        if setting is None or not isinstance(setting["method"], list):
            ids = reference(engine.checkpoint.name).prompt_ids(prompt, images, setting, *videos)
            assert list(output.prompt_token_ids) == ids
    return outputs


def test_every_setting(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    prompt, images = checkpoint.prompt(3), photos(checkpoint)
    outputs = check(engine, reference, [(prompt, images, override) for override in SETTINGS.values()])
    lengths = [len(output.prompt_token_ids) for output in outputs]
    assert max(lengths[1:]) < lengths[0] and len(set(lengths)) > 3, lengths


def test_videos_keep_their_size(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    if checkpoint.video is None:
        pytest.skip(f"{checkpoint.name} takes no video here")
    prompt, images, videos = checkpoint.prompt(1, video=True), photos(checkpoint)[1:2], [checkpoint.clip()]
    still = {"method": "downsample", "videos": False}
    overrides = [{"off": True}, still | {"keep": 0.4}, {"method": [still, "divprune"], "keep": [0.6, 0.5]}]
    outputs = check(engine, reference, [(prompt, images, override, videos) for override in overrides])
    lengths = [len(output.prompt_token_ids) for output in outputs]
    assert lengths[0] > lengths[1] > lengths[2], lengths
    with pytest.raises(ValueError, match='"videos": false'):
        engine.generate([engine.request(prompt, images, SETTINGS["downsample"], videos)])


def test_caches_separate_settings(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    """Settings with equal numbers of placeholders share no cache entries; equal settings share all entries."""
    engine.forget()
    prompt, images = checkpoint.prompt(1, "what is it, and where, and why? " * 2), photos(checkpoint)[:1]
    overrides = [{"keep": 0.4}, {"method": "dynres", "keep": 0.4}, {"method": "downsample", "keep": 0.400001}, {}]
    hits = []
    for override in overrides:
        (output,) = check(engine, reference, [(prompt, images, override)])
        hits.append(output.num_cached_tokens)
    text = prompt.index(checkpoint.image) // 32 * 32
    assert hits[:3] == [text] * 3 and hits[3] >= 32, hits


# -- units that are dropped before the tower, by the pixels in the front end

UNITS = [
    {"method": "pixelprune", "keep": 1_000_000},
    {"method": "divprune", "keep": 0.5},
    {"method": "pixelprune", "keep": 0.3, "metric": "mae"},
    {"method": "pixelprune", "keep": 0.9, "threshold": 0.05},
    {"method": ["downsample", "pixelprune"], "keep": [0.6, 0.9]},
    {"method": "vscan", "keep": 0.4, "stage2": False},
    {"method": "docprune", "keep": 1_000_000, "tolerance": 2.0},
]


def test_repeated_units_are_dropped_before_the_tower(
    engine: Engine, reference: Any, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not checkpoint.mrope:
        pytest.skip(f"the tower of {checkpoint.name} takes whole grids")
    engine.forget()
    (height, width), *_ = checkpoint.sizes
    prompt, images = checkpoint.prompt(2), [page(height, width), *checkpoint.images(1)]
    towers: list[int] = []  # patches in each call of the tower
    block = engine.model.visual.blocks[0]
    run = block.forward
    monkeypatch.setattr(block, "forward", lambda x, *args, **kwargs: towers.append(len(x)) or run(x, *args, **kwargs))
    outputs = engine.check(reference, [(prompt, images, override) for override in UNITS])
    assert min(towers) < max(towers)
    num_unpruned = len(reference(checkpoint.name).prompt_ids(prompt, images))
    assert all(len(output.prompt_token_ids) < num_unpruned for output in outputs)
    frames, metadata = checkpoint.clip()
    frames = np.repeat(frames[:3], 2, axis=0)
    frames[:, : height // 2] = frames[:1, : height // 2]  # a static background
    prompt, videos = checkpoint.prompt(1, video=True), [(frames, metadata)]
    outputs = engine.check(reference, [(prompt, images[:1], override, videos) for override in UNITS[:2]])
    num_unpruned = len(reference(checkpoint.name).prompt_ids(prompt, images[:1], None, videos))
    assert all(len(output.prompt_token_ids) < num_unpruned for output in outputs)


# -- without an engine, in the front end


def process_prompt(mm_processor: Any, prompt: str, images: Any, override: Any = None) -> list[int]:
    kwargs = {} if override is None else {"tokenprune": override}
    items = mm_processor.info.parse_mm_data({"image": images})
    return mm_processor(prompt, items, hf_processor_mm_kwargs=kwargs)["prompt_token_ids"]


@pytest.mark.parametrize("name", FIXED)
def test_images_of_one_size_are_refused(folder: Callable[..., Any], name: str) -> None:
    checkpoint = CHECKPOINTS[name]
    for key in ("downsample", "dynres", "downsample, divprune"):
        with pytest.raises(OptionError, match=r"ImageProcessor makes the same number .* such as pool"):
            processor(folder(name), SETTINGS[key])
    mm_processor = processor(folder(name), DIVPRUNE)
    prompt, images = checkpoint.prompt(1), checkpoint.images(1)
    if name != "gemma3":  # its processor expects other placeholders
        full, kept = (
            process_prompt(mm_processor, prompt, images, {"off": True}),
            process_prompt(mm_processor, prompt, images),
        )
        assert len(kept) < len(full)
    with pytest.raises(OptionError, match="cannot be served with this model"):
        process_prompt(mm_processor, prompt, images, SETTINGS["downsample"])


@pytest.mark.parametrize(
    ("extra", "limits"),
    [
        ({}, {}),
        ({"min_pixels": 150 * 28**2}, {"shortest_edge": 150 * 28**2}),
        ({"images_kwargs": {"min_pixels": 150 * 28**2}}, {"shortest_edge": 150 * 28**2}),
        ({"size": {"shortest_edge": 784, "longest_edge": 9000}}, {"shortest_edge": 784, "longest_edge": 9000}),
    ],
)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_the_servers_own_limits_hold(
    folder: Callable[..., Any], reference: Any, name: str, extra: dict[str, Any], limits: dict[str, int]
) -> None:
    """The share refers to the tokens that the server would make with its own limits."""
    mm_processor = processor(folder(name), SETTINGS["downsample"], extra=extra)
    checkpoint, reference_model = CHECKPOINTS[name], reference(name)
    counts = []
    for image in [*photos(checkpoint), Image.new("RGB", (30, 29))]:
        size = dict(reference_model.processor.image_processor.size) | limits
        pad = reference_model.model.config.image_token_id
        with reference_model.patched(SETTINGS["downsample"]):
            ids = reference_model.processor(
                images=[image], text=[checkpoint.prompt(1)], images_kwargs={"size": size}, return_tensors="pt"
            )["input_ids"]
        assert process_prompt(mm_processor, checkpoint.prompt(1), [image]) == ids[0].tolist()
        counts.append(int((ids == pad).sum()))
    assert len(set(counts)) > 1 or limits, counts


def test_images_are_hashed_before_they_shrink(folder: Callable[..., Any]) -> None:
    """vLLM hashes images before they shrink if it has a cache. Without a cache, the plugin does the same."""
    from vllm.multimodal.processing.inputs import ProcessorInputs

    mm_processor, checkpoint = processor(folder("llava_next"), SETTINGS["downsample"]), CHECKPOINTS["llava_next"]
    items = mm_processor.info.parse_mm_data({"image": photos(checkpoint)})
    request = get_policy(mm_processor.info.ctx.model_config).resolve(NO_SETTING, items.get_all_counts())
    before = mm_processor.for_request(request)._get_mm_hashes(ProcessorInputs([], items))
    assert mm_processor(checkpoint.prompt(3), items)["mm_hashes"] == before


def test_embeddings_are_refused(folder: Callable[..., Any]) -> None:
    mm_processor = processor(folder("llava_next"), SETTINGS["downsample"], enable_mm_embeds=True)
    with pytest.raises(OptionError, match="contains embeddings"):
        process_prompt(mm_processor, CHECKPOINTS["llava_next"].prompt(1), torch.zeros(1, 20, 64))
