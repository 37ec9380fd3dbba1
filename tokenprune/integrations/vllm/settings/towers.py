# SPDX-License-Identifier: Apache-2.0
"""Facts about a served model's vision tower, read from its config, and checks of settings that act there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.integrations.shared.checks import AFTER_THE_TOWER
from tokenprune.integrations.shared.towers.patch_grid import patches_of
from tokenprune.integrations.shared.towers.squares import Squares
from tokenprune.integrations.shared.towers.tower_scores import block_index, read_block, without_tower
from tokenprune.models.families import TOWERS, TowerRow, family_of, family_of_config, tower_kind, tower_of
from tokenprune.models.fingerprint import Fingerprint
from tokenprune.selection.method import Method, Pruner
from tokenprune.selection.sites import encoder
from tokenprune.selection.sites.encoder import EncoderMethod, TowerMethod
from tokenprune.selection.sites.units import UnitDropper


def merges_in_tower(method: Method | None) -> bool:
    return isinstance(method, EncoderMethod)


def acts_in_tower(method: Method | None) -> bool:
    """Return True if fewer tokens come out of the tower: each of its rows has a budget, where images have rows."""
    return isinstance(method, (EncoderMethod, UnitDropper))


def drops_by_pixels(method: Method | None) -> bool:
    """Return True if the front end chooses the units that leave."""
    return isinstance(method, UnitDropper) and method.sees == "pixels"


def is_known(config: Any) -> bool:
    """Return True where it is known how patches of this model's tower become visual tokens."""
    return family_of_config(config).patches is not None and tower_of(config) is not None


def packs(config: Any) -> bool:
    """Return True for a tower that lays the patches of all images end to end, and merges whole units of them."""
    row = family_of(config.model_type)
    return row.tower_rows == "all images" and row.merges


def row_of(config: Any) -> TowerRow:
    """Return the row of a tower; raises UnsupportedSetupError for one that is not known."""
    # Configs that vLLM has of its own name a packed tower otherwise than transformers does.
    found = (TOWERS.get(f"{config.model_type}_vision") if packs(config) else None) or tower_of(config)
    if found is None:
        raise UnsupportedSetupError(f"The vision tower {tower_kind(config)!r} is not known. {AFTER_THE_TOWER}")
    return found


def depth_of(vision: Any) -> int:
    return getattr(vision, "num_hidden_layers", None) or vision.depth


def heads_of(vision: Any) -> int:
    return getattr(vision, "num_attention_heads", None) or vision.num_heads


# -- at the start of a server


def check_tower(setting: Any, model_config: Any) -> None:
    """Raise OptionError, BudgetError or UnsupportedSetupError if a model's tower does not allow a setting: it lacks a
    block, cannot reach the budget, or spreads its images over devices."""
    method, config = setting.method, model_config.hf_config
    check_whole(method, model_config)
    if isinstance(method, UnitDropper):
        method.is_identity(setting.budget)
        whole = depth_of(config.vision_config)
        method.checked_block(
            whole if family_of_config(config).tower_rows == "all images" else served_tower(method, config).read
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
    """Raise UnsupportedSetupError if a call's images are not all encoded on each device."""
    if model_config.multimodal_config.mm_encoder_tp_mode == "data":
        options = without_tower(method, json.dumps) if isinstance(method, Pruner) else ""
        less = f", or {method.name} with {options}" if options else ""
        raise UnsupportedSetupError(
            f'{method.name} reads the vision tower, whose images --mm-encoder-tp-mode "data" spreads over devices. '
            "Leave "
            f"it at its default, or use a method that acts after the tower, such as divprune{less}."
        )


def _check_blocks(method: Pruner, config: Any) -> None:
    depth = depth_of(config.vision_config)
    read = read_block(config, depth)
    for layer in method.encoder_layers:
        if block_index(method, layer, depth, config) > read:
            raise OptionError(
                f"{method.name}: the model reads the vision tower's blocks up to number {read}, and vLLM does not run "
                f"block {layer}"
            )


# -- merging


@dataclass(frozen=True)
class ServedTower(encoder.Tower):
    """A tower as its config describes it. vLLM fuses weights and leaves out those that it does not need, so thresholds
    are not compared with the weights they were made for; `check_tower` compares what the config shows."""

    claimed: Fingerprint | None = None

    @cached_property
    def fingerprint(self) -> Fingerprint | None:  # type: ignore[override]  # None: not compared
        return self.claimed


def served_tower(method: TowerMethod, config: Any) -> ServedTower:
    """Return the facts about a model's tower that `method` may read, from the model's config."""
    vision, claimed = config.vision_config, method.calibrated_for
    depth = depth_of(vision)
    if packs(config):
        return ServedTower(1, 0, depth, depth, claimed=claimed)  # how many units, only the image shows
    protected = row_of(config).class_tokens
    tokens, read, units = patches_of(vision) + protected, read_block(config, depth) + 1, units_of(config)
    if units is None:
        return ServedTower(tokens, protected, depth, read, claimed=claimed)
    return ServedTower(units.count(tokens), 0, depth, read, unit=units.size, claimed=claimed)


def units_of(config: Any) -> Squares | None:
    """Return the patches that become one visual token, of a tower whose images are rows; None where each does."""
    side = family_of(config.model_type).side(config)
    return Squares(side, row_of(config).class_tokens) if side > 1 else None


def tiles_of(method: TowerMethod, config: Any, count: int) -> int:
    """Return how many budgets an image of `count` visual tokens has: one for each row of the tower, where rows are not
    cropped; else one."""
    if (row := family_of_config(config)).tower_rows == "all images" or row.patches == "packed":
        return 1
    return max(1, count // served_tower(method, config).patches)


def check_reachable(setting: Any, config: Any, counts: Sequence[int], video: bool) -> None:
    """Raise BudgetError if merging in the tower cannot reach the budget of `setting`, and OptionError for a budget in
    tokens of a video. counts: visual tokens of an image, or of each frame of a video."""
    if not packs(config):
        return  # all images are alike, and looked at when the server starts
    if video and isinstance(setting.budget.keep, int):
        raise OptionError(
            f"{setting.method.name} merges within each frame of a video: keep must be a share, as 0.5, not "
            f"{setting.budget.keep} tokens"
        )
    for count in set(counts):
        setting.method.plan(setting.budget, served_tower(setting.method, config).of(count))
