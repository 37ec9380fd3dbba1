# SPDX-License-Identifier: Apache-2.0
"""Families that hand their decoder more than the common contract, or that are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from zoo import (
    END,
    HEAD_DIM,
    HIDDEN,
    IMAGE,
    PAD,
    START,
    TEXT,
    TILE,
    VIDEO,
    VISION,
    Family,
    Inputs,
    Picture,
    noise,
    qwen_config,
    qwen_picture,
    qwen_video,
)

GRIDS = ((8, 12), (6, 10), (8, 8))

# Qwen3.5: every other layer carries a state. The layer before a cut at layer 2 attends.
LINEAR = dict(
    layer_types=["linear_attention", "full_attention"] * 2, linear_conv_kernel_dim=3, linear_key_head_dim=32,
    linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
)  # fmt: skip
QWEN3_VISION = dict(hidden_size=VISION, intermediate_size=64, out_hidden_size=HIDDEN, num_position_embeddings=64)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


def calm_states(model: PreTrainedModel) -> None:
    """The norm behind a linear attention blows rounding up where the attention's output is close to zero."""
    for name, parameter in model.named_parameters():
        if name.endswith("linear_attn.norm.weight"):
            parameter.data.mul_(0.3)


def stamped_video(g: torch.Generator, frames: int | None) -> Picture:
    return qwen_video(g, frames, stamped=True)


def qwen35(name: str, **text: Any) -> Family:
    config = qwen_config([4, 2, 2], QWEN3_VISION, head_dim=HEAD_DIM, **LINEAR, **text)
    config["text_config"]["rope_parameters"]["partial_rotary_factor"] = 1.0
    return Family(name, config, qwen_picture, GRIDS, video=stamped_video, types="mm_token_type_ids", settle=calm_states)


# Gemma 4: patches of each picture on an axis of its own with their places beside them, 2 x 2 averaged to a token.


# No video: the forward of transformers 5.19 does not hand on how many frames one has, and raises.


