# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints of families that only the tests of lmms-eval use."""

from __future__ import annotations

from typing import Any

from transformers.models.idefics2.image_processing_idefics2 import Idefics2ImageProcessor
from transformers.models.idefics2.processing_idefics2 import Idefics2Processor
from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

from checkpoints import (
    HIDDEN,
    IDS,
    QWEN_IMAGE,
    QWEN_VIDEO,
    Checkpoint,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    qwen,
    qwen_config,
    text,
    tokenizer,
    vision,
)


def qwen3_5() -> dict[str, Any]:
    tower = dict(
        depth=3, num_heads=2, patch_size=16, hidden_size=HIDDEN, intermediate_size=96, out_hidden_size=HIDDEN,
        num_position_embeddings=64,
    )  # fmt: skip
    config = qwen_config("qwen3_5_text", [6, 5, 5], tower, layers=4, partial_rotary_factor=1.0)
    config["text_config"] |= dict(
        layer_types=["linear_attention", "full_attention"] * 2, linear_conv_kernel_dim=3, linear_key_head_dim=32,
        linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
    )  # fmt: skip
    return config


def idefics2() -> dict[str, Any]:
    perceiver = dict(
        hidden_size=HIDDEN, resampler_n_latents=16, resampler_depth=1, resampler_n_heads=2, resampler_head_dim=32,
        num_key_value_heads=1,
    )  # fmt: skip
    return dict(
        text_config=text("mistral"), image_token_id=IDS["<image>"], pad_token_id=0, tie_word_embeddings=False,
        vision_config=vision(image_size=112, patch_size=14), perceiver_config=perceiver,
    )  # fmt: skip


def idefics2_processor() -> Any:
    tokens = tokenizer(
        image_token="<image>", image_boundary_token="<fake_token_around_image>",
        end_of_utterance_token="<end_of_utterance>",
    )  # fmt: skip
    images = Idefics2ImageProcessor(size={"shortest_edge": 56, "longest_edge": 112}, do_image_splitting=False)
    return Idefics2Processor(images, tokens, image_seq_len=16)


def lfm2_vl() -> dict[str, Any]:
    layers = dict(num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False)
    tower = vision(model_type="siglip2_vision_model", patch_size=14, num_patches=64, vision_use_head=False)
    return dict(
        text_config=text("lfm2", **layers), vision_config=tower, image_token_id=IDS["<image>"],
        projector_hidden_size=64, tie_word_embeddings=False,
    )  # fmt: skip


def lfm2_vl_processor() -> Any:
    images = Lfm2VlImageProcessor(
        encoder_patch_size=14, tile_size=56, min_image_tokens=4, max_image_tokens=16, do_image_splitting=False
    )
    tokens = tokenizer(
        image_token="<image>", image_start_token="<img>", image_end_token="</img>", image_thumbnail="<global-img>"
    )
    return Lfm2VlProcessor(images, tokens)


MORE = {
    checkpoint.name: checkpoint
    for checkpoint in [
        Checkpoint(
            "qwen3_5", qwen3_5, lambda: qwen(Qwen3VLProcessor, Qwen3VLVideoProcessor, 16), QWEN_IMAGE, video=QWEN_VIDEO
        ),
        Checkpoint("idefics2", idefics2, idefics2_processor, "<image>"),
        Checkpoint("lfm2_vl", lfm2_vl, lfm2_vl_processor, "<image>"),
    ]
}
