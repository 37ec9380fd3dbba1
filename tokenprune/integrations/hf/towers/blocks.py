# SPDX-License-Identifier: Apache-2.0
"""Find the blocks of a model's vision tower, wherever the family keeps them."""

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
    adapter: Adapter, known: Collection[str], knows: str, instead: str = AFTER_THE_TOWER
) -> tuple[nn.Module, nn.Module, list[nn.Module]]:
    """Return a model's vision tower, the module inside it that runs the blocks, and these.

    Raises UnsupportedSetupError if their class is not among the names in `known`. knows: in words, the towers that a
    method knows; instead: what else to use.
    """
    for attribute in _TOWERS:
        tower = getattr(adapter.base, attribute, None)
        if tower is None:
            continue
        for module in tower.modules():
            for blocks in (getattr(module, which, None) for which in _LISTS):
                if isinstance(blocks, nn.ModuleList) and blocks and all(type(x).__name__ in known for x in blocks):
                    return tower, module, list(blocks)
    kind = type(getattr(adapter.base, "vision_tower", adapter.base)).__name__
    raise UnsupportedSetupError(f"{knows}, not {kind}. {instead}")


def check_layer(name: str, layer: int, arguments: dict[str, Any]) -> None:
    """Raise UnsupportedSetupError for a call that reads another output of the tower than that of `layer`, for which the
    method called `name` was set up. arguments: of `get_image_features`, or of that of videos."""
    if (asked := arguments.get("vision_feature_layer")) not in (None, layer):
        raise UnsupportedSetupError(
            f"{name} was set up for vision_feature_layer={layer} of the config, not for {asked}. Set it in the config "
            "before patch()."
        )


def attention_of(block: nn.Module) -> nn.Module:
    """Return the attention inside a block."""
    return next(getattr(block, name) for name in ("self_attn", "attn", "attention") if hasattr(block, name))
