# SPDX-License-Identifier: Apache-2.0
"""What is known of each model type: one table for the engine, `tokenprune families` and docs/families.md.

A model type in `SUPPORTED` has a tiny model in the test suite, on which cutting computes what masking computes. One in
`REFUSED` is turned away with the reason. Any other is tried with the common contract (`adapters/base.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Support:
    """sites: names of `Site`, in the order in which data meets them. note: what a user should know. tested: versions of
    transformers."""

    sites: tuple[str, ...] = ("PRE_LLM", "IN_LLM", "DECODE")
    note: str = ""
    tested: str = "5.19, 5.23"


_INSIDE = ("PRE_LLM", "IN_LLM", "DECODE")
_FIXED = ("PRE_ENCODER", *_INSIDE)
_MERGING = ("PRE_ENCODER", "IN_ENCODER", *_INSIDE)
_ALL = ("PRE_ENCODER", "IN_ENCODER", "PRE_LLM", "ATTENTION", "IN_LLM", "DECODE")

# The families on which every method is tested.
_EVERY_METHOD = {
    "llava": Support(_MERGING),
    "llava_next": Support(_MERGING),
    "llava_onevision": Support(_ALL),
    "qwen2_vl": Support(_ALL),
    "qwen2_5_vl": Support(_ALL),
    "qwen3_vl": Support(_ALL, "deepstack features are cut and merged with the tokens"),
    "internvl": Support(_FIXED),
    "smolvlm": Support(_FIXED, "each tile counts as an image"),
    "idefics3": Support(_FIXED, "each tile counts as an image"),
    "gemma3": Support(_FIXED, "kept tokens of a picture go on seeing each other both ways"),
}

# Families of the common contract.
_FRAMES_AS_IMAGES = Support(note="frames of a video carry the id of images; a batch holds pictures or videos, not both")
_PLAIN: dict[str, Support] = {
    "aria": Support(note="queries of a resampler: no grid"),
    "aya_vision": Support(),
    "cohere2_vision": Support(),
    "deepseek_ocr2": Support(note="crops, whole picture and separator make one run; queries: no grid"),
    "deepseek_vl": Support(),
    "deepseek_vl_hybrid": Support(),
    "fast_vlm": Support(),
    "fuyu": Support(note="no vision tower; ids at the ends of rows are text and stay"),
    "glm46v": _FRAMES_AS_IMAGES,
    "glm4v": _FRAMES_AS_IMAGES,
    "glm4v_moe": _FRAMES_AS_IMAGES,
    "glm_ocr": _FRAMES_AS_IMAGES,
    "glmga": _FRAMES_AS_IMAGES,
    "got_ocr2": Support(),
    "hunyuan_vl": Support(note="features for begin, end and ends of rows may go like any other"),
    "idefics2": Support(note="queries of a resampler: no grid"),
    "janus": Support(note="reading pictures, not drawing them"),
    "lighton_ocr": Support(),
    "llava_next_video": Support(),
    "mistral3": Support(note="ids at the ends of rows are text and stay"),
    "ovis2": Support(note="each tile counts as an image; indicator ids are text and stay"),
    "paddleocr_vl": Support(),
    "paligemma": Support(note="kept tokens of the prefix go on seeing each other both ways"),
    "perception_lm": Support(),
    "pp_chart2table": Support(),
    "qianfan_ocr": Support(),
    "qwen2_5_omni_thinker": Support(note="audio stays; for the whole model, patch its `thinker`"),
    "qwen3_vl_moe": Support(note="deepstack features are cut and merged with the tokens"),
    "shieldgemma2": Support(note="kept tokens of a picture go on seeing each other both ways"),
    "video_llama_3": Support(note="patches of a video that do not move are gone already: no grid"),
    "video_llava": Support(),
    "vipllava": Support(),
}

# Families that hand their decoder more than the common contract.
_SPECIAL: dict[str, Support] = {}

SUPPORTED: dict[str, Support] = {**_EVERY_METHOD, **_PLAIN, **_SPECIAL}

# Model types that cannot work, and model types that no adapter covers yet: cutting would be silently wrong.
_REASONS = {
    "its pictures enter through cross-attention, not through the sequence": "mllama idefics",
    "its pictures are not in the sequence of a decoder": "florence2 t5gemma2 git",
    "its prefill does not pass through the outer forward": "blip-2 instructblip instructblipvideo kosmos-2",
    "its pictures enter inside its text decoder, at places told by a mask": "kosmos-2.5",
    "its decoder reads pictures by cross-attention, and no visual token is in its sequence": (
        "pix2struct pp_formulanet udop vision-encoder-decoder blip"
    ),
    "it is a language model: it takes no pictures": "mistral4",
    "it writes blocks of tokens by diffusion, without a prefill to cut": "diffusion_gemma",
    "its layers convolve over neighbours and count distances by slots, so that a cut would move all tokens behind it": (
        "inkling_mm_model"
    ),
    "it has no picture features to choose from at the decoder's entry": "chameleon emu3",
    "it hands its decoder more than the common contract, and no adapter for that is written yet": (
        "gemma3n gemma4 gemma4_unified ernie4_5_vl_moe granite4_vision kimi_k25 llama4 minimax_m3_vl muse_glimmer "
        "qwen3_omni_moe_thinker cosmos3_omni cosmos3_edge cohere_compass exaone4_5 "
        "hyperclovax_vision_v2 nemotron_h_omni qwen4_exp glm5_next"
    ),
}
REFUSED = {family: reason for reason, families in _REASONS.items() for family in families.split()}

# Families that hand the decoder one feature for each patch of a tower, at most newlines between; or one for each unit
# of 2 x 2 patches that stand together in a packed tower (packed_encoder.py).
PATCH_TOKENS = {"llava", "llava_next", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"}
UNMERGEABLE = {
    "gemma3": "it averages 4 x 4 patches (or the like) of its grid to a token, behind the tower",
} | {
    family: reason
    for reason, families in {
        "it joins neighbouring patches of its grid to a token (pixel shuffle), so each token holds several patches": (
            "internvl idefics3 smolvlm"
        ),
    }.items()
    for family in families.split()
}
PATCH_LAYOUTS = {
    family: layout
    for layout, families in {
        "tiles": "llava internvl gemma3 idefics3 smolvlm",
        "packed": "llava_next llava_onevision",
        "runs": "qwen2_vl qwen2_5_vl qwen3_vl",
    }.items()
    for family in families.split()
}
