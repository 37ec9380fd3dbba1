# SPDX-License-Identifier: Apache-2.0
"""Families that test_served_families.py does not cover: some in one engine each, the others in the front end."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BatchFeature

import tokenprune
from checkpoints import Checkpoint, page, photo
from conftest import ALL, DIVPRUNE, ORIGINAL, Engine
from front_end import config
from more_checkpoints import MORE
from paper_checkpoints import PAPERS, Paper
from tokenprune.errors import UnsupportedModelError, UnsupportedSetupError
from tokenprune.integrations.shared.checks import find_unsupported_reason
from tokenprune.integrations.vllm.settings.configuration import family_of
from tokenprune.integrations.vllm.settings.items import count_kept
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.integrations.vllm.settings.plan import Plan, field_name
from tokenprune.models.families import REFUSED_IN_VLLM, SERVED
from tokenprune.selection.observable import Backend

POOL = {"method": "pool", "keep": 0.4}
VSCAN = {"method": "vscan", "keep": 0.4, "stage2": False}  # reads two blocks of the tower
HIPRUNE = {"method": "hiprune", "keep": 0.4}


@pytest.fixture(scope="module", autouse=True)
def inspected_here() -> Iterator[None]:
    """Inspect model classes in this process. vLLM starts a process for each class, which takes as long as a test."""
    from vllm.model_executor.models.registry import _LazyRegisteredModel, _ModelInfo

    with pytest.MonkeyPatch.context() as patch:
        inspect = lambda self: _ModelInfo.from_model_cls(self.load_model_cls())  # noqa: E731
        patch.setattr(_LazyRegisteredModel, "inspect_model_cls", inspect)
        yield


def list_cases(checkpoint: Checkpoint) -> list[tuple]:
    """Return prompts, images, overrides of DIVPRUNE and videos: unpruned, with several methods, and with a video."""
    if checkpoint.max_images == 0:  # only videos
        prompt = checkpoint.prompt(0, video=True)
        return [
            (prompt, [], override, [checkpoint.clip()])
            for override in ({"off": True}, {}, POOL, {"method": "evs"}, VSCAN)
        ]
    images = checkpoint.images(checkpoint.max_images)
    prompt = checkpoint.prompt(len(images))
    overrides = [{"off": True}, {}, POOL] + [VSCAN, HIPRUNE] * (checkpoint.name != "aria")
    cases: list[tuple] = [(prompt, images, override) for override in overrides]
    if checkpoint.video:
        beside = images[:1] if checkpoint.mixes else []
        both = checkpoint.prompt(len(beside), video=True)
        overrides = [{}, {"method": "evs"}, {"per": "frame"}, VSCAN]
        cases += [(both, beside, override, [checkpoint.clip()]) for override in overrides]
    if checkpoint.name in ("qwen3_vl_moe", "qwen3_5"):  # for the others see test_tower.py
        cases.append((prompt, images, {"method": "tome", "keep": 0.3}))
    if checkpoint.name == "glm4v":  # for Qwen see test_pixels.py
        cases.append((prompt, [page(140, 196), *images[1:]], {"method": "pixelprune", "keep": 0.9}))
    if checkpoint.name in ("glm4v", "paligemma"):  # for others of SigLIP and CLIP see test_tower.py
        cases.append((prompt, images, {"method": "towerdrop", "keep": 0.4, "layer": 1}))
    return cases


def measure_gap(output: Any, logprobs: torch.Tensor) -> float:
    """Return the largest gap to the reference's log-probabilities of an answer's first token."""
    likely = output.outputs[0].logprobs[0]
    return max(abs(actual.logprob - float(logprobs[0, token])) for token, actual in likely.items())


@pytest.mark.parametrize("name", MORE)
def test_family(start: Callable[..., Engine], reference: Any, name: str) -> None:
    checkpoint, reference_model = MORE[name], reference(name)
    limits = {"image": checkpoint.max_images} if checkpoint.max_images else {}
    limits |= {"video": 1} if checkpoint.video else {}
    # M-RoPE always has original positions. The other families have decoders that test_original_positions.py does not
    # run.
    engine = start(name, DIVPRUNE | ORIGINAL, dtype=checkpoint.dtype, limit_mm_per_prompt=limits)
    cases = list_cases(checkpoint)
    outputs = engine.generate([engine.request(*case) for case in cases])
    for case, output in zip(cases, outputs, strict=True):
        if checkpoint.dtype == "float32":
            engine.compare(reference, output, *case)
            continue
        prompt, images, override, videos = (*case, ())[:4]
        setting = engine.resolve(override)
        logprobs, unpruned = (
            reference_model.greedy(prompt, images, 1, choice, videos)[1] for choice in (setting, None)
        )
        error = measure_gap(output, logprobs)
        assert error < 0.12 and (setting is None or 2 * error < measure_gap(output, unpruned))
    full, kept, *_ = (len(output.prompt_token_ids) for output in outputs)
    assert full > kept


# -- in the front end


@pytest.mark.parametrize("name", ALL)
def test_unit_dropping_matches_the_table(name: str, folder: Any) -> None:
    """The answers match docs/reference/families.md; test_tower.py tests the units."""
    drop, setting = tokenprune.method("towerdrop", layer=1), {"method": "towerdrop", "keep": 0.4, "layer": 1}
    served = config(folder(name))
    tower = served.hf_config if name == "pixtral" else None  # the tower of pixtral in a LLaVA model
    if (reason := find_unsupported_reason(drop, served.architecture, Backend.VLLM, config=tower)) is None:
        assert config(folder(name), setting).multimodal_config.tokenprune["method"] == "towerdrop"
    else:
        with pytest.raises(UnsupportedSetupError, match=re.escape(reason)):
            config(folder(name), setting)


class KimiProcessor:
    """Stand-in for the code in Kimi-VL's checkpoints."""

    image_token = "<image>"
    image_processor = SimpleNamespace(patch_size=14, merge_kernel_size=(2, 2), in_token_limit=4096)

    def __call__(self, text: Any = None, images: Any = (), **_: Any) -> BatchFeature:
        grids = [(-(-image.height // 28) * 2, -(-image.width // 28) * 2) for image in images]
        patches = sum(height * width for height, width in grids)
        fields = dict(pixel_values=torch.zeros(patches, 3, 14, 14), image_grid_hws=torch.tensor(grids))
        return BatchFeature(fields | {"input_ids": torch.zeros(1, 1, dtype=torch.long)})


def list_run_lengths(tokens: list[int], token: int) -> list[int]:
    return [len(list(group)) for same, group in itertools.groupby(tokens, lambda value: value == token) if same]


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_prompts_of_the_front_end(paper: Paper, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.multimodal import MULTIMODAL_REGISTRY

    model_config = config(paper.write(tmp_path), DIVPRUNE, trust_remote_code=True, limit_mm_per_prompt={"image": 2})
    assert model_config.architecture == paper.name
    mm_processor = MULTIMODAL_REGISTRY.create_processor(model_config)
    if paper.kind == "kimi_vl":
        monkeypatch.setattr(mm_processor.info, "get_hf_processor", lambda **_: KimiProcessor())
        call = lambda self, processor, data, kwargs: processor(**data)  # noqa: E731
        monkeypatch.setattr(type(mm_processor.info.ctx), "call_hf_processor", call)
    images = [photo(*size, seed=index) for index, size in enumerate(paper.sizes)]
    prompt, family = f"look: {paper.image} and {paper.image} what? ", SERVED[paper.name]

    def process(override: dict[str, Any] | None) -> tuple[list[int], list[Plan], list[Any]]:
        kwargs = {} if override is None else {"tokenprune": override}
        out = mm_processor(prompt, mm_processor.info.parse_mm_data({"image": images}), hf_processor_mm_kwargs=kwargs)
        plans = [Plan.decode(item[field_name("image")].data) for item in out["mm_kwargs"]["image"]]
        return out["prompt_token_ids"], plans, out["mm_placeholders"]["image"]

    full, unpruned_plans, _ = process({"off": True})
    setting = parse_setting(DIVPRUNE)
    for override, count in ((None, partial(count_kept, setting)), ({"keep": 3}, lambda length: min(3, length))):
        short, plans, placeholders = process(override)
        assert len(plans) == len(unpruned_plans) == 2
        for unpruned_plan, plan, placeholder in zip(unpruned_plans, plans, placeholders, strict=True):
            segments = unpruned_plan.runs if family.vllm.per_run else [sum(unpruned_plan.runs)]
            assert plan.keep == [count(length) for length in segments] and plan.reduces
            assert placeholder.get_num_embeds() == plan.rows == sum(plan.keep) + plan.between
        token = plans[0].placeholder
        expected_lengths = (
            [count(n) for n in list_run_lengths(full, token)] if family.vllm.per_run else [plan.rows for plan in plans]
        )
        assert list_run_lengths(short, token) == expected_lengths
        if family.vllm.per_run:  # the other tokens of the prompt do not change
            assert [token_id for token_id in short if token_id != token] == [
                token_id for token_id in full if token_id != token
            ]


def test_others_are_refused_with_the_reason() -> None:
    for name, reason in REFUSED_IN_VLLM.items():
        assert name not in SERVED
        with pytest.raises(UnsupportedModelError) as caught:
            family_of(SimpleNamespace(architecture=name))
        assert f"does not serve {name}, because {reason}" in str(caught.value)
    with pytest.raises(UnsupportedModelError, match=r"does not serve Fresh\. Leave the tokenprune setting out"):
        family_of(SimpleNamespace(architecture="Fresh"))


def test_names_exist_in_vllm() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    assert set(SERVED) | set(REFUSED_IN_VLLM) <= set(ModelRegistry.models)
