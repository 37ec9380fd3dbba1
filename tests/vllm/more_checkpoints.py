# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints of the families that test_more_families.py tests in one engine each."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.models.aria.image_processing_aria import AriaImageProcessor
from transformers.models.aria.processing_aria import AriaProcessor
from transformers.models.glm4v.image_processing_glm4v import Glm4vImageProcessor
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
from transformers.models.llava_next.image_processing_llava_next import LlavaNextImageProcessor
from transformers.models.llava_next_video.processing_llava_next_video import LlavaNextVideoProcessor
from transformers.models.llava_next_video.video_processing_llava_next_video import LlavaNextVideoVideoProcessor
from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.models.siglip.image_processing_siglip import SiglipImageProcessor

from checkpoints import (
    CLIP,
    HIDDEN,
    IDS,
    QWEN3_TOWER,
    QWEN_IMAGE,
    QWEN_VIDEO,
    SIGLIP,
    VOCABULARY,
    Checkpoint,
    qwen,
    qwen_config,
    text,
    tokenizer,
    vision,
)

# Tokens after the vocabulary of the other checkpoints, whose weights must not change.
OWN = (
    "<|begin_of_image|> <|end_of_image|> <|image|> <|begin_of_video|> <|end_of_video|> <|video|> <|image_start|> "
    "<|image_end|> <|img_thumbnail|>"
).split()
OWN += [f"<|img_row_{row}_col_{column}|>" for row in range(1, 4) for column in range(1, 4)]
OWN_IDS = {name: VOCABULARY + index for index, name in enumerate(OWN)}
WIDER = VOCABULARY + len(OWN)

MOE = dict(moe_intermediate_size=96, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)


def wider(**extra: Any) -> PreTrainedTokenizerFast:
    return tokenizer(OWN, **extra)


