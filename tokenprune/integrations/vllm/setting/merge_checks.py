# SPDX-License-Identifier: Apache-2.0
"""What a config tells of merging inside a vision tower before anything runs: who may, and by which settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenprune.base import Method
from tokenprune.budget import Budget
from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.integrations.shared.patch_grid import PatchSource, patches_of
from tokenprune.integrations.shared.tower_scores import read_block
from tokenprune.integrations.shared.units import Units
from tokenprune.integrations.vllm.setting.tower_checks import CLASS_TOKENS, check_whole, depth_of, kind_of
from tokenprune.shapes.fingerprint import Fingerprint
from tokenprune.sites.encoder import EncoderMethod, Tower

_CLASSES = {
    "clip_vision_model": "CLIPVisionModel",
    "siglip_vision_model": "SiglipVisionModel",
    "idefics3_vision": "Idefics3VisionTransformer",
    "smolvlm_vision": "SmolVLMVisionTransformer",
    "internvl_vision": "InternVLVisionModel",
}
# Of towers that lay the patches of all images end to end, and merge whole units of them, by the model type.
_PACKED = {
    "qwen2_vl": "Qwen2VisionTransformerPretrainedModel",
    "qwen2_5_vl": "Qwen2_5_VisionTransformerPretrainedModel",
    "qwen3_vl": "Qwen3VLVisionModel",
    "qwen3_vl_moe": "Qwen3VLMoeVisionModel",
    "qwen3_5": "Qwen3_5VisionModel",
    "qwen3_5_moe": "Qwen3_5MoeVisionModel",
}


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
    if config.model_type in _PACKED:
        depth = depth_of(vision)
        return ServedTower(1, 0, depth, depth, claimed=method.calibrated_for)  # how many units, only the image tells
    protected, depth = CLASS_TOKENS[kind_of(config)], depth_of(vision)
    tokens, read, units = patches_of(vision) + protected, read_block(config, depth) + 1, units_of(config)
    if units is None:
        return ServedTower(tokens, protected, depth, read, claimed=method.calibrated_for)
    return ServedTower(units.count(tokens), 0, depth, read, unit=units.size, claimed=method.calibrated_for)


def units_of(config: Any) -> Units | None:
    """Return the patches that become one visual token, of a tower whose images are rows; None where each does."""
    side = PatchSource(None, config).unit_side
    return Units(side, CLASS_TOKENS[kind_of(config)]) if side > 1 else None


def tiles_of(method: EncoderMethod, config: Any, count: int) -> int:
    """Return how many rows of the tower an image of so many visual tokens is made of; 1 where it has no rows."""
    return 1 if config.model_type in _PACKED else max(1, count // tower_of(method, config).patches)


def check_merging(setting: Any, model_config: Any) -> None:
    """Raise UnsupportedSetupError, OptionError or BudgetError if this model's tower cannot merge by `setting`."""
    method, config = setting.method, model_config.hf_config
    kind = _PACKED.get(config.model_type) or _row_tower(method, config)
    check_whole(method, model_config)
    if setting.removes_nothing:
        return
    tower = tower_of(method, config)
    method.check_served(kind, str(model_config.dtype).removeprefix("torch."), tower.blocks)
    method.plan(Budget.of_checked(setting.keep), tower)


def check_reachable(setting: Any, config: Any, counts: Sequence[int], video: bool) -> None:
    """Raise BudgetError for an image of so many visual tokens, or a video of so many in each frame, of which merging in
    the tower cannot leave what `setting` says; OptionError where that is a number of tokens of a video."""
    if config.model_type not in _PACKED:
        return  # all images are alike, and looked at when the server starts
    if video and isinstance(setting.keep, int):
        raise OptionError(
            f"{setting.method.name} merges within each frame of a video: keep must be a share, as 0.5, not "
            f"{setting.keep} tokens"
        )
    for count in set(counts):
        setting.method.plan(Budget.of_checked(setting.keep), tower_of(setting.method, config).of(count))


def _row_tower(method: Method, config: Any) -> str:
    """Return the class of a tower whose images or tiles are rows of their own, of patches or squares of them that are
    visual tokens; raises UnsupportedSetupError for any other."""
    known = PatchSource(None, config).patch_layout == "tiles" and kind_of(config) in _CLASSES
    if not known or not _shows_patches(config):
        raise UnsupportedSetupError(
            f"{method.name} merges inside the vision tower. vLLM has to know before how many tokens that leaves, which "
            "can be told of LLaVA-1.5 (with CLIP or SigLIP, and a visual token for each patch), Idefics3, SmolVLM, "
            "InternVL in Hugging Face's format, Gemma 3 and Qwen2-VL to Qwen3.5, not of this "
            f"{config.model_type!r}; use a method that acts behind the tower, such as divprune"
        )
    layer = getattr(config, "vision_feature_layer", -1)
    if not isinstance(layer, int):
        raise UnsupportedSetupError(
            f"{method.name}: this model joins the features of several tower layers ({layer}), which merge differently; "
            "use a method that acts behind the tower, such as divprune"
        )
    return _CLASSES[kind_of(config)]


def _shows_patches(config: Any) -> bool:
    """Whether visual tokens are made of all patches, and not of the class token."""
    chosen = getattr(config, "vision_feature_select_strategy", None)  # None: the model has no such choice
    return chosen is None or (chosen == "full") == (not CLASS_TOKENS[kind_of(config)])
