# SPDX-License-Identifier: Apache-2.0
"""What a config tells of merging inside a vision tower before anything runs: who may, and by which settings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenprune.base import Method
from tokenprune.budget import Budget
from tokenprune.encoder import EncoderMethod, Tower
from tokenprune.errors import UnsupportedSetupError
from tokenprune.fingerprint import Fingerprint
from tokenprune.integrations.shared.tower_scores import read_block
from tokenprune.integrations.vllm.setting.tower_checks import CLASS_TOKENS, check_whole, depth_of, kind_of

_CLASSES = {"clip_vision_model": "CLIPVisionModel", "siglip_vision_model": "SiglipVisionModel"}


def merges_in_tower(method: Method | None) -> bool:
    return isinstance(method, EncoderMethod)


@dataclass(frozen=True)
class ServedTower(Tower):
    """A tower as its config describes it. vLLM fuses weights and leaves out those that it does not need, so thresholds
    are not compared with the weights they were made for; `check_merging` compares what the config tells."""

    claimed: Fingerprint | None = None

    @cached_property
    def fingerprint(self) -> Fingerprint | None:
        return self.claimed


def tower_of(method: EncoderMethod, config: Any) -> ServedTower:
    """Return what `method` gets to know of the tower of a model with this config."""
    vision = config.vision_config
    protected, depth = CLASS_TOKENS[kind_of(config)], depth_of(vision)
    tokens = (vision.image_size // vision.patch_size) ** 2 + protected
    return ServedTower(tokens, protected, depth, read_block(config, depth) + 1, claimed=method.calibrated_for)


def check_merging(setting: Any, model_config: Any) -> None:
    """Raise UnsupportedSetupError, OptionError or BudgetError if this model's tower cannot merge by `setting`."""
    method, config = setting.method, model_config.hf_config
    if config.model_type != "llava" or kind_of(config) not in _CLASSES or _strategy(config) != "default":
        raise UnsupportedSetupError(
            f"{method.name} merges inside the vision tower. vLLM has to know before how many tokens that leaves, which "
            f"can be told of LLaVA-1.5 alone (with CLIP or SigLIP, and a visual token for each patch), not of this "
            f"{config.model_type!r}; use a method that acts behind the tower, such as divprune"
        )
    if not isinstance(config.vision_feature_layer, int):
        raise UnsupportedSetupError(
            f"{method.name}: this model joins the features of several tower layers ({config.vision_feature_layer}), "
            "which merge differently; use a method that acts behind the tower, such as divprune"
        )
    check_whole(method, model_config)
    if setting.removes_nothing:
        return
    tower = tower_of(method, config)
    method.check_served(_CLASSES[kind_of(config)], str(model_config.dtype).removeprefix("torch."), tower.blocks)
    method.plan(Budget.of(setting.keep), tower)


def _strategy(config: Any) -> str:
    """ "default" if visual tokens are the patches, without the class token."""
    chosen = config.vision_feature_select_strategy
    return "default" if (chosen == "full") == (not CLASS_TOKENS[kind_of(config)]) else chosen
