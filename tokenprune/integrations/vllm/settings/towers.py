# SPDX-License-Identifier: Apache-2.0
"""Facts about the vision tower of a served model, read from its config, and checks of methods that act there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.integrations.shared.checks import AFTER_THE_TOWER
from tokenprune.integrations.shared.towers.patch_grid import count_patches
from tokenprune.integrations.shared.towers.squares import Squares
from tokenprune.integrations.shared.towers.tower_scores import (
    find_block_index,
    find_last_read_block,
    find_options_without_tower,
)
from tokenprune.models.families import TOWERS, TowerRow, get_config_family, get_family, get_tower, get_tower_type
from tokenprune.models.fingerprint import Fingerprint
from tokenprune.selection.method import Method, Pruner
from tokenprune.selection.sites import encoder
from tokenprune.selection.sites.encoder import EncoderMethod, TowerMethod
from tokenprune.selection.sites.units import UnitDropper


def merges_in_tower(method: Method | None) -> bool:
    """Return True if the method merges tokens inside the tower."""
    return isinstance(method, EncoderMethod)


def acts_in_tower(method: Method | None) -> bool:
    """Return True if the tower returns fewer tokens. Each row of the tower then has its own budget."""
    return isinstance(method, (EncoderMethod, UnitDropper))


def drops_by_pixels(method: Method | None) -> bool:
    """Return True if the front end selects the dropped units from pixels."""
    return isinstance(method, UnitDropper) and method.sees == "pixels"


def is_known(config: Any) -> bool:
    """Return True if the mapping from patches of this model's tower to visual tokens is known."""
    return get_config_family(config).patches is not None and get_tower(config) is not None


def packs(config: Any) -> bool:
    """Return True if the tower concatenates the patches of all images and merges whole units."""
    row = get_family(config.model_type)
    return row.tower_rows == "all images" and row.merges


def row_of(config: Any) -> TowerRow:
    """Return the row of a tower in the table; raise UnsupportedSetupError if there is none."""
    # vLLM's own configs and transformers use different names for a packed tower.
    row = (TOWERS.get(f"{config.model_type}_vision") if packs(config) else None) or get_tower(config)
    if row is None:
        raise UnsupportedSetupError(f"The vision tower {get_tower_type(config)!r} is not known. {AFTER_THE_TOWER}")
    return row


def depth_of(vision: Any) -> int:
    return getattr(vision, "num_hidden_layers", None) or vision.depth


def heads_of(vision: Any) -> int:
    return getattr(vision, "num_attention_heads", None) or vision.num_heads


# -- checks at the start of a server


def check_tower(setting: Any, model_config: Any) -> None:
    """Raise OptionError, BudgetError or UnsupportedSetupError if the model's tower does not support a setting.

    The tower may lack a block, be unable to reach the budget, or distribute its images over devices.
    """
    method, config = setting.method, model_config.hf_config
    check_whole(method, model_config)
    if isinstance(method, UnitDropper):
        method.is_identity(setting.budget)
        depth = depth_of(config.vision_config)
        method.checked_block(
            depth if get_config_family(config).tower_rows == "all images" else served_tower(method, config).blocks_read
        )
    elif isinstance(method, EncoderMethod):
        if not setting.keeps_all_tokens:
            tower = served_tower(method, config)
            method.check_served(
                row_of(config).merging or "", str(model_config.dtype).removeprefix("torch."), tower.blocks
            )
            method.plan(setting.budget, tower)
    else:
        _check_blocks(method, config)


def check_whole(method: Method, model_config: Any) -> None:
    """Raise UnsupportedSetupError if vLLM distributes the images of a call over devices."""
    if model_config.multimodal_config.mm_encoder_tp_mode == "data":
        options = find_options_without_tower(method, json.dumps) if isinstance(method, Pruner) else ""
        less = f", or {method.name} with {options}" if options else ""
        raise UnsupportedSetupError(
            f'{method.name} reads the vision tower, and --mm-encoder-tp-mode "data" spreads its images over '
            f"devices. Use the default mode, or use a method that acts after the tower, such as divprune{less}."
        )


def _check_blocks(method: Pruner, config: Any) -> None:
    depth = depth_of(config.vision_config)
    read = find_last_read_block(config, depth)
    for layer in method.encoder_layers:
        if find_block_index(method, layer, depth, config) > read:
            raise OptionError(
                f"{method.name}: the model reads the vision tower's blocks up to number {read}, and vLLM does not run "
                f"block {layer}"
            )


# -- merging


@dataclass(frozen=True)
class ServedTower(encoder.Tower):
    """A tower as described by its config.

    vLLM fuses weights and omits some, so thresholds are not compared with the weights that they were calibrated on.
    `check_tower` compares the values in the config.
    """

    claimed: Fingerprint | None = None

    @cached_property
    def fingerprint(self) -> Fingerprint | None:  # type: ignore[override]  # None: not compared
        return self.claimed


def served_tower(method: TowerMethod, config: Any) -> ServedTower:
    """Return the facts about a model's tower that `method` may read."""
    vision, claimed = config.vision_config, method.calibrated_for
    depth = depth_of(vision)
    if packs(config):
        return ServedTower(1, 0, depth, depth, claimed=claimed)  # the number of units depends on the image
    protected = row_of(config).class_tokens
    tokens, read, units = count_patches(vision) + protected, find_last_read_block(config, depth) + 1, units_of(config)
    if units is None:
        return ServedTower(tokens, protected, depth, read, claimed=claimed)
    return ServedTower(units.count_units(tokens), 0, depth, read, unit=units.size, claimed=claimed)


def units_of(config: Any) -> Squares | None:
    """Return the patches that form one visual token, for towers with one image per row. None if each patch does."""
    side = get_family(config.model_type).get_unit_side(config)
    return Squares(side, row_of(config).class_tokens) if side > 1 else None


def tiles_of(method: TowerMethod, config: Any, count: int) -> int:
    """Return the number of budgets of an image with `count` visual tokens.

    It is the number of the image's rows in the tower, or 1 if rows are cropped or all images share one row.
    """
    if (row := get_config_family(config)).tower_rows == "all images" or row.patches == "packed":
        return 1
    return max(1, count // served_tower(method, config).patches)


def check_reachable(setting: Any, config: Any, counts: Sequence[int], video: bool) -> None:
    """Raise BudgetError if merging in a tower that packs all images cannot reach the budget of an item.

    Args:
        counts: Number of visual tokens of an image, or of each frame of a video.

    Raises:
        OptionError: If `keep` is a number of tokens and the item is a video.
    """
    if not packs(config):
        return  # all images have the same size, which is checked when the server starts
    if video and isinstance(setting.budget.keep, int):
        raise OptionError(
            f"{setting.method.name} merges within each frame of a video. Pass keep as a share such as 0.5, not "
            f"{setting.budget.keep} tokens."
        )
    for count in set(counts):
        setting.method.plan(setting.budget, served_tower(setting.method, config).with_tokens(count))
