# SPDX-License-Identifier: Apache-2.0
"""The model families that the plugin serves. A quirk of a family is an entry here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """How an architecture hands its pictures to the language model.

    mrope:   its positions have three axes (time, height, width), and kept tokens keep theirs.
    per_run: every unbroken run of placeholders (a tile, a frame) has the budget for itself, instead of the whole
             picture or video. Like on the Hugging Face side, where nothing tells which runs make up a picture.
    in_llm:  tokens can leave between the layers of its language model (see `in_llm`).
    nested:  vLLM keeps its CLIP or SigLIP tower in `vision_tower.vision_model`. transformers 5 leaves the second name
             out when it saves a checkpoint.
    """

    mrope: bool = False
    per_run: bool = False
    in_llm: bool = False
    nested: bool = False


# By the name that stands in `architectures` of a checkpoint's config.
FAMILIES: dict[str, Family] = {
    "LlavaForConditionalGeneration": Family(in_llm=True, nested=True),
    "LlavaNextForConditionalGeneration": Family(in_llm=True, nested=True),
    "LlavaOnevisionForConditionalGeneration": Family(in_llm=True, nested=True),
    "Mistral3ForConditionalGeneration": Family(in_llm=True),
    "Qwen2VLForConditionalGeneration": Family(mrope=True, in_llm=True),
    "Qwen2_5_VLForConditionalGeneration": Family(mrope=True, in_llm=True),
    "Qwen3VLForConditionalGeneration": Family(mrope=True, in_llm=True),
    "InternVLForConditionalGeneration": Family(per_run=True, in_llm=True),
    "Gemma3ForConditionalGeneration": Family(per_run=True, nested=True),
    "Idefics3ForConditionalGeneration": Family(per_run=True, in_llm=True),
    "SmolVLMForConditionalGeneration": Family(per_run=True, in_llm=True),
}
