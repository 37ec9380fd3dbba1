# SPDX-License-Identifier: Apache-2.0
"""Towers with one row per image or tile: the unpatched tower with masked columns as a reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from families import FAMILIES as MORE
from merging_models import layers_of, tower_of
from oracle import close
from tokenprune.integrations.hf.families import get_adapter
from tokenprune.integrations.hf.sequence.record import get_record
from tower_attention import use_attention
from tower_features import encode
from zoo import FAMILIES

# Towers with a class token; with neither class token nor units; with both; and with units only.
NAMES = ("llava", "paligemma", "internvl", "gemma3", "smolvlm")


def family_of(name: str) -> Any:
    return MORE.get(name) or FAMILIES[name]


def squares(model: Any, patches: int) -> list[list[int]]:
    """Return the patches of each unit, counted from the first patch."""
    adapter = get_adapter(model)
    side, height = adapter.family.get_unit_side(adapter.config), math.isqrt(patches)
    return [
        [(side * row + r) * height + side * column + c for r in range(side) for c in range(side)]
        for row in range(height // side)
        for column in range(height // side)
    ]


@contextmanager
def masked(model: Any, visible: Tensor, first: int, visible_before: Tensor | None = None) -> Iterator[None]:
    """Mask tokens in the tower within the context.

    Args:
        visible: Mask of the visible tokens from the block at `first` on, shape (tiles, tokens), bool.
        visible_before: Mask of the visible tokens before that block. None for all tokens.
    """
    visible_before = torch.ones_like(visible) if visible_before is None else visible_before
    before = {id(module) for block in layers_of(tower_of(model))[:first] for module in block.modules()}

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        allowed = (visible_before if id(module) in before else visible)[:, None, None]
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        logits = (query @ key.transpose(2, 3) * scale).masked_fill(~allowed, -torch.inf)
        return (logits.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    configs = {id(m.config): m.config for m in tower_of(model).modules() if hasattr(m, "config")}.values()
    with use_attention(attention, configs):
        yield


def check_kept_tiles(
    model: Any, inputs: Any, output: Any, kept: Tensor, units: list[list[int]], num_tokens: int, first: int
) -> None:
    """Compare a patched tower with the unpatched tower, where dropped units are masked from block `first` on.

    Args:
        kept: Mask of the kept units of each tile, shape (tiles, units).
        units: Patches of each unit, from `squares`.
        num_tokens: Number of tokens of a tile, with a class token ahead of the patches if it is odd.
    """
    groups = torch.cat([group[-len(units) :] for group in get_record(output).groups])
    assert torch.equal(groups.view_as(kept) >= 0, kept)
    visible = torch.ones(len(kept), num_tokens, dtype=torch.bool)
    visible[:, num_tokens % 2 + torch.tensor(units).flatten()] = kept.repeat_interleave(len(units[0]), dim=1)
    with masked(model, visible, first):
        expected = encode(model, inputs)["image"]
    actual_features, expected_features = (
        torch.cat(list(x.pooler_output)).flatten(0, -2).view(*kept.shape, -1) for x in (output, expected)
    )
    close(actual_features[kept], expected_features[kept])
