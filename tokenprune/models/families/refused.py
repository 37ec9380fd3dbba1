# SPDX-License-Identifier: Apache-2.0
"""Models that cannot be reduced, with the reason."""

from __future__ import annotations

# Model types whose decoders choose keys themselves: what is a token of the prompt stays. Methods on pixels, which make
# the prompt shorter, may act.
_REASONS_OF_CUTS = {
    "some layers choose which blocks of keys they look at, by slots of the cache: with tokens gone the blocks would "
    "hold others; methods on pixels may act": "minimax_m3_vl qwen4_exp glm5_next",
    "an indexer chooses which keys its layers look at, by keys held beside the others, which a cut would not reach; "
    "methods on pixels may act": "mistral_large4 dots3_note",
}

# Model types of transformers. Cutting would be without meaning, or silently wrong.
_REASONS = _REASONS_OF_CUTS | {
    "its images enter through cross-attention, not through the sequence: no other layer would get faster": (
        "mllama idefics evolla blip"
    ),
    "its decoder reads its images by cross-attention": (
        "florence2 t5gemma2 udop pix2struct pp_formulanet vision-encoder-decoder"
    ),
    "its decoder itself encodes its images and writes them into the embeddings of the prompt, without features between "
    "that could leave": "phi4_multimodal",
    "it puts its images before the text inside its own layers, without placeholders in the prompt": "git",
    "its decoder takes images by places of its own and counts positions itself, and generate() calls it past the "
    "model's own forward": "kosmos-2 kosmos-2.5",
    "its attention measures distances between slots, and every layer convolves neighbours": "inkling_mm_model inkling2",
    "its cache keeps as many keys as the prompt had tokens, and a window of the others: after a cut it would take the "
    "first of the answer for the prompt": "unlimited_ocr",
    "it writes blocks of text by diffusion, and does not keep what it read of the prompt": "diffusion_gemma",
    "no test covers it yet: a router decides how many tokens each of its tiles has, and features of several depths are "
    "added inside its decoder": "granite_docling",
    "it is a policy for robots, whose actions read the keys of the whole prefix": "pi0",
    "its encoder counts windows by slots, and would take tokens for neighbours that stood apart in the page: merge its "
    "vectors instead (docs/guides/retrieval.md)": "colmodernvbert",
    "it takes no images in transformers, text alone": "mistral4",
    "it is the vision tower of other models, which have a type of their own (llava, mistral3)": "pixtral",
}

# Architectures of vLLM, which do not keep the placeholder contract: one placeholder for each visual token, as many as
# the front end says before the encoder runs, and for each image or video one row of the encoder's output for each.
_REASONS_IN_VLLM = {
    "what opens and closes its tiles is made by its encoder and stands among the rows of its image, where a method "
    "would take it for a visual token": "Ovis Ovis2_5 Ovis2_6ForCausalLM Ovis2_6_MoeForCausalLM",
    "its prompts number the images, and vLLM writes the text of a cached image anew, past what the plugin wrote": (
        "MiniCPMV MiniCPMO MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration"
    ),
    "its positions weave audio and video into each other, and rows of audio bring no positions": (
        "Qwen2_5OmniModel Qwen2_5OmniForConditionalGeneration Qwen3OmniMoeForConditionalGeneration"
    ),
    "features of several depths enter between the layers of its language model, which was not tried": (
        "Granite4VisionForConditionalGeneration"
    ),
    "the checkpoint is in Mistral's own format, with a processor of its own: take the one in Hugging Face's format, "
    "LlavaForConditionalGeneration or Mistral3ForConditionalGeneration": "PixtralForConditionalGeneration",
    "it returns one vector per token, which no test covers yet: merge vectors instead (docs/guides/retrieval.md)": (
        "ColPaliForRetrieval ColQwen3 ColQwen3_5 OpsColQwen3Model ColModernVBertForRetrieval"
    ),
    "its images enter by cross-attention, not as tokens of the prompt": "NemotronParseForConditionalGeneration",
}


def _by_name(reasons: dict[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in reasons.items() for name in names.split()}


REFUSED = _by_name(_REASONS)
UNCUT = frozenset(_by_name(_REASONS_OF_CUTS))
REFUSED_IN_VLLM = _by_name(_REASONS_IN_VLLM)
