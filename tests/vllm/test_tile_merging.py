# SPDX-License-Identifier: Apache-2.0
"""Merging in towers whose tiles are cropped afterwards (LLaVA-NeXT, LLaVA-OneVision).

Answers match the patched transformers model, and blocks get fewer patches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import Checkpoint
from conftest import Engine, mlp_inputs
from tokenprune import BudgetError, OptionError
from tokenprune.integrations.vllm.settings.plan import Plan, field_name
from tokenprune.integrations.vllm.settings.towers import depth_of
from tokenprune.integrations.vllm.worker.tower import find_tower_blocks
from tokenprune.selection.sites.encoder import Tower
from tokenprune_bench.calibration import Thresholds

TOME = {"method": "tome", "keep": 0.5}
DYMU = {"method": "dymu", "keep": 0.5, "exact": True}


@pytest.fixture(scope="module")
def thresholds(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Thresholds set by hand: tiles need more and fewer merges than `keep`."""

    def get(name: str) -> Path:
        model = reference(name).model
        depth, layer = depth_of(model.config.vision_config), model.config.vision_feature_layer
        classes = int(name == "llava_next")
        tower = Tower(16 + classes, classes, depth, depth + 1 + layer, model.model.vision_tower)
        path = tmp_path_factory.mktemp("thresholds") / f"{name}.safetensors"
        Thresholds({0.5: torch.tensor([0.8, 0.3, 1.0])}, tower.fingerprint, 1).save(path)
        return path

    return get


@pytest.fixture(scope="module", params=["llava_next", "llava_onevision"])
def engine(request: pytest.FixtureRequest, start: Callable[..., Engine], thresholds: Any) -> Engine:
    profile = {"dymu": DYMU | {"thresholds": str(thresholds(request.param))}}
    return start(request.param, TOME | {"profiles": profile})


def test_images_of_several_tiles(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    cases = [
        (1, TOME), (2, TOME), (3, TOME | {"keep": 0.7, "proportional": False}), (2, {"profile": "dymu"}),
        (1, TOME | {"keep": 30}), (2, {"off": True}), (1, {"method": "divprune", "keep": 0.5}),
        (3, TOME | {"keep": 0.6}), (1, TOME | {"keep": 500}),
    ]  # fmt: skip
    requests = [
        (checkpoint.prompt(n, f"case {i}? "), checkpoint.images(n, seed=i), override)
        for i, (n, override) in enumerate(cases)
    ]
    engine.forget()
    for _ in range(2):  # the second round uses the caches
        engine.check(reference, requests)
    assert not any("_tokenprune_wrapped" in vars(module) for module in engine.model.modules())


def test_blocks_run_on_remaining_patches(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    engine.forget()
    with mlp_inputs(*find_tower_blocks(engine.model)) as inputs:
        engine.check(reference, [(checkpoint.prompt(1), checkpoint.images(1))])
    (first,), (last,) = inputs[0], inputs[-1]
    assert first[0] == 3 and last[1] < first[1] < 16 + int(checkpoint.name == "llava_next")


def make_plans(
    engine: Engine, images: list[Any], override: dict[str, Any], videos: list[Any] | None = None
) -> list[Plan]:
    """Return the plans of the front end."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    mm_processor, data = MULTIMODAL_REGISTRY.create_processor(engine.llm.model_config), {"image": images}
    if videos:
        data["video"] = videos
    prompt = engine.checkpoint.prompt(len(images), video=bool(videos))
    out = mm_processor(prompt, mm_processor.info.parse_mm_data(data), hf_processor_mm_kwargs={"tokenprune": override})
    return [Plan.decode(item[field_name("image")].data) for item in out["mm_kwargs"]["image"]]


def test_prompt_has_placeholders_for_the_budget(engine: Engine, checkpoint: Checkpoint) -> None:
    for plan in make_plans(engine, checkpoint.images(3), {}):
        assert plan.keep == [round(0.5 * count) for count in plan.counts] and len(plan.counts) == 1


def test_unreachable_merges_raise_before_the_tower_runs(engine: Engine, checkpoint: Checkpoint) -> None:
    images = checkpoint.images(1)
    share = 0.25 if checkpoint.name == "llava_next" else 0.16  # only reachable by halving if an image has several tiles
    for keep, error, says in (
        (4, OptionError, "of which 4 are newlines; tome needs at least one more"),
        (6, BudgetError, "keep=6 keeps 2 tokens besides the 4 newlines of an image of 44 tokens"),
        (share, BudgetError, "at most half"),
        (0.01, BudgetError, "at most half"),
    ):
        with pytest.raises(error, match=says):
            make_plans(engine, images, TOME | {"keep": keep})
    if checkpoint.video is not None:
        with pytest.raises(OptionError, match=r"video features .* cannot be traced to patches.*after the tower"):
            make_plans(engine, images, TOME, [checkpoint.clip()])