def glm4v() -> Any:
    common = dict(patch_size=14, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    tokens = wider(image_token="<|image|>", video_token="<|video|>")
    image = Glm4vImageProcessor(size={"shortest_edge": 28**2, "longest_edge": 256**2}, **common)
    clips = Glm4vVideoProcessor(size={"shortest_edge": 28**2, "longest_edge": 32 * 256**2}, **common)
    return Glm4vProcessor(image, tokens, clips, chat_template="{{ messages }}")


def glm4v_config(**extra: Any) -> dict[str, Any]:
    rope = dict(rope_type="default", rope_theta=10_000.0, mrope_section=[8, 4, 4], partial_rotary_factor=1.0)
    return dict(
        text_config={
            **text("glm4v_text"), "vocab_size": WIDER, "rope_parameters": rope, "attention_bias": True, **extra,
        },
        vision_config=dict(
            depth=2, hidden_size=HIDDEN, num_heads=2, image_size=112, patch_size=14, out_hidden_size=HIDDEN,
            intermediate_size=96,
        ),
        tie_word_embeddings=False, image_token_id=OWN_IDS["<|image|>"], video_token_id=OWN_IDS["<|video|>"],
        image_start_token_id=OWN_IDS["<|begin_of_image|>"], image_end_token_id=OWN_IDS["<|end_of_image|>"],
        video_start_token_id=OWN_IDS["<|begin_of_video|>"], video_end_token_id=OWN_IDS["<|end_of_video|>"],
    )  # fmt: skip


def aria() -> Any:
    image = AriaImageProcessor(max_image_size=980, min_image_size=336)
    return AriaProcessor(
        image, tokenizer(image_token="<image>"), size_conversion={490: 16, 980: 16}, chat_template="{{ messages }}"
    )


def next_video() -> Any:
    size = dict(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    return LlavaNextVideoProcessor(
        LlavaNextVideoVideoProcessor(**size), LlavaNextImageProcessor(image_grid_pinpoints=[[56, 56]], **size),
        tokenizer(image_token="<image>", video_token="<video>"), patch_size=7,
        vision_feature_select_strategy="default", num_additional_image_tokens=1, chat_template="{{ messages }}",
    )  # fmt: skip


def paligemma() -> Any:
    image = SiglipImageProcessor(size={"height": 56, "width": 56})
    image.image_seq_length = 16
    tokens = tokenizer(image_token="<image>")
    tokens.add_tokens(["\n"])  # ends each prompt
    return PaliGemmaProcessor(image, tokens, chat_template="{{ messages }}")


QWEN35 = dict(
    layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"], num_hidden_layers=4,
    linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=128, linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
)  # fmt: skip


def qwen35_config() -> dict[str, Any]:
    tower = {key: value for key, value in QWEN3_TOWER.items() if key != "deepstack_visual_indexes"}
    config = qwen_config("qwen3_5_text", [6, 5, 5], tower, mrope_interleaved=True, partial_rotary_factor=1.0)
    config["text_config"] |= QWEN35
    return config


def qwen3_moe_config() -> dict[str, Any]:
    config = qwen_config("qwen3_vl_moe_text", [6, 5, 5], QWEN3_TOWER, mrope_interleaved=True)
    config["text_config"] |= MOE
    return config


def qwen35_moe_config() -> dict[str, Any]:
    config = qwen35_config()
    config["text_config"] |= MOE | dict(model_type="qwen3_5_moe_text", shared_expert_intermediate_size=96)
    return config


def glm4v_moe_config() -> dict[str, Any]:
    more = dict(model_type="glm4v_moe_text", n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1)
    return glm4v_config(**MOE, **more, use_qk_norm=False)  # vLLM reads use_qk_norm from the config


def qwen3() -> Any:
    return qwen(Qwen3VLProcessor, Qwen3VLVideoProcessor, 16)


QWEN3_SIZES = ((160, 224), (224, 160), (192, 192))
GLM_IMAGE, GLM_VIDEO = "<|begin_of_image|><|image|><|end_of_image|>", "<|begin_of_video|><|video|><|end_of_video|>"

MORE: dict[str, Checkpoint] = {
    checkpoint.name: checkpoint
    for checkpoint in [
        Checkpoint("qwen3_vl_moe", qwen3_moe_config, qwen3, QWEN_IMAGE, video=QWEN_VIDEO, mrope=True,
                   sizes=QWEN3_SIZES, transposed=r"experts\.(gate_up|down)_proj"),
        Checkpoint("qwen3_5", qwen35_config, qwen3, QWEN_IMAGE, video=QWEN_VIDEO, mrope=True, sizes=QWEN3_SIZES,
                   dtype="bfloat16"),  # the dtype of linear attention on a CPU
        Checkpoint("glm4v", glm4v_config, glm4v, GLM_IMAGE, video=GLM_VIDEO, mrope=True, mixes=False,
                   sizes=((140, 196), (196, 140), (168, 168))),
        Checkpoint("qwen3_5_moe", qwen35_moe_config, qwen3, QWEN_IMAGE, video=QWEN_VIDEO, mrope=True,
                   sizes=QWEN3_SIZES, dtype="bfloat16"),
        Checkpoint("glm4v_moe", glm4v_moe_config, glm4v, GLM_IMAGE, video=GLM_VIDEO, mrope=True, mixes=False,
                   sizes=((140, 196), (196, 140), (168, 168))),
        Checkpoint(
            "aria",
            lambda: dict(text_config=text("aria_text", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
                         vision_config=vision(model_type="idefics3_vision", image_size=980, patch_size=70),
                         projector_patch_to_query_dict={49: 16, 196: 16}, image_token_index=IDS["<image>"],
                         tie_word_embeddings=False),
            aria, "<image>", sizes=((84, 84), (70, 70)),  # square, because vLLM's tower attends to padding
        ),
        Checkpoint(
            "llava_next_video",
            lambda: dict(text_config=text("llama"), image_token_index=IDS["<image>"],
                         vision_config=CLIP | {"image_size": 56, "patch_size": 7},  # see its pooler
                         video_token_index=IDS["<video>"], image_grid_pinpoints=[[56, 56]], tie_word_embeddings=False),
            next_video, "", video="<video>", sizes=((56, 56),), max_images=0,
        ),
        Checkpoint(
            "paligemma",
            lambda: dict(text_config=text("gemma", tie_word_embeddings=True),
                         vision_config=SIGLIP | {"projection_dim": HIDDEN},
                         projection_dim=HIDDEN, image_token_index=IDS["<image>"],
                         tie_word_embeddings=True),
            paligemma, "", max_images=1, before="<image>",
        ),
    ]
}  # fmt: skip
