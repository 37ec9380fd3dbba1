# SPDX-License-Identifier: Apache-2.0
"""Families of the common contract with two towers, a convolutional tower, no tower, or a special feature count."""

from __future__ import annotations

import torch

from families.plain import LLAMA, QWEN2, SIGLIP
from zoo import BREAK, END, HIDDEN, IMAGE, START, TEXT, VIDEO, VISION, Family, InputImage, grid_image, noise

SAM = dict(
    hidden_size=VISION, output_channels=VISION, num_hidden_layers=2, num_attention_heads=2, patch_size=4,
    window_size=2, global_attn_indexes=[1],
)  # fmt: skip


# FastVLM: convolutions, a feature for 32 x 32 pixels.


def fast_image(size: int, g: torch.Generator, _: int) -> InputImage:
    return InputImage([IMAGE] * (size // 32) ** 2, {"pixel_values": noise(1, 3, size, size, g=g)})


# DeepSeek-VL (hybrid): one image at two resolutions.


def hybrid_image(size: int, g: torch.Generator, _: int) -> InputImage:
    pixels = {"pixel_values": noise(1, 3, 24, 24, g=g), "high_res_pixel_values": noise(1, 3, size, size, g=g)}
    return InputImage([IMAGE] * 36, pixels)


# DeepSeek-OCR-2: crops of 144 queries, the whole image, and a feature that ends it.


def ocr2_image(crops: int, g: torch.Generator, _: int) -> InputImage:
    pixels = {
        "pixel_values": noise(1, 3, 64, 64, g=g),
        "pixel_values_local": noise(crops, 3, 64, 64, g=g),  # no crops of a small image
        "num_local_patches": torch.tensor([crops]),
    }
    return InputImage([IMAGE] * (144 * (crops + 1) + 1), pixels)


# Fuyu: patches of all images on one axis; an id after each row.


def fuyu_image(size: tuple[int, int], g: torch.Generator, _: int) -> InputImage:
    h, w = size
    return InputImage([*[IMAGE] * w, BREAK] * h, {"image_patches": noise(h * w, 3 * 4**2, g=g)})


# VideoLLaMA 3: 2 x 2 patches make a token; of a video only the patches that moved.


def llama3_image(size: tuple[int, int], g: torch.Generator, _: int) -> InputImage:
    image = grid_image(3 * 4**2)(size, g, _)
    return InputImage(image.ids, image.pixels | {"image_merge_sizes": torch.tensor([2])})


def llama3_video(g: torch.Generator, frames: int | None) -> InputImage:
    t, h, w = (3, 6, 8) if frames is None else (frames, 4, 4)
    moved = torch.rand(t * h * w // 4, generator=g) > 0.3
    moved[: h * w // 4] = True
    pixels = {
        "pixel_values_videos": noise(t * h * w, 3 * 4**2, g=g),
        "video_grid_thw": torch.tensor([[t, h, w]]),
        "video_merge_sizes": torch.tensor([2]),
        "video_compression_mask": moved,
    }
    frame_counts = moved.view(t, -1).sum(1).tolist()
    return InputImage([token for count in frame_counts for token in [START, *[VIDEO] * count, END]], pixels)


def _families() -> list[Family]:
    grids = ((8, 12), (6, 10), (10, 12), (8, 8))
    return [
        Family("fast_vlm", dict(text_config=QWEN2, vision_config=dict(
                   architecture="fastvit_t8", do_pooling=True, global_pool="avg", hidden_size=VISION,
                   model_args=dict(inference_mode=True, layers=[1, 1, 1, 1], embed_dims=[8, 8, 8, VISION // 2]))),
               fast_image, (128, ), eager=("vision_config",)),
        Family("deepseek_vl_hybrid", dict(text_config=LLAMA, vision_config=SIGLIP, high_res_vision_config={
                   **SAM, "model_type": "sam_vision_model", "image_size": 32, "mlp_dim": 64}),
               hybrid_image, (32,)),
        Family("deepseek_ocr2", dict(
                   text_config={**TEXT, "num_key_value_heads": 2, "n_routed_experts": 4, "n_shared_experts": 1,
                                "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                                "mlp_layer_types": ["dense", "sparse", "sparse", "dense"]},
                   vision_config=dict(
                       sam_config={**SAM, "image_size": 64, "downsample_channels": [16, VISION]},
                       encoder_config=dict(hidden_size=VISION, intermediate_size=64, num_hidden_layers=2,
                                           num_attention_heads=2, num_key_value_heads=1))),
               ocr2_image, (1, 0)),
        # Persimmon has as many heads of keys as of queries, and no setting for them.
        Family("fuyu", dict(text_config={**TEXT, "model_type": "persimmon", "num_key_value_heads": 4},
                            hidden_size=HIDDEN, patch_size=4, vocab_size=TEXT["vocab_size"],
                            num_hidden_layers=4, num_attention_heads=4),
               fuyu_image, ((4, 6), (5, 4))),
        Family("video_llama_3", dict(text_config=QWEN2, video_token_id=VIDEO, vision_config=dict(
                   hidden_size=VISION, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, patch_size=4)),
               llama3_image, grids, video=llama3_video),
    ]  # fmt: skip


FAMILIES: dict[str, Family] = {family.name: family for family in _families()}
