# SPDX-License-Identifier: Apache-2.0
"""Unsupported models, with the reason."""

from __future__ import annotations

# Model types whose decoders select keys themselves. Prompt tokens cannot be dropped, but methods on pixels can shorten
# the prompt.
_REASONS_OF_CUTS = {
    "some layers select blocks of keys by cache slot, and dropped tokens would change the blocks; methods on pixels "
    "are supported": "minimax_m3_vl qwen4_exp glm5_next",
    "an indexer selects keys with a separate key cache, which tokenprune does not reduce; methods on pixels are "
    "supported": "mistral_large4 dots3_note hy_v4_vl",
}

# Model types of transformers where dropping tokens would have no effect or give wrong results.
_REASONS = _REASONS_OF_CUTS | {
    "images enter through cross-attention, not as tokens of the prompt, so other layers would not get faster": (
        "mllama idefics evolla blip"
    ),
    "the decoder reads images by cross-attention": (
        "florence2 t5gemma2 udop pix2struct pp_formulanet vision-encoder-decoder"
    ),
    "the decoder encodes images inside its own forward and exposes no image features": "phi4_multimodal",
    "images are put before the text inside the layers, without placeholders in the prompt": "git",
    "the decoder inserts images and counts positions itself, and generate() calls it without the model's forward": (
        "kosmos-2 kosmos-2.5"
    ),
    "attention uses distances between slots, and every layer convolves neighboring tokens": (
        "inkling_mm_model inkling2 inkling2_loop"
    ),
    "the cache keeps the keys of the full prompt length plus a window, and would count the first generated tokens as "
    "prompt": "unlimited_ocr",
    "it generates text blocks by diffusion and does not cache the prompt": "diffusion_gemma",
    "it is not tested yet: a router selects the number of tokens per tile, and the decoder adds features of several "
    "depths": "granite_docling",
    "it is a robot policy whose actions read the keys of the full prefix": "pi0",
    "the encoder counts windows by slot, so dropped tokens would change the windows. Merge its vectors instead "
    "(docs/guides/retrieval.md)": "colmodernvbert",
    "it supports only text in transformers": "mistral4",
    "it is the vision tower of other model types (llava, mistral3)": "pixtral",
}

# Architectures of vLLM that break the placeholder contract: one placeholder per visual token, a number of tokens that
# is known before the encoder runs, and one encoder output row per token.
_REASONS_IN_VLLM = {
    "the encoder outputs tile separators that methods cannot distinguish from visual tokens": (
        "Ovis Ovis2_5 Ovis2_6ForCausalLM Ovis2_6_MoeForCausalLM"
    ),
    "prompts number the images, and vLLM rewrites the text of a cached image, which undoes the shorter prompt": (
        "MiniCPMV MiniCPMO MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration"
    ),
    "positions interleave audio and video, and audio rows have no positions": (
        "Qwen2_5OmniModel Qwen2_5OmniForConditionalGeneration Qwen3OmniMoeForConditionalGeneration"
    ),
    "the language model adds features of several depths between its layers, which is not tested": (
        "Granite4VisionForConditionalGeneration"
    ),
    "the checkpoint is in Mistral's format. Use the Hugging Face format (LlavaForConditionalGeneration or "
    "Mistral3ForConditionalGeneration)": "PixtralForConditionalGeneration",
    "it returns one vector per token, which is not tested yet. Merge its vectors instead (docs/guides/retrieval.md)": (
        "ColPaliForRetrieval ColQwen3 ColQwen3_5 OpsColQwen3Model ColModernVBertForRetrieval"
    ),
    "images enter through cross-attention, not as tokens of the prompt": "NemotronParseForConditionalGeneration",
    "the processor lists the role (patch or delimiter) of each image token separately, and the list would keep the "
    "unpruned length": "DeepseekV41ForCausalLM DeepseekV4ForConditionalGeneration",
    "transformers has no model to compare results with": "KimiK3ForConditionalGeneration",
}


def _index_by_name(reasons: dict[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in reasons.items() for name in names.split()}


REFUSED = _index_by_name(_REASONS)
PIXELS_ONLY = frozenset(_index_by_name(_REASONS_OF_CUTS))
REFUSED_IN_VLLM = _index_by_name(_REASONS_IN_VLLM)
