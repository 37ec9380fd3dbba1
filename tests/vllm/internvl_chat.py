# SPDX-License-Identifier: Apache-2.0
"""InternVL in its authors' format (`internvl_chat`): the tiny checkpoint with renamed weights, and its reference."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import CHECKPOINTS, text, tokenizer, vision
from paper_checkpoints import INTERNVL_CODE
from reference import Reference

# Weight names in transformers -> names in internvl_chat.
_NAMES = (
    (r"^(model\.)?vision_tower\.embeddings\.cls_token", "vision_model.embeddings.class_embedding"),
    (r"^(model\.)?vision_tower\.embeddings\.position_embeddings", "vision_model.embeddings.position_embedding"),
    (r"^(model\.)?vision_tower\.embeddings\.patch_embeddings\.projection", "vision_model.embeddings.patch_embedding"),
    (r"^(model\.)?vision_tower\.encoder\.layer\.", "vision_model.encoder.layers."),
    (r"\.attention\.projection_layer\.", ".attn.proj."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.lambda_", ".ls"),
    (r"^(model\.)?multi_modal_projector\.layer_norm", "mlp1.0"),
    (r"^(model\.)?multi_modal_projector\.linear_1", "mlp1.1"),
    (r"^(model\.)?multi_modal_projector\.linear_2", "mlp1.3"),
    (r"^(lm_head|language_model\.lm_head)", "language_model.lm_head"),
    (r"^(model\.language_model\.|language_model\.model\.)", "language_model.model."),
)


def write(plain: Path, folder: Path, **more: Any) -> Path:
    """Convert the Hugging Face checkpoint in `plain`, and write it to `folder`; `more` adds entries of the config."""
    stored: dict[str, Tensor] = {}
    for name, value in load_file(plain / "model.safetensors").items():
        for pattern, new in _NAMES:
            name = re.sub(pattern, new, name)
        stored[name] = value
    for name in [name for name in stored if name.endswith("attention.q_proj.weight")]:
        parts = [stored.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        stored[name.replace("attention.q_proj", "attn.qkv")] = torch.cat(parts)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer().save_pretrained(folder)
    (folder / "configuration_own.py").write_text(INTERNVL_CODE)
    tower = vision(
        image_size=56, patch_size=14, qkv_bias=False, qk_normalization=False, norm_type="layer_norm",
        layer_norm_eps=1e-6, hidden_act="gelu", initializer_factor=1.0,
    )  # fmt: skip
    config = dict(
        model_type="internvl_chat", architectures=["InternVLChatModel"],
        auto_map={"AutoConfig": "configuration_own.InternVLChatConfig"}, force_image_size=56, downsample_ratio=0.5,
        max_dynamic_patch=3, min_dynamic_patch=1, dynamic_image_size=True, use_thumbnail=True, ps_version="v2",
        select_layer=-1, vision_config=tower, llm_config=text("qwen2", architectures=["Qwen2ForCausalLM"]),
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | more))
    return folder


class ChatReference(Reference):
    """Reference with the Hugging Face checkpoint, and with inputs from vLLM's processor without pruning."""

    def __init__(self, plain: Path, processor: Any) -> None:
        super().__init__(CHECKPOINTS["internvl"], plain)
        self.mm_processor = processor

    def inputs(self, prompt: str, images: list[Any], videos: Any = ()) -> dict[str, Any]:
        data = self.mm_processor.info.parse_mm_data({"image": images})
        out = self.mm_processor(prompt, data, hf_processor_mm_kwargs={"tokenprune": {"off": True}})
        ids = torch.tensor([out["prompt_token_ids"]])
        pixels = torch.cat([item["pixel_values_flat"].data for item in out["mm_kwargs"]["image"]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
