# SPDX-License-Identifier: Apache-2.0
"""The closed form of tower FLOPs equals torch's count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from each import each
from tokenprune.errors import UnsupportedModelError
from tokenprune.integrations.hf.families import get_adapter
from tokenprune.models.tower_shape import FAMILY_JOINS as KNOWN
from tokenprune.models.tower_shape import TowerShape, count_view_patches
from zoo import FAMILIES

SIZES: dict[str, list[Any]] = {  # whole windows of 4 x 4 patches, one and several views
    "llava": [24], "llava_next": [(16, 32)], "llava_onevision": [(16, 32)], "internvl": [3, 1], "gemma3": [32],
    "idefics3": [(1, 2), (0, 0)], "smolvlm": [(2, 1)],
} | {name: [(8, 12), (8, 8)] for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")}  # fmt: skip


@each("name", FAMILIES)
def test_tower_flops_equal_the_count_of_torch(name: str) -> None:
    family = FAMILIES[name]
    model = family.build("eager")
    shape, base = TowerShape.from_config(model.config), get_adapter(model).base
    for size in SIZES[name]:
        inputs = family.make_inputs(rows=1, sizes=[size])
        names = ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", "batch_num_images")
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            base.get_image_features(**{key: inputs[key] for key in names if key in inputs})
        views = count_view_patches(model.config, inputs)
        assert shape.flops(views) == pytest.approx(counter.get_total_flops(), rel=1e-9), (size, views)
        if name not in ("llava_next", "llava_onevision"):  # these add newlines
            assert shape.visual_tokens(views) == sum(map(sum, inputs.counts))


def test_flops_saved_by_merging() -> None:
    shape = TowerShape.from_config(FAMILIES["llava"].build().config)
    views = [36]
    unmerged = shape.flops(views)
    assert shape.flops(views, [1.0] * (shape.layers + 1)) == unmerged
    # A merge in the first block saves its MLP and all later blocks; patches are embedded before it.
    half = shape.flops(views, [1.0] + [0.5] * shape.layers)
    first = shape.flops(views, [1.0] + [0.0] * shape.layers)
    embedding = 2 * 36 * shape.patch_numbers * shape.hidden
    attention = 8 * 37 * shape.hidden**2 + 4 * 37**2 * shape.hidden
    assert first == embedding + attention < half < unmerged


@each(
    ("name", "change", "message"),
    [
        ("llava", {"model_type": "mistral3"}, "mistral3"),
        ("gemma3", {"mm_tokens_per_image": 10**6}, "more visual tokens than its vision tower has patches"),
    ],
)
def test_configs_without_a_closed_form_are_refused(name: str, change: dict[str, Any], message: str) -> None:
    assert set(KNOWN) == set(FAMILIES)
    config = FAMILIES[name].build().config
    config = type(config).from_dict(config.to_dict())
    for key, value in change.items():
        setattr(config, key, value)
    with pytest.raises(UnsupportedModelError, match=message):
        TowerShape.from_config(config)
