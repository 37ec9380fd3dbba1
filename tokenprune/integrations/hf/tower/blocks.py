# SPDX-License-Identifier: Apache-2.0
"""Find the blocks of a model's vision tower, wherever the family keeps them."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from tokenprune.integrations.hf.families import Adapter

_TOWERS = ("vision_tower", "visual", "vision_model")
_LISTS = ("layers", "layer", "blocks")


def find_blocks(adapter: Adapter, known: Collection[str]) -> tuple[nn.Module, nn.Module, list[nn.Module]] | None:
    """Return a model's vision tower, the module inside it that runs the blocks, and these; None if their class is not
    among the names in `known`."""
    for attribute in _TOWERS:
        tower = getattr(adapter.base, attribute, None)
        if tower is None:
            continue
        for module in tower.modules():
            for blocks in (getattr(module, which, None) for which in _LISTS):
                if isinstance(blocks, nn.ModuleList) and blocks and all(type(x).__name__ in known for x in blocks):
                    return tower, module, list(blocks)
    return None


def attention_of(block: nn.Module) -> nn.Module:
    """Return the attention inside a block."""
    return next(getattr(block, name) for name in ("self_attn", "attn", "attention") if hasattr(block, name))
