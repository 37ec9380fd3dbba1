# SPDX-License-Identifier: Apache-2.0
"""Queries, keys, values and attention maps of unpatched eager towers, for each visual token."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from module_calls import record_inputs, record_outputs
from zoo import Family

CLASS_TOKEN = {"llava", "llava_next", "llava_next_video", "internvl"}


def tower_of(model: Any) -> Any:
    base = model.model
    return next(getattr(base, n) for n in ("vision_tower", "visual", "vision_model") if hasattr(base, n))


def projector_of(model: Any) -> Any:
    base = model.model
    return next(
        getattr(root, name)
        for root, name in ((base, "multi_modal_projector"), (base, "connector"), (getattr(base, "visual", 0), "merger"))
        if hasattr(root, name)
    )


def attentions_of(model: Any) -> list[Any]:
    tower = tower_of(model)
    names = ("layers", "layer", "blocks")
    blocks = next(getattr(m, n) for m in tower.modules() for n in names if hasattr(m, n))
    return [next(getattr(b, n) for n in ("self_attn", "attn", "attention") if hasattr(b, n)) for b in blocks]


def list_candidates(family: Family, model: Any, projected: list[Tensor]) -> Any:
    """Yield (feature, cell, patch indices in the order of the tower) of all possible tokens."""
    start = tile = 0
    for features in projected:
        if features.ndim == 2:  # four consecutive patches per token
            for i, vector in enumerate(features):
                yield vector, [0] * 6, list(range(start + 4 * i, start + 4 * i + 4))
            start += 4 * len(features)
            continue
        vision = model.config.vision_config
        pixels, patch = (x[0] if isinstance(x, (list, tuple)) else x for x in (vision.image_size, vision.patch_size))
        side = pixels // patch
        for vectors in features:
            grid = math.isqrt(len(vectors))
            times = side // grid
            for i, vector in enumerate(vectors):
                patch_indices = get_patch_indices(i // grid, i % grid, times, side, start)
                yield vector, [tile, i // grid, i % grid, grid, grid, times**2], patch_indices
            if family.video and grid == side:  # video models average 2 x 2 patches
                half, square = grid // 2, vectors.view(grid // 2, 2, grid // 2, 2, -1).mean((1, 3))
                for row in range(half):
                    for column in range(half):
                        patch_indices = get_patch_indices(row, column, 2, side, start)
                        yield square[row, column], [tile, row, column, half, half, 4], patch_indices
            start += side * side
            tile += 1


def get_patch_indices(row: int, column: int, times: int, side: int, start: int) -> list[int]:
    return [
        start + (row * times + down) * side + column * times + right for down in range(times) for right in range(times)
    ]


@dataclass(frozen=True)
class TowerRun:
    """A run of an unpatched eager model.

    Attributes:
        calls: Query, key, value and attention weights of each call of each block's attention.
        projector_inputs, outputs: Inputs of the projector, and outputs of the tower.
        cells: Tile, row, column, height, width and size of each visual token in reading order, -1 for newlines.
        patches: Indices of the patches of each visual token, None for newlines.
        embeds: Input of the decoder's first layer.
    """

    calls: list[list[tuple[Tensor, Tensor, Tensor, Tensor]]]
    projector_inputs: list[Tensor]
    outputs: list[Any]
    cells: list[list[int]]
    patches: list[list[int] | None]
    embeds: Tensor

    def average(self, values: Tensor) -> Tensor:
        """Return the mean over the patches of each visual token, 0 for newlines. values: shape (patches, channels)."""
        return torch.stack([values[0] * 0 if indices is None else values[indices].mean(0) for indices in self.patches])


@torch.no_grad()
def run_tower(family: Family, model: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch) -> TowerRun:
    """Run the model. Find the patches of each token by comparing the decoder's embeddings with projected patches."""
    attentions = attentions_of(model)
    blocks = {id(attention): index for index, attention in enumerate(attentions)}
    calls: list[list[Any]] = [[] for _ in attentions]
    module = sys.modules[type(attentions[0]).__module__]
    original = module.eager_attention_forward

    def record(attention: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        output, weights = original(attention, query, key, value, *args, **kwargs)
        if id(attention) in blocks:
            calls[blocks[id(attention)]].append((query, key, value, weights))
        return output, weights

    with (
        monkeypatch.context() as patch,
        record_inputs(projector_of(model)) as projector_inputs,
        record_outputs(projector_of(model)) as projected,
        record_outputs(tower_of(model)) as outputs,
        record_inputs(model.get_submodule(family.decoder).layers[0]) as embeds,
    ):
        patch.setattr(module, "eager_attention_forward", record)
        model(**inputs)
    candidates = list(list_candidates(family, model, projected))
    vectors = torch.stack([vector for vector, _, _ in candidates])
    visual = embeds[0][family.visual_mask(model, inputs)]
    distance, nearest = torch.cdist(visual, vectors, compute_mode="donot_use_mm_for_euclid_dist").min(1)
    cells, patches = [], []
    for vector, gap, index in zip(visual, distance.tolist(), nearest.tolist(), strict=True):
        is_newline = gap > 1e-4
        assert not is_newline or torch.equal(vector, model.model.image_newline), "a token has unknown patches"
        cells.append([-1] * 6 if is_newline else list(candidates[index][1]))
        patches.append(None if is_newline else candidates[index][2])
    return TowerRun(calls, projector_inputs, outputs, cells, patches, embeds[0])
