# SPDX-License-Identifier: Apache-2.0
"""The table of vision towers: one row per tower."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TowerRow:
    """A vision tower, in transformers and vLLM.

    Args:
        name: Model type of the tower's config.
        block: Class name of the blocks, whose attention is read.
        class_tokens: Number of class tokens before the patches.
        merging: Class name of the tower, which calibrations are stored for. None if patches are not merged.
        gated: The MLPs are gated, although the activation does not show it.
    """

    name: str
    block: str
    class_tokens: int = 0
    merging: str | None = None
    gated: bool = False


TOWERS = {
    tower.name: tower
    for tower in (
        TowerRow("clip_vision_model", "CLIPEncoderLayer", 1, "CLIPVisionModel"),
        TowerRow("internvl_vision", "InternVLVisionLayer", 1, "InternVLVisionModel"),
        TowerRow(
            "intern_vit_6b", "InternVisionEncoderLayer", 1, "InternVLVisionModel"
        ),  # the name in the original format
        TowerRow("siglip_vision_model", "SiglipEncoderLayer", merging="SiglipVisionModel"),
        TowerRow("idefics3_vision", "Idefics3EncoderLayer", merging="Idefics3VisionTransformer"),
        TowerRow("smolvlm_vision", "SmolVLMEncoderLayer", merging="SmolVLMVisionTransformer"),
        TowerRow("qwen2_vl_vision", "Qwen2VLVisionBlock", merging="Qwen2VisionTransformerPretrainedModel"),
        TowerRow("qwen2_5_vl_vision", "Qwen2_5_VLVisionBlock", merging="Qwen2_5_VisionTransformerPretrainedModel"),
        TowerRow("qwen3_vl_vision", "Qwen3VLVisionBlock", merging="Qwen3VLVisionModel"),
        TowerRow("qwen3_vl_moe_vision", "Qwen3VLMoeVisionBlock", merging="Qwen3VLMoeVisionModel"),
        TowerRow("qwen3_5_vision", "Qwen3_5VisionBlock", merging="Qwen3_5VisionModel"),
        TowerRow("qwen3_5_moe_vision", "Qwen3_5MoeVisionBlock", merging="Qwen3_5MoeVisionModel"),
        TowerRow("glm4v_vision", "Glm4vVisionBlock"),
        TowerRow("glm4v_moe_vision", "Glm4vMoeVisionBlock"),
        TowerRow("moonvit", "MoonVitEncoderLayer"),  # config class of vLLM
        TowerRow("pixtral", "PixtralAttentionLayer", gated=True),
    )
}


def get_tower_type(config: Any) -> str | None:
    """Return the model type of the vision tower by the class of its config. Checkpoints may contain another type."""
    return getattr(type(getattr(config, "vision_config", None)), "model_type", None)


def get_tower(config: Any) -> TowerRow | None:
    """Return the row of a model's vision tower, or None if it is unknown."""
    return TOWERS.get(get_tower_type(config) or "")
