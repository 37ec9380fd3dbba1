# SPDX-License-Identifier: Apache-2.0
"""Families beside those of test_served_families.py: some in one engine each, others by what the front end writes."""

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
    """vLLM looks at each model class in a process of its own, which takes as long as a test."""
    from vllm.model_executor.models.registry import _LazyRegisteredModel, _ModelInfo

    with pytest.MonkeyPatch.context() as patch:
        inspect = lambda self: _ModelInfo.from_model_cls(self.load_model_cls())  # noqa: E731
        patch.setattr(_LazyRegisteredModel, "inspect_model_cls", inspect)
        yield


def asked(checkpoint: Checkpoint) -> list[tuple]:
    """Prompts, images, overrides of DIVPRUNE and videos: full, by each of two methods, and with a video."""
    if checkpoint.most == 0:  # videos alone
        prompt = checkpoint.prompt(0, video=True)
        return [(prompt, [], over, [checkpoint.clip()]) for over in ({"off": True}, {}, POOL, {"method": "evs"}, VSCAN)]
    images = checkpoint.images(checkpoint.most)
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


def gap(output: Any, logprobs: torch.Tensor) -> float:
    """How far the log-probabilities of the first token of an answer are from those of a reference, at most."""
    likely = output.outputs[0].logprobs[0]
    return max(abs(found.logprob - float(logprobs[0, token])) for token, found in likely.items())


@pytest.mark.parametrize("name", MORE)
def test_family(start: Callable[..., Engine], reference: Any, name: str) -> None:
    checkpoint, theirs = MORE[name], reference(name)
    limits = {"image": checkpoint.most} if checkpoint.most else {}
    limits |= {"video": 1} if checkpoint.video else {}
    # M-RoPE has original positions already; of the others, decoders that test_original_positions.py does not run.
    engine = start(name, DIVPRUNE | ORIGINAL, dtype=checkpoint.dtype, limit_mm_per_prompt=limits)
    cases = asked(checkpoint)
    outputs = engine.generate([engine.request(*case) for case in cases])
    for case, output in zip(cases, outputs, strict=True):
        if checkpoint.dtype == "float32":
            engine.compare(reference, output, *case)
            continue
        prompt, images, override, videos = (*case, ())[:4]
        setting = engine.resolve(override)
        logprobs, unpruned = (theirs.greedy(prompt, images, 1, one, videos)[1] for one in (setting, None))
        own = gap(output, logprobs)
        assert own < 0.12 and (setting is None or 2 * own < gap(output, unpruned))
    full, kept, *_ = (len(output.prompt_token_ids) for output in outputs)
    assert full > kept


# -- by the front end alone


@pytest.mark.parametrize("name", ALL)
def test_units_leave_where_the_table_says(name: str, folder: Any) -> None:
    """docs/reference/families.md has the same answers; for what becomes of the units see test_tower.py."""
    drop, asked = tokenprune.method("towerdrop", layer=1), {"method": "towerdrop", "keep": 0.4, "layer": 1}
    served = config(folder(name))
    tower = served.hf_config if name == "pixtral" else None  # of LLaVA's
    if (why := find_unsupported_reason(drop, served.architecture, Backend.VLLM, config=tower)) is None:
        assert config(folder(name), asked).multimodal_config.tokenprune["method"] == "towerdrop"
    else:
        with pytest.raises(UnsupportedSetupError, match=re.escape(why)):
            config(folder(name), asked)


class KimiProcessor:
    """Stands in for the code that comes with Kimi-VL's checkpoints."""

    image_token = "<image>"
    image_processor = SimpleNamespace(patch_size=14, merge_kernel_size=(2, 2), in_token_limit=4096)

    def __call__(self, text: Any = None, images: Any = (), **_: Any) -> BatchFeature:
        grids = [(-(-image.height // 28) * 2, -(-image.width // 28) * 2) for image in images]
        patches = sum(height * width for height, width in grids)
        made = dict(pixel_values=torch.zeros(patches, 3, 14, 14), image_grid_hws=torch.tensor(grids))
        return BatchFeature(made | {"input_ids": torch.zeros(1, 1, dtype=torch.long)})


def runs(tokens: list[int], token: int) -> list[int]:
    return [len(list(group)) for same, group in itertools.groupby(tokens, lambda one: one == token) if same]


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_what_the_front_end_writes(paper: Paper, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.multimodal import MULTIMODAL_REGISTRY

    model_config = config(paper.write(tmp_path), DIVPRUNE, trust_remote_code=True, limit_mm_per_prompt={"image": 2})
    assert model_config.architecture == paper.name
    made = MULTIMODAL_REGISTRY.create_processor(model_config)
    if paper.kind == "kimi_vl":
        monkeypatch.setattr(made.info, "get_hf_processor", lambda **_: KimiProcessor())
        call = lambda self, processor, data, kwargs: processor(**data)  # noqa: E731
        monkeypatch.setattr(type(made.info.ctx), "call_hf_processor", call)
    images = [photo(*size, seed=index) for index, size in enumerate(paper.sizes)]
    prompt, family = f"look: {paper.image} and {paper.image} what? ", SERVED[paper.name]

    def written(override: dict[str, Any] | None) -> tuple[list[int], list[Plan], list[Any]]:
        kwargs = {} if override is None else {"tokenprune": override}
        out = made(prompt, made.info.parse_mm_data({"image": images}), hf_processor_mm_kwargs=kwargs)
        plans = [Plan.decode(item[field_name("image")].data) for item in out["mm_kwargs"]["image"]]
        return out["prompt_token_ids"], plans, out["mm_placeholders"]["image"]

    full, wholes, _ = written({"off": True})
    setting = parse_setting(DIVPRUNE)
    for override, count in ((None, partial(count_kept, setting)), ({"keep": 3}, lambda number: min(3, number))):
        short, plans, places = written(override)
        assert len(plans) == len(wholes) == 2
        for whole, plan, place in zip(wholes, plans, places, strict=True):
            segments = whole.runs if family.vllm.per_run else [sum(whole.runs)]
            assert plan.keep == [count(number) for number in segments] and plan.reduces
            assert place.get_num_embeds() == plan.rows == sum(plan.keep) + plan.between
        token = plans[0].placeholder
        each = [count(n) for n in runs(full, token)] if family.vllm.per_run else [plan.rows for plan in plans]
        assert runs(short, token) == each
        if family.vllm.per_run:  # the rest of the prompt is what it was
            assert [one for one in short if one != token] == [one for one in full if one != token]


def test_others_are_refused_with_the_reason() -> None:
    for name, reason in REFUSED_IN_VLLM.items():
        assert name not in SERVED
        with pytest.raises(UnsupportedModelError) as caught:
            family_of(SimpleNamespace(architecture=name))
        assert f"does not serve {name}, because {reason}" in str(caught.value)
    with pytest.raises(UnsupportedModelError, match=r"does not serve Fresh\. Leave the tokenprune setting out"):
        family_of(SimpleNamespace(architecture="Fresh"))


def test_names_are_those_of_vllm() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    assert set(SERVED) | set(REFUSED_IN_VLLM) <= set(ModelRegistry.models)
