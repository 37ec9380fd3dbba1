# SPDX-License-Identifier: Apache-2.0
"""Find the vision tower of a model, its blocks, and their attention modules."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.shared.checks import AFTER_THE_TOWER

_TOWERS = ("vision_tower", "visual", "vision_model")
_LISTS = ("layers", "layer", "blocks")


def find_blocks(
    adapter: Adapter, known: Collection[str], supported: str, instead: str = AFTER_THE_TOWER
) -> tuple[nn.Module, nn.Module, list[nn.Module]]:
    """Find the vision tower of a model.

    Args:
        adapter: Adapter of the model.
        known: Supported class names of blocks.
        supported: First part of the error message, which names the supported towers.
        instead: Last sentence of the error message, which names an alternative.

    Returns:
        The tower, the module inside it that runs the blocks, and the blocks.

    Raises:
        UnsupportedSetupError: If the class of the blocks is not in `known`.
    """
    for attribute in _TOWERS:
        tower = getattr(adapter.base, attribute, None)
        if tower is None:
            continue
        for module in tower.modules():
            for blocks in (getattr(module, name, None) for name in _LISTS):
                if isinstance(blocks, nn.ModuleList) and blocks and all(type(x).__name__ in known for x in blocks):
                    return tower, module, list(blocks)
    kind = type(getattr(adapter.base, "vision_tower", adapter.base)).__name__
    raise UnsupportedSetupError(f"{supported}, not {kind}. {instead}")


def check_layer(name: str, layer: int, arguments: dict[str, Any]) -> None:
    """Raise UnsupportedSetupError if a call reads the tower's output at a layer other than `layer`.

    Args:
        name: Name of the method.
        layer: Value of `vision_feature_layer` at patch time.
        arguments: Arguments of `get_image_features` or `get_video_features`.
    """
    if (requested := arguments.get("vision_feature_layer")) not in (None, layer):
        raise UnsupportedSetupError(
            f"{name} was set up for vision_feature_layer={layer} of the config, not for {requested}. Set it in the "
            "config before patch()."
        )


def get_attention(block: nn.Module) -> nn.Module:
    """Return the attention module of a block."""
    return next(getattr(block, name) for name in ("self_attn", "attn", "attention") if hasattr(block, name))