def gemma4_picture(size: tuple[int, int], g: torch.Generator, _: int) -> Picture:
    h, w = size
    places = torch.stack(torch.meshgrid(torch.arange(w), torch.arange(h), indexing="xy"), -1).view(h * w, 2)
    pixels = {"pixel_values": torch.rand(h * w, 3 * 4**2, generator=g), "image_position_ids": places}
    return Picture([START, *[IMAGE] * (h * w // 4), END], pixels)


def gemma4_collate(rows: list[list[Picture]]) -> dict[str, torch.Tensor]:
    flat = [picture.pixels for row in rows for picture in row]
    return {
        key: pad_sequence([pixels[key] for pixels in flat], True, padding)
        for key, padding in (("pixel_values", 0), ("image_position_ids", -1))
    }


def quiet_embeddings(model: PreTrainedModel) -> None:
    """Gemma multiplies its embeddings by sqrt(width), but not the visual features beside them."""
    model.get_input_embeddings().weight.data.mul_(HIDDEN**-0.5)


GEMMA_TEXT = {**TEXT, "head_dim": HEAD_DIM, "sliding_window": 16}
BOTH_KINDS = ["sliding_attention", "full_attention"]


def gemma4(name: str, model_type: str = "gemma4", vision: dict[str, Any] | None = None, **text: Any) -> Family:
    vision = vision or dict(
        hidden_size=VISION, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, patch_size=4, pooling_kernel_size=2, position_embedding_size=32,
    )  # fmt: skip
    text = {**GEMMA_TEXT, "layer_types": BOTH_KINDS * 2, "global_head_dim": HEAD_DIM, **text}
    config = dict(
        text_config=text, vision_config=vision, audio_config=None, video_token_id=VIDEO, audio_token_id=None,
        boi_token_id=START, eoi_token_id=END,
    )  # fmt: skip
    config["audio_token_id"] = 11
    return Family(
        name, config, gemma4_picture, ((8, 12), (8, 6), (4, 12)), collate=gemma4_collate,
        types="mm_token_type_ids", model_type=model_type, settle=quiet_embeddings,
    )  # fmt: skip


# Llama 4: a tile of 16 tokens each with a separator behind it, then the whole picture.


def llama4_picture(tiles: int, g: torch.Generator, _: int) -> Picture:
    ids = [token for _ in range(tiles) for token in (*[IMAGE] * 16, TILE)]
    return Picture([START, *ids, *[IMAGE] * 16, END], {"pixel_values": noise(tiles + 1, 3, 32, 32, g=g)})


# LFM2-VL: patches on an axis of their own, 2 x 2 of them joined to a token.


def lfm2_picture(size: tuple[int, int], g: torch.Generator, _: int) -> Picture:
    h, w = size
    pixels = {
        "pixel_values": noise(h * w, 3 * 4**2, g=g),
        "pixel_attention_mask": torch.ones(h * w, dtype=torch.long),
        "spatial_shapes": torch.tensor(size),
    }
    return Picture([START, *[IMAGE] * (h * w // 4), END], pixels)


def lfm2_collate(rows: list[list[Picture]]) -> dict[str, torch.Tensor]:
    flat = [picture.pixels for row in rows for picture in row]
    out = {key: pad_sequence([pixels[key] for pixels in flat], True) for key in flat[0] if key != "spatial_shapes"}
    return out | {"spatial_shapes": torch.stack([pixels["spatial_shapes"] for pixels in flat])}


@dataclasses.dataclass(frozen=True, eq=False)
class ErnieFamily(Family):
    """Ernie 4.5 VL is also told which tokens go to the experts for pictures: placeholders, and the tokens around."""

    def make_inputs(self, *args: Any, **kwargs: Any) -> Inputs:
        inputs = super().make_inputs(*args, **kwargs)
        ids = inputs["input_ids"]
        inputs["moe_mm_token_type_ids"] = sum((ids == token).long() for token in (IMAGE, VIDEO, START, END))
        return inputs


def ernie_picture(size: tuple[int, int], g: torch.Generator, _: int) -> Picture:
    h, w = size
    pixels = {"pixel_values": noise(h * w, 3 * 4**2, g=g), "image_grid_thw": torch.tensor([[1, h, w]])}
    return Picture([START, *[IMAGE] * (h * w // 4), END], pixels)


def ernie_video(g: torch.Generator, frames: int | None) -> Picture:
    t, h, w = (4, 4, 8) if frames is None else (2 * frames, 4, 4)
    pixels = {"pixel_values_videos": noise(t * h * w, 3 * 4**2, g=g), "video_grid_thw": torch.tensor([[t, h, w]])}
    return Picture([START, *[VIDEO] * (t // 2 * h * w // 4), END], pixels)


def _families() -> list[Family]:
    chunked = dict(
        text_config={
            **TEXT, "model_type": "llama4_text", "head_dim": HEAD_DIM, "intermediate_size_mlp": 96,
            "num_local_experts": 4, "attention_chunk_size": 16, "no_rope_layer_interval": 2, "moe_layers": [1, 3],
            "floor_scale": 8, "attn_scale": 0.5,
        },
        vision_config=dict(
            hidden_size=VISION, intermediate_size=4 * VISION, num_hidden_layers=2, num_attention_heads=2,
            image_size=32, patch_size=4, vision_output_dim=VISION, projector_input_dim=VISION,
            projector_output_dim=VISION, pixel_shuffle_ratio=0.5,
        ),
        boi_token_index=START, eoi_token_index=END,
    )  # fmt: skip
    lfm2 = dict(
        text_config={
            **TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2,
            "block_auto_adjust_ff_dim": False,
        },
        vision_config=dict(
            model_type="siglip2_vision_model", hidden_size=VISION, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, patch_size=4, num_patches=64, vision_use_head=False,
        ),
        projector_hidden_size=64,
    )  # fmt: skip
    ernie = qwen_config([2, 2, 4], dict(hidden_size=VISION, intermediate_size=64, in_channels=3))
    ernie["text_config"] |= dict(
        rope_parameters=dict(rope_type="default", rope_theta=10_000.0, mrope_section=[2, 2, 4]),
        moe_intermediate_size=[32, 32], moe_num_experts=4, moe_k=2, mlp_layer_types=["dense"] + ["sparse"] * 3,
    )  # fmt: skip
    for name in ("vision_start_token_id", "vision_end_token_id"):
        del ernie[name]
    return [
        qwen35("qwen3_5"),
        qwen35("qwen3_5_moe", **EXPERTS, shared_expert_intermediate_size=32),
        gemma4("gemma4", hidden_size_per_layer_input=8, vocab_size_per_layer_input=TEXT["vocab_size"],
               num_kv_shared_layers=2, num_hidden_layers=6, layer_types=BOTH_KINDS * 3),
        gemma4("gemma4_bidirectional", hidden_size_per_layer_input=0, use_bidirectional_attention="vision"),
        gemma4("gemma4_moe", hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=4, top_k_experts=2,
               moe_intermediate_size=32),
        Family("llama4", chunked, llama4_picture, (1, 2, 0), decoder="language_model.model"),
        Family("lfm2_vl", lfm2, lfm2_picture, GRIDS, collate=lfm2_collate),
        ErnieFamily("ernie4_5_vl_moe", ernie, ernie_picture, GRIDS, video=ernie_video, types="mm_token_type_ids"),
    ]  # fmt: skip


FAMILIES: dict[str, Family] = {family.name: family for family in _families()}
# Families with layers that carry a state, from which no mask can take a token: another oracle is needed.
STATEFUL = {"qwen3_5", "qwen3_5_moe", "lfm2_vl"}
REFUSED: dict[str, Family] = {}
NOT_BUILT: dict[str, str] = {}
