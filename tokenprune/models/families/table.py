# SPDX-License-Identifier: Apache-2.0
"""The table of families: one row per model type, used by both engines, cost models, commands and pages.

Rows with `since` have a tiny model in the test suite, where dropping tokens equals masking tokens. Other model types of
transformers use the common contract, unless `refused.py` lists them. `row.py` describes the fields.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from tokenprune.models.families.row import LAYER_TOKENS, Family, Vllm


def _compute_shuffle_side(config: Any) -> int:
    return round(1 / config.downsample_ratio)


def _get_downsample_factor(config: Any) -> int:
    return config.downsample_factor


def _get_scale_factor(config: Any) -> int:
    return config.scale_factor


def _compute_pool_side(config: Any) -> int:
    vision = config.vision_config
    return vision.image_size // vision.patch_size // math.isqrt(config.mm_tokens_per_image)


def _get_kernel_side(config: Any) -> int:
    return config.vision_config.merge_kernel_size[0]


_FRAMES = "video frames use the image placeholder id; a batch contains images or videos, not both"
_DEEPSTACK = "deepstack features are dropped and merged with the tokens"
_BOTH_WAYS = "kept tokens of an image keep bidirectional attention"
_STATE = "stateful layers see only the kept tokens; scores come from an attention layer"
_SHARED = "the last layers share keys with earlier layers; the last cut is before the shared layers"
_VOCABULARY = "images are vocabulary ids, so similar tokens are equal"

# Tokens that share one budget in vLLM.
_WITH_TILES = "an image with its tiles"
_OR_VIDEO = "an image; a video"

# Common fields of related families.
_llava = partial(Family, merges=True)
_tiles = partial(_llava, patches="tiles", resizing=None)
_idefics = partial(
    _tiles,
    note="tiles of an image share its budget; with `inputs_embeds`, each tile counts as an image",
    square="runs",
    features_per_image=False,
    unit_side=_get_scale_factor,
    decoder_names=("text_model",),
)
_packs = partial(Family, tower_rows="all images", videos="frames")  # towers like that in Qwen-VL
_qwen = partial(_packs, patches="runs", merges=True)
_retrieves = partial(Family, note="rows of dropped tokens are zeros; see retrieval.md", vectors=True)
_mrope = partial(Vllm, budget=_OR_VIDEO, mrope=True)

_stateful = partial(Family, note=_STATE, stateful=True, static_cache=False)
_qwen3_5 = partial(_qwen, note=_STATE, since="5.13", stateful=True, static_cache=False)
_queries = partial(
    Family,
    note="with OPT or Vicuna, not with T5; Q-Former queries without a grid",
    resizing=None,
    decoder_names=("language_model.model",),
)
_shares_keys = partial(
    Family,
    resizing=None,
    static_cache=False,
    entry_tokens={"per_layer_inputs": 1},
    layer_tokens={**LAYER_TOKENS, 1: 1},  # per_layer_input
)
_with_audio = partial(Vllm, budget="an image; a frame of a video", per_run=True, audio=True)

# The test suite runs every method on these families.
_EVERY_METHOD = (
    _llava(
        "llava",
        square="always",
        resizing="target",
        patches="tiles",
        vllm=Vllm(
            "LlavaForConditionalGeneration", "LLaVA-1.5, and Pixtral in Hugging Face's format", in_llm=True, nested=True
        ),
    ),
    _llava(
        "llava_next",
        patches="packed",
        vllm=Vllm(
            "LlavaNextForConditionalGeneration", "LLaVA-NeXT, Granite Vision 3", _WITH_TILES, in_llm=True, nested=True
        ),
    ),
    _llava(
        "llava_onevision",
        videos="frames",
        tower_rows="one frame",
        after_video=1,
        patches="packed",
        vllm=Vllm(
            "LlavaOnevisionForConditionalGeneration",
            "LLaVA-OneVision",
            f"{_WITH_TILES}; a video",
            in_llm=True,
            nested=True,
        ),
    ),
    _qwen("qwen2_vl", vllm=_mrope("Qwen2VLForConditionalGeneration", "Qwen2-VL", in_llm=True)),
    _qwen("qwen2_5_vl", vllm=_mrope("Qwen2_5_VLForConditionalGeneration", "Qwen2.5-VL", in_llm=True)),
    _qwen("qwen3_vl", _DEEPSTACK, vllm=_mrope("Qwen3VLForConditionalGeneration", "Qwen3-VL", in_llm=True)),
    _tiles(
        "internvl",
        square="tile",
        unit_side=_compute_shuffle_side,
        vllm=Vllm(
            "InternVLForConditionalGeneration",
            "InternVL in Hugging Face's format",
            f"{_WITH_TILES}; a frame of a video",
            per_run=True,
            in_llm=True,
        ),
    ),
    _idefics("smolvlm", vllm=Vllm("SmolVLMForConditionalGeneration", "SmolVLM", _WITH_TILES, in_llm=True)),
    _idefics("idefics3", vllm=Vllm("Idefics3ForConditionalGeneration", "Idefics3", _WITH_TILES, in_llm=True)),
    _tiles(
        "gemma3",
        _BOTH_WAYS,
        square="always",
        unit_side=_compute_pool_side,
        vllm=Vllm("Gemma3ForConditionalGeneration", "Gemma 3", "an image or crop", per_run=True, nested=True),
    ),
)

# Families of the common contract.
_PLAIN = (
    Family("aria", "resampler queries without a grid", vllm=Vllm("AriaForConditionalGeneration", "Aria")),
    Family("aya_vision", unit_side=_get_downsample_factor, merges=True),
    Family("cohere2_vision", unit_side=_get_downsample_factor, merges=True),
    Family("deepseek_ocr2", "crops, full image and separator form one run; queries without a grid", since="5.10"),
    Family("deepseek_vl", square="always"),
    Family("deepseek_vl_hybrid", square="always"),
    Family("fast_vlm", square="always"),
    Family(
        "fuyu",
        "no vision tower; row separators are text and are kept",
        step_within_image=2,
        norm_name="final_layernorm",
    ),
    _packs("glm46v", _FRAMES),
    _packs("glm4v", _FRAMES, patches="runs", vllm=_mrope("Glm4vForConditionalGeneration", "GLM-4.1V")),
    _packs("glm4v_moe", _FRAMES, patches="runs", vllm=_mrope("Glm4vMoeForConditionalGeneration", "GLM-4.5V")),
    _packs("glm_ocr", _FRAMES, since="5.1"),
    _packs("glmga", _FRAMES, since="5.10"),
    Family("got_ocr2", square="tile"),
    Family("hunyuan_vl", "begin, end and row separator features can be dropped too", since="5.13"),
    Family(
        "idefics2",
        "resampler queries without a grid",
        features_per_image=False,
        resizing=None,
        decoder_names=("text_model",),
    ),
    Family("janus", "image understanding, not image generation", square="always"),
    Family("lighton_ocr"),
    Family(
        "llava_next_video",
        videos="frames",
        tower_rows="one frame",
        patches="packed",
        vllm=Vllm(
            "LlavaNextVideoForConditionalGeneration",
            "LLaVA-NeXT-Video",
            "a video; vLLM supports no images for this model",
            nested=True,
        ),
    ),
    Family(
        "mistral3",
        "row separators are text and are kept",
        patches="sized",
        vllm=Vllm("Mistral3ForConditionalGeneration", "Mistral 3", in_llm=True),
    ),
    Family("molmo2", f"full view and crops form one image without a grid; {_FRAMES}", since="5.24", videos="whole"),
    Family("ovis2", "each tile counts as an image; indicator ids are text and are kept", square="always"),
    Family("paddleocr_vl", videos="whole"),
    Family(
        "paligemma",
        "kept tokens of the prefix keep bidirectional attention",
        square="always",
        patches="tiles",
        merges=True,
        vllm=Vllm("PaliGemmaForConditionalGeneration", "PaliGemma", nested=True),
    ),
    _retrieves("colpali", square="always", patches="tiles", merges=True),
    _retrieves("colqwen2", patches="runs", merges=True, tower_rows="all images"),
    Family("perception_lm", videos="frames"),
    Family("pp_chart2table", since="5.4", square="tile"),
    Family("qianfan_ocr", since="5.6", square="tile", unit_side=_compute_shuffle_side, merges=True),
    _packs(
        "qwen2_5_omni_thinker",
        "audio tokens are kept; patch the `thinker` of the full model",
        since="5.6",
        decoder_names=("language_model", "model"),
    ),
    _qwen("qwen3_vl_moe", _DEEPSTACK, vllm=_mrope("Qwen3VLMoeForConditionalGeneration", "Qwen3-VL with experts")),
    Family("shieldgemma2", _BOTH_WAYS, square="always"),
    # Each frame counts as an image. Its number of tokens depends on the motion.
    Family(
        "video_llama_3",
        "each video frame counts as an image; the model drops static patches itself, so a grid is missing",
        videos="whole",
    ),
    Family("video_llava", videos="frames", square="always"),
    Family("vipllava", square="always"),
)

# Families that pass more arguments to the decoder than the common contract.
_SPECIAL = (
    _qwen3_5("qwen3_5", vllm=_mrope("Qwen3_5ForConditionalGeneration", "Qwen3.5")),
    _qwen3_5("qwen3_5_moe", vllm=_mrope("Qwen3_5MoeForConditionalGeneration", "Qwen3.5 with experts")),
    _shares_keys(
        "gemma4",
        _SHARED,
        since="5.5",
        videos="whole",
        vllm=_with_audio("Gemma4ForConditionalGeneration", "Gemma 4"),
    ),
    _shares_keys(
        "gemma3n",
        _SHARED,
        layer_tokens={**LAYER_TOKENS, 1: -2, 2: 1},  # position_embeddings, per_layer_input
        vllm=_with_audio("Gemma3nForConditionalGeneration", "Gemma 3n"),
    ),
    _shares_keys("gemma4_unified", since="5.10", videos="whole"),
    Family(
        "llama4",
        "each tile counts as an image; windows and chunks use positions of the full prompt; fails in unpatched "
        "transformers 5.24",
        square="always",
        features_per_image=False,
        resizing=None,
        static_cache=False,
        complex_rotation=True,
        decoder_names=("language_model.model",),
        vllm=Vllm("Llama4ForConditionalGeneration", "Llama 4", "a tile, and the whole view", per_run=True),
    ),
    _stateful(
        "lfm2_vl",
        since="5.13",
        unit_side=_get_downsample_factor,
        tower_rows="one image",
        norm_name="embedding_norm",
        vllm=Vllm("Lfm2VlForConditionalGeneration", "LFM2-VL", "a tile, and the whole view", per_run=True, nested=True),
    ),
    _stateful("lfm3_vl", since="5.23", videos="frames", norm_name="embedding_norm"),
    Family(
        "ernie4_5_vl_moe",
        videos="frames",
        entry_tokens={"moe_mm_token_type_ids": 1},
        layer_tokens={**LAYER_TOKENS, "moe_mm_token_type_ids": 1},
    ),
    Family(
        "granite4_vision",
        "features of several depths are dropped and merged with the tokens",
        since="5.8",
        features_per_image=False,
    ),
    Family("kimi_k25", since="5.13", videos="whole", static_cache=False),
    _packs("qwen3_omni_moe_thinker", _DEEPSTACK, since="5.6", decoder_names=("language_model", "model")),
    _packs("exaone4_5", since="5.8"),
    Family("apertus1p5", _VOCABULARY, since="5.24"),
    Family("emu3", _VOCABULARY, decoder_names=("text_model",)),
    Family("chameleon", _VOCABULARY, square="always", resizing=None, decoder_names=("model",)),
    Family("muse_glimmer", since="5.15", videos="frames"),
    Family("muse_spark", since="5.20", videos="frames"),
    Family("step3p7", "crops and full view share a run without a grid", since="5.16"),
    _stateful("minicpm_ocr", since="5.21"),
    _stateful("minicpmv4_6", since="5.13", videos="whole"),
    _stateful("minicpmv4_7", since="5.18", videos="whole"),
    _stateful(
        "nemotron_h_omni",
        since="5.18",
        videos="whole",
        decoder_names=("language_model.model",),
        norm_name="norm_f",
    ),
    _packs("cosmos3_omni", _DEEPSTACK, since="5.11"),
    Family("cosmos3_edge", since="5.15", videos="frames"),
    _packs("cohere_compass", _DEEPSTACK, since="5.16", videos="whole"),
    _packs("hyperclovax_vision_v2", since="5.18"),
    _queries("blip-2"),
    _queries("instructblip"),
    _queries("instructblipvideo", videos="whole"),
)

# Families that only vLLM supports.
_OF_VLLM = (
    Family(
        "internvl_chat",
        since=None,
        square="tile",
        patches="tiles",
        unit_side=_compute_shuffle_side,
        merges=True,
        vllm=Vllm(
            "InternVLChatModel", "InternVL in the original format", f"{_WITH_TILES}; a frame of a video", per_run=True
        ),
    ),
    Family(
        "kimi_vl",
        since=None,
        patches="sized",
        unit_side=_get_kernel_side,
        vllm=Vllm("KimiVLForConditionalGeneration", "Kimi-VL"),
    ),
)

# Decoder types that use positions only in RoPE, in every layer.
ROPE_DECODERS = ("aria_text", "gemma", "llama", "mistral", "qwen2", "qwen3")

FAMILIES: dict[str, Family] = {row.name: row for row in (*_EVERY_METHOD, *_PLAIN, *_SPECIAL, *_OF_VLLM)}
