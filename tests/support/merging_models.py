# SPDX-License-Identifier: Apache-2.0
"""Models with a method that merges in the tower."""

from __future__ import annotations

from typing import Any

import torch

SUPPORTED = ["llava", "llava_next", "llava_onevision"]


def tower_of(model: Any) -> Any:
    return model.model.vision_tower


def blocks_of(tower: Any) -> list[Any]:
    return list(next(m.layers for m in tower.modules() if isinstance(getattr(m, "layers", None), torch.nn.ModuleList)))


def image_arguments(inputs: dict) -> dict[str, Any]:
    return {name: inputs[name] for name in ("pixel_values", "image_sizes", "batch_num_images") if name in inputs}
