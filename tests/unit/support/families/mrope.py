# SPDX-License-Identifier: Apache-2.0
"""Families of the common contract whose decoders use position ids with three or four axes."""

from __future__ import annotations

import torch
import transformers

from zoo import (
    END,
    HEAD_DIM,
    HIDDEN,
    IMAGE,
    MROPE,
    START,
    TEXT,
    TILE,
    VIDEO,
    VISION,
    Family,
    InputImage,
    grid_image,
    noise,
    qwen_config,
    qwen_image,
    qwen_video,
    words,
)

# Newer versions of transformers put a model between the thinker and its decoder.
THINKER = "model.language_model" if "Qwen2_5OmniThinkerModel" in dir(transformers) else "model"
GRIDS = ((8, 12), (6, 10), (10, 12), (8, 8))
MOE = dict(moe_intermediate_size=32, num_experts_per_tok=2)

# GLM-V: each frame has its own start and end ids, after its timestamp in words. Frame placeholders use the image id;
# only token types tell images and videos apart. A batch holds images or videos, not both.


def glm_video(g: torch.Generator, frames: int | None) -> InputImage:
    t, h, w = (3, 6, 8) if frames is None else (frames, 4, 4)
    ids = [token for _ in range(t) for token in [START, *[IMAGE] * (h * w // 4), END, *words(2, g)]]
    pixels = {"pixel_values_videos": noise(t * h * w, 3 * 2 * 4**2, g=g), "video_grid_thw": torch.tensor([[t, h, w]])}
    return InputImage(ids, pixels, video=True)


def glm(name: str, text: dict, **vision) -> Family:
    tower = dict(
        depth=2, hidden_size=VISION, num_heads=2, image_size=32, patch_size=4, out_hidden_size=HIDDEN,
        intermediate_size=64, **vision,
    )  # fmt: skip
    rope = {**MROPE, "mrope_section": [4, 2, 2], "partial_rotary_factor": 1.0}
    config = dict(
        text_config={**TEXT, "rope_parameters": rope, **text}, vision_config=tower, video_token_id=VIDEO,
        image_start_token_id=START, image_end_token_id=END, video_start_token_id=TILE, video_end_token_id=TILE + 1,
    )  # fmt: skip
    return Family(name, config, qwen_image, GRIDS, video=glm_video, types="mm_token_type_ids", mixes=False)


# HunYuan-VL: features for the begin, the end and each row end are interleaved with the image features.


def hunyuan_image(size: tuple[int, int], g: torch.Generator, _: int) -> InputImage:
    h, w = size
    pixels = {"pixel_values": noise(h * w, 3 * 4**2, g=g), "image_grid_thw": torch.tensor([[1, h, w]])}
    return InputImage([IMAGE] * (h // 2 * (w // 2 + 1) + 2), pixels)


def omni_video(g: torch.Generator, frames: int | None) -> InputImage:
    image = qwen_video(g, frames, seconds=0.5)
    image.pixels["video_second_per_grid"] = image.pixels.pop("second_per_grid_ts")
    return image


def _families() -> list[Family]:
    vision = dict(hidden_size=VISION, intermediate_size=64, out_hidden_size=HIDDEN)
    audio = dict(
        encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=32, d_model=16, num_mel_bins=8, output_dim=HIDDEN
    )
    omni = qwen_config([2, 3, 3], dict(**vision, window_size=16, fullatt_block_indexes=[1, 3]))
    glm_moe = dict(
        **MOE, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, partial_rotary_factor=1.0,
        head_dim=HEAD_DIM,
    )  # fmt: skip
    return [
        Family("qwen3_vl_moe",
               qwen_config([4, 2, 2], dict(**vision, num_position_embeddings=64, deepstack_visual_indexes=[0, 2]),
                           head_dim=HEAD_DIM, **MOE, num_experts=4),
               qwen_image, GRIDS, video=lambda g, frames: qwen_video(g, frames, stamped=True),
               types="mm_token_type_ids"),
        Family("qwen2_5_omni_thinker", {**omni, "audio_config": audio, "audio_token_index": TILE},
               qwen_image, GRIDS, decoder=THINKER, video=omni_video),
        glm("glm4v", {}),
        glm("glm46v", {}),
        glm("glmga", {}),
        glm("glm_ocr", {"head_dim": HEAD_DIM}),
        glm("glm4v_moe", glm_moe),
        Family("paddleocr_vl",
               dict(text_config={**TEXT, "head_dim": HEAD_DIM,
                                 "rope_parameters": {**MROPE, "mrope_section": [2, 3, 3]}},
                    vision_config=dict(hidden_size=VISION, intermediate_size=64, num_hidden_layers=2,
                                       num_attention_heads=2, image_size=32, patch_size=4),
                    video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END),
               grid_image(3, 4, 4), GRIDS, types="mm_token_type_ids"),
        Family("hunyuan_vl",
               dict(text_config={**TEXT, "head_dim": HEAD_DIM,
                                 "rope_parameters": {**MROPE, "mrope_section": [2, 2, 2, 2]}},
                    vision_config=dict(hidden_size=VISION, intermediate_size=64, num_hidden_layers=2,
                                       num_attention_heads=2, patch_size=4, out_hidden_size=HIDDEN,
                                       text_hidden_size=HIDDEN, img_max_token_num=64, max_image_size=64,
                                       min_image_size=16)),
               hunyuan_image, GRIDS, types="mm_token_type_ids"),
    ]  # fmt: skip


FAMILIES: dict[str, Family] = {family.name: family for family in _families()}
