# SPDX-License-Identifier: Apache-2.0
"""Towers that pack all images into one sequence: inputs, and the unpatched tower with masked units as a reference."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from families import FAMILIES
from module_calls import record_inputs
from oracle import close
from tokenprune.integrations.hf.sequence.record import get_record
from tokenprune.models.families import SUPPORTED
from tower_attention import use_attention
from tower_features import base_of, encode

NAMES = sorted(name for name, family in FAMILIES.items() if SUPPORTED[family.kind].tower_rows == "all images")


# One tower of each kind: full attention, windows, deepstack, a convolution before the merger.
DIFFERENT = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")


UNIT = 4


MODALITIES = {"image": "pixel_values", "video": "pixel_values_videos"}


BATCHES = {"left": {}, "ragged": {"images": (2, 1)}, "text beside": {"images": (0, 2)}, "video": {"video": True}}


def tower_of(model: Any) -> Any:
    return getattr(base_of(model), "visual", None) or base_of(model).vision_model


def drawn(inputs: Any, seed: int = 0) -> Any:
    """Return the same inputs with repetitive images: uniform areas and some units of noise."""
    g, inputs = torch.Generator().manual_seed(seed), copy.copy(inputs)
    for modality, name in MODALITIES.items():
        if inputs.get(name) is None:
            continue
        images, width = [], inputs[name].shape[1]
        for t, h, w in inputs[f"{modality}_grid_thw"].tolist():
            frame = torch.full((h // 2, w // 2, UNIT * width), 0.5)
            frame[1:, 1:3] = -0.7
            detail = torch.rand(h // 2, w // 2, generator=g) < 0.3
            frame[detail] = torch.randn(int(detail.sum()), UNIT * width, generator=g)
            frames = frame.repeat(t, 1, 1, 1)
            moves = torch.rand(t, h // 2, w // 2, generator=g) < 0.2
            frames[moves] = torch.randn(int(moves.sum()), UNIT * width, generator=g)
            images.append(frames.reshape(-1, width))
        inputs[name] = torch.cat(images)
    return inputs


def kept_by(method: Any, inputs: Any, get_max_units: Any = lambda units: 10**6) -> dict[str, list[Tensor]]:
    """Return the mask of the units that the method keeps of each image, computed from the pixels."""
    masks = {}
    for modality, name in MODALITIES.items():
        if inputs.get(name) is None:
            continue
        masks[modality], start = [], 0
        for t, h, w in inputs[f"{modality}_grid_thw"].tolist():
            pixels = inputs[name][start : start + t * h * w]
            keep = method.keep_units(pixels.reshape(t, h // 2, w // 2, -1), get_max_units(t * h * w // UNIT))
            masks[modality].append(keep.flatten())
            start += t * h * w
    return masks


def order_of_windows(height: int, width: int, side: int) -> list[int]:
    """Return the raster indices of a frame's units, in the order of windows of side x side units."""
    return [
        row * width + column
        for top in range(0, height, side)
        for left in range(0, width, side)
        for row in range(top, min(top + side, height))
        for column in range(left, min(left + side, width))
    ]


def in_rows(tower: Any, grids: Tensor) -> Tensor:
    """Return the raster index of each unit in the sequence of a tower."""
    order, start = [], 0
    for t, h, w in grids.tolist():
        side = tower.window_size // 2 // tower.patch_size if hasattr(tower, "window_size") else max(h, w)
        for _ in range(t):
            order += [start + unit for unit in order_of_windows(h // 2, w // 2, side)]
            start += h * w // UNIT
    return torch.tensor(order).argsort()


@contextmanager
def mask_units(tower: Any, grids: Tensor, keep: list[Tensor], first: int = 0) -> Iterator[None]:
    """Mask the patches of dropped units in `tower` within this context, from the block at `first` on.

    Dropped patches still attend to everything. The sequences of each block are in the order of its input.
    """
    side = tower.window_size // 2 // tower.patch_size if hasattr(tower, "window_size") else 10**6
    order = []
    for (t, h, w), units in zip(grids.tolist(), keep, strict=True):
        window = order_of_windows(h // 2, w // 2, side) if side < 10**6 else list(range(h * w // UNIT))
        for frame in units.view(t, -1):
            order.append(frame[window])
    visible = torch.cat(order).repeat_interleave(UNIT)
    progress: dict[int, int] = {}
    before = {id(block.attn) for block in tower.blocks[:first]}

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        start, width = progress.get(id(module), 0), key.shape[2]
        progress[id(module)] = (start + width) % len(visible)
        allowed = visible[start : start + width] | torch.eye(width, dtype=torch.bool) | (id(module) in before)
        logits = (query @ key.transpose(2, 3) * kwargs["scaling"]).masked_fill(~allowed, -torch.inf)
        return (logits.softmax(-1) @ value).transpose(1, 2), None

    configs = {id(block.attn.config): block.attn.config for block in tower.blocks}.values()
    with use_attention(attention, configs):
        yield
    assert not any(progress.values()) and len(progress) == len(tower.blocks)


def tensors_of(output: Any) -> list[Tensor]:
    """Return the features that a model uses, one row per unit: features of the last block and of deepstack layers."""
    pooled = output.pooler_output
    deep = list(getattr(output, "deepstack_features", None) or [])
    return [features if isinstance(features, Tensor) else torch.cat(list(features)) for features in (pooled, *deep)]


def read_states(model: Any, inputs: Any, modality: str) -> list[Tensor]:
    """Return the input of each block of the unpatched tower in raster order, shape (units, patches, channels)."""
    grids = f"{modality}_grid_thw"
    with record_inputs(*tower_of(model).blocks) as states:
        encode(model, {name: inputs[name] for name in (MODALITIES[modality], grids)})
    return [x.view(-1, UNIT, x.shape[-1])[in_rows(tower_of(model), inputs[grids])] for x in states]


def check_kept_units(model: Any, inputs: Any, modality: str, output: Any, kept: list[Tensor], first: int = 0) -> None:
    """Compare a patched tower with the unpatched tower, where dropped units are masked from block `first` on.

    Args:
        kept: Mask of the kept units of each image or video, in raster order.
    """
    keep, blocks = torch.cat(kept), len(tower_of(model).blocks)
    counts = [UNIT * len(keep)] * first + [UNIT * int(keep.sum())] * (blocks - first)
    assert get_record(output).block_tokens == counts
    with mask_units(tower_of(model), inputs[f"{modality}_grid_thw"], kept, first):
        expected = encode(model, inputs)[modality]
    for actual_features, expected_features in zip(tensors_of(output), tensors_of(expected), strict=True):
        close(actual_features[keep], expected_features[keep])
