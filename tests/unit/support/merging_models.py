# SPDX-License-Identifier: Apache-2.0
"""Models for methods that merge in the tower."""

from __future__ import annotations

from typing import Any

import torch

SUPPORTED = ["llava", "llava_next", "llava_onevision"]
UNITS = ["internvl", "smolvlm", "idefics3", "gemma3"]  # each visual token merges a square of patches


def tower_of(model: Any) -> Any:
    return getattr(model.model, "vision_tower", None) or model.model.vision_model


def layers_of(tower: Any) -> list[Any]:
    """Return the blocks of an encoder, which families name differently."""
    return list(tower.encoder.layer if hasattr(tower.encoder, "layer") else tower.encoder.layers)


def blocks_of(tower: Any) -> list[Any]:
    return list(next(m.layers for m in tower.modules() if isinstance(getattr(m, "layers", None), torch.nn.ModuleList)))


def image_arguments(inputs: dict) -> dict[str, Any]:
    return {name: inputs[name] for name in ("pixel_values", "image_sizes", "batch_num_images") if name in inputs}
