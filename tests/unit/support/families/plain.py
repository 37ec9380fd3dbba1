# SPDX-License-Identifier: Apache-2.0
"""Families of the common contract whose decoders use position ids with one axis."""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import pad_sequence

from zoo import (
    BREAK,
    END,
    FAKE,
    GLOBAL,
    HEAD_DIM,
    HIDDEN,
    IMAGE,
    PINPOINTS,
    START,
    TEXT,
    VIDEO,
    VISION,
    Family,
    InputImage,
    anyres_collate,
    anyres_image,
    gemma_image,
    llava_image,
    noise,
    tower,
)

CLIP = tower("clip_vision_model", 24, projection_dim=VISION)
SIGLIP = tower("siglip_vision_model", 24, vision_use_head=False)
LLAMA, QWEN2, QWEN3, MISTRAL = ({**TEXT, "model_type": kind} for kind in ("llama", "qwen2", "qwen3", "mistral"))
QWEN3 |= {"head_dim": HEAD_DIM}
MISTRAL |= {"head_dim": HEAD_DIM, "sliding_window": None}
# The window is shorter than the prompt, and both kinds of layer occur before and after a cut at layer 2.
COHERE2 = {
    **TEXT,
    "model_type": "cohere2",
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def run(tokens: int, size: int, count: int = 1, wrapped: bool = False):
    """Return a function that builds an image of `count` square tiles of `size` pixels, `tokens` tokens each, in one
    run."""

    def image(tiles: int, g: torch.Generator, _: int) -> InputImage:
        ids = [IMAGE] * (tokens * tiles * count)
        return InputImage([START, *ids, END] if wrapped else ids, {"pixel_values": noise(tiles, 3, size, size, g=g)})

    return image


# LLaVA-NeXT-Video averages 16 patches per frame to 4. Video-LLaVA keeps the class token of each frame.


def next_video(g: torch.Generator, frames: int | None) -> InputImage:
    frames = frames or 5
    return InputImage([VIDEO] * (frames * 4), {"pixel_values_videos": noise(1, frames, 3, 16, 16, g=g)})


def video_llava_image(size: int, g: torch.Generator, _: int) -> InputImage:
    return InputImage([IMAGE] * 16, {"pixel_values_images": noise(1, 3, size, size, g=g)})


def video_llava_video(g: torch.Generator, frames: int | None) -> InputImage:
    frames = frames or 8
    return InputImage([VIDEO] * (frames * 17), {"pixel_values_videos": noise(1, frames, 3, 16, 16, g=g)})


# Pixtral's tower takes images of any shape. Row-end and image-end ids are interleaved with the placeholders.


def pixtral_image(size: tuple[int, int], g: torch.Generator, _: int) -> InputImage:
    return rows_of(size, g, 1)


def merged_pixtral_image(size: tuple[int, int], g: torch.Generator, _: int) -> InputImage:
    return rows_of(size, g, 2)


def rows_of(size: tuple[int, int], g: torch.Generator, merge: int) -> InputImage:
    h, w = (side // 4 // merge for side in size)
    pixels = {"pixel_values": noise(1, 3, *size, g=g), "image_sizes": torch.tensor([size])}
    ids = [*[IMAGE] * w, BREAK] * h
    return InputImage([*ids[:-1], END], pixels)


def unbroken_pixtral_image(size: tuple[int, int], g: torch.Generator, _: int) -> InputImage:
    image = rows_of(size, g, 2)
    return InputImage([START, *[IMAGE] * image.count, END], image.pixels)


def pixtral_collate(rows: list[list[InputImage]]) -> dict[str, torch.Tensor]:
    """Pad images on the right and below to the largest size of the batch."""
    pixels = [image.pixels for row in rows for image in row]
    sizes = torch.cat([p["image_sizes"] for p in pixels])
    h, w = sizes.amax(0).tolist()
    padded = torch.zeros(len(pixels), 3, h, w)
    for target, p in zip(padded, pixels, strict=True):
        target[:, : p["pixel_values"].shape[-2], : p["pixel_values"].shape[-1]] = p["pixel_values"][0]
    return {"pixel_values": padded, "image_sizes": sizes}


PIXTRAL = dict(sizes=((16, 24), (24, 24), (32, 16)), collate=pixtral_collate)


# PerceptionLM: the tiles of an image make one run of placeholders, and so do the frames of a video.


def perception_image(tiles: int, g: torch.Generator, _: int) -> InputImage:
    return InputImage([IMAGE] * (16 * tiles), {"pixel_values": noise(1, tiles, 3, 16, 16, g=g)})


def perception_video(g: torch.Generator, frames: int | None) -> InputImage:
    frames = frames or 3
    return InputImage([VIDEO] * (16 * frames), {"pixel_values_videos": noise(1, frames, 3, 16, 16, g=g)})


# Ovis2: indicator ids with separate features surround the tiles.


def ovis_image(tiles: int, g: torch.Generator, _: int) -> InputImage:
    tile = [IMAGE] * 16
    ids = [START, *tile, BREAK, *[token for _ in range(tiles - 1) for token in (*tile, FAKE)], END]
    return InputImage(ids, {"pixel_values": noise(tiles, 3, 16, 16, g=g)})


# Idefics2: a resampler with 16 queries per image of any shape.


def idefics2_image(size: tuple[int, int], g: torch.Generator, _: int) -> InputImage:
    h, w = size
    pixels, mask = torch.zeros(1, 3, 32, 32), torch.zeros(1, 32, 32, dtype=torch.long)
    pixels[..., :h, :w], mask[:, :h, :w] = noise(1, 3, h, w, g=g), 1
    return InputImage([FAKE, *[IMAGE] * 16, FAKE], {"pixel_values": pixels, "pixel_attention_mask": mask})


def idefics2_collate(rows: list[list[InputImage]]) -> dict[str, torch.Tensor]:
    """Pad rows with fewer images with zeros."""
    columns = {"pixel_values": torch.zeros(0, 3, 32, 32), "pixel_attention_mask": torch.zeros(0, 32, 32).long()}
    return {
        key: pad_sequence([torch.cat([empty, *(p.pixels[key] for p in row)]) for row in rows], batch_first=True)
        for key, empty in columns.items()
    }


GOT_TOWER = dict(
    hidden_size=VISION, output_channels=16, num_hidden_layers=2, num_attention_heads=2, image_size=128, patch_size=8,
    window_size=2, global_attn_indexes=[1], mlp_dim=64,
)  # fmt: skip
TIMM = dict(
    architecture="vit_pe_core_tiny_patch16_384", do_pooling=False, hidden_size=VISION,
    model_args=dict(img_size=[16, 16], patch_size=4, depth=2, embed_dim=VISION, num_heads=2),
)  # fmt: skip


def _families() -> list[Family]:
    shapes = ((16, 32), (32, 8), (8, 32), (32, 16))
    got = run(16, 128, wrapped=True)
    paligemma = dict(vision_config=SIGLIP, projection_dim=HIDDEN, hidden_size=HIDDEN, vocab_size=TEXT["vocab_size"])
    gemma_layers = ["sliding_attention", "full_attention"] * 2
    return [
        Family("vipllava", dict(text_config=LLAMA, vision_config=CLIP, vision_feature_layers=[-1, -2, 1]),
               llava_image, (24,)),
        Family("llava_pixtral", dict(text_config=MISTRAL, vision_config=tower("pixtral", 32), vision_feature_layer=-1,
                                     vision_feature_select_strategy="full"),
               pixtral_image, model_type="llava", **PIXTRAL),
        Family("mistral3", dict(text_config=MISTRAL, vision_config=tower("pixtral", 32)),
               merged_pixtral_image, **PIXTRAL),
        Family("lighton_ocr", dict(text_config=QWEN3, vision_config=tower("pixtral", 32)),
               unbroken_pixtral_image, **PIXTRAL),
        Family("llava_next_video", dict(text_config=LLAMA, vision_config={**CLIP, "image_size": 16},
                                        image_grid_pinpoints=PINPOINTS, video_token_index=VIDEO),
               anyres_image, shapes, video=next_video, collate=anyres_collate),
        Family("video_llava", dict(text_config=LLAMA, vision_config={**CLIP, "image_size": 16},
                                   video_token_index=VIDEO),
               video_llava_image, (16,), video=video_llava_video),
        Family("aya_vision", dict(text_config=COHERE2, vision_config=SIGLIP), run(9, 24), (2, 1, 3)),
        Family("cohere2_vision", dict(text_config=COHERE2, vision_config=SIGLIP, alignment_intermediate_size=64),
               run(9, 24), (2, 1, 3)),
        Family("got_ocr2", dict(text_config=QWEN2, vision_config=GOT_TOWER), got, (1,), eager=("vision_config",)),
        Family("pp_chart2table", dict(text_config=QWEN2, vision_config=GOT_TOWER), got, (1,), eager=("vision_config",)),
        Family("qianfan_ocr", dict(text_config=QWEN3, vision_config={**tower("qianfan_ocr_vision", 32),
                                                                     "layer_scale_init_value": 1.0}),
               run(16, 32, wrapped=True), (2, 1, 3)),
        Family("perception_lm", dict(text_config=LLAMA, vision_config=TIMM, video_token_id=VIDEO),
               perception_image, (2,), video=perception_video),
        Family("ovis2", dict(text_config=QWEN2, vision_config=dict(
                   hidden_size=VISION, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16,
                   patch_size=4, vocab_size=64), visual_indicator_token_ids=[START, END, BREAK, FAKE, GLOBAL],
                   vocab_size=TEXT["vocab_size"], hidden_size=HIDDEN),
               ovis_image, (2, 1, 3)),
        # The whole prompt uses bidirectional attention.
        Family("paligemma", dict(text_config={**TEXT, "model_type": "gemma", "head_dim": HEAD_DIM}, **paligemma),
               llava_image, (24,), types="token_type_ids", type_ids=(0, 0, 0)),
        Family("paligemma2", dict(text_config={**TEXT, "model_type": "gemma2", "head_dim": HEAD_DIM,
                                               "query_pre_attn_scalar": HEAD_DIM, "sliding_window": 16,
                                               "layer_types": gemma_layers}, **paligemma),
               llava_image, (24,), types="token_type_ids", type_ids=(0, 0, 0), model_type="paligemma",
               eager=("text_config",)),
        Family("shieldgemma2", dict(text_config={**TEXT, "head_dim": HEAD_DIM, "query_pre_attn_scalar": HEAD_DIM,
                                                 "sliding_window": 16, "layer_types": gemma_layers},
                                    vision_config={**SIGLIP, "image_size": 32}, mm_tokens_per_image=16,
                                    boi_token_id=START, eoi_token_id=END),
               gemma_image, (32,), types="token_type_ids"),
        Family("idefics2", dict(text_config=MISTRAL, vision_config=dict(
                   hidden_size=VISION, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=32,
                   patch_size=4),
                   perceiver_config=dict(hidden_size=HIDDEN, resampler_n_latents=16, resampler_depth=1,
                                         resampler_n_heads=2, resampler_head_dim=16, num_key_value_heads=1)),
               idefics2_image, ((32, 24), (16, 32)), decoder="model.text_model", collate=idefics2_collate),
        Family("deepseek_vl", dict(text_config=LLAMA, vision_config=SIGLIP), llava_image, (24,)),
        Family("janus", dict(text_config=LLAMA, vision_config=dict(
                   hidden_size=VISION, num_hidden_layers=2, num_attention_heads=2, image_size=24, patch_size=4,
                   projection_dim=HIDDEN, num_image_tokens=36),
                   vq_config=dict(embed_dim=8, num_embeddings=16, latent_channels=16, base_channels=32,
                                  channel_multiplier=[1], num_res_blocks=1, projection_dim=HIDDEN,
                                  image_token_embed_dim=HIDDEN)),
               llava_image, (24,)),
        Family("aria", dict(text_config={**TEXT, "model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2,
                                         "moe_num_shared_experts": 1},
                            vision_config=tower("idefics3_vision", 24), projector_patch_to_query_dict={36: 16}),
               run(16, 24), (1,)),
    ]  # fmt: skip


FAMILIES: dict[str, Family] = {family.name: family for family in _families()}
