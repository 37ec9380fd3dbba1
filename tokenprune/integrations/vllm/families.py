# SPDX-License-Identifier: Apache-2.0
"""The model families that the plugin serves. A quirk of a family is an entry here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tokenprune.view.segments import square_grid


@dataclass(frozen=True)
class Family:
    """How an architecture hands its images to the language model.

    mrope:   its positions have three axes (time, height, width), and kept tokens keep theirs.
    per_run: every unbroken run of placeholders (a tile, a frame) has the budget for itself, instead of the whole
             image or video. Like on the Hugging Face side, where nothing tells which of them belong together.
    in_llm:  tokens can leave between the layers of its language model (see `in_llm`).
    nested:  vLLM keeps its CLIP or SigLIP tower in `vision_tower.vision_model`. transformers 5 leaves the second name
             out when it saves a checkpoint.
    behind_video: of a family that tells which tokens of a video are a frame, how many follow the last one; else None.
    audio:   its prompts may hold audio, too, which stays.
    packed:  its tower takes the patches of all images as one sequence, of which units can leave ahead of it.
    square:  what has a budget for itself is a square of tokens without newlines: "always", or for a "tile", where it
             has as many tokens as one.
    """

    mrope: bool = False
    per_run: bool = False
    in_llm: bool = False
    nested: bool = False
    behind_video: int | None = None
    audio: bool = False
    packed: bool = False
    square: Literal["always", "tile", "no"] = "no"

    def image_grid(self, count: int, config: Any) -> tuple[int, int, int] | None:
        """Return (1, height, width) of an image of `count` tokens whose data tells none; None where it is not known.
        config: of the model."""
        if getattr(config.vision_config, "model_type", None) == "pixtral":
            return None  # images of any shape
        one_tile = self.square == "tile" and count == _tile_tokens(config)
        return square_grid(count) if one_tile or self.square == "always" else None


def _tile_tokens(config: Any) -> int | None:
    """Return how many tokens a tile of an image makes; None where the config does not tell."""
    if (shrink := getattr(config, "scale_factor", None)) is not None:  # Idefics3 and SmolVLM have it
        return (config.vision_config.image_size // config.vision_config.patch_size // shrink) ** 2
    if (tokens := getattr(config, "image_seq_length", None)) is not None:
        return tokens
    shrink, size = getattr(config, "downsample_ratio", None), getattr(config, "force_image_size", None)
    if shrink is None or size is None:
        return None
    return round(size // config.vision_config.patch_size * shrink) ** 2  # InternVL in its authors' format


# By the name that stands in `architectures` of a checkpoint's config.
FAMILIES: dict[str, Family] = {
    "LlavaForConditionalGeneration": Family(in_llm=True, nested=True, square="always"),
    "LlavaNextForConditionalGeneration": Family(in_llm=True, nested=True),
    "LlavaNextVideoForConditionalGeneration": Family(nested=True, behind_video=0),
    "LlavaOnevisionForConditionalGeneration": Family(in_llm=True, nested=True, behind_video=1),
    "Mistral3ForConditionalGeneration": Family(in_llm=True),
    "Qwen2VLForConditionalGeneration": Family(mrope=True, in_llm=True, behind_video=0, packed=True),
    "Qwen2_5_VLForConditionalGeneration": Family(mrope=True, in_llm=True, behind_video=0, packed=True),
    "Qwen3VLForConditionalGeneration": Family(mrope=True, in_llm=True, behind_video=0, packed=True),
    "Qwen3VLMoeForConditionalGeneration": Family(mrope=True, behind_video=0, packed=True),
    "Qwen3_5ForConditionalGeneration": Family(mrope=True, behind_video=0, packed=True),
    "Qwen3_5MoeForConditionalGeneration": Family(mrope=True, behind_video=0, packed=True),
    "Glm4vForConditionalGeneration": Family(mrope=True, behind_video=0, packed=True),
    "Glm4vMoeForConditionalGeneration": Family(mrope=True, behind_video=0, packed=True),
    "InternVLForConditionalGeneration": Family(per_run=True, in_llm=True, square="tile"),
    "InternVLChatModel": Family(per_run=True, square="tile"),
    "Gemma3ForConditionalGeneration": Family(per_run=True, nested=True, square="always"),
    "Gemma3nForConditionalGeneration": Family(per_run=True, audio=True),
    "Gemma4ForConditionalGeneration": Family(per_run=True, audio=True),
    "PaliGemmaForConditionalGeneration": Family(nested=True, square="always"),
    "Idefics3ForConditionalGeneration": Family(in_llm=True, square="tile"),
    "SmolVLMForConditionalGeneration": Family(in_llm=True, square="tile"),
    "AriaForConditionalGeneration": Family(),
    "Lfm2VlForConditionalGeneration": Family(per_run=True, nested=True),
    "KimiVLForConditionalGeneration": Family(),
    "Llama4ForConditionalGeneration": Family(per_run=True, square="always"),
}

# Why the placeholder contract does not hold elsewhere: one placeholder for each visual token, as many as the front end
# says before the encoder runs, and for each image or video one row of the encoder's output for each.
_REASONS = {
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
    "its images enter by cross-attention, not as tokens of the prompt": "NemotronParseForConditionalGeneration",
}
REFUSED: dict[str, str] = {name: reason for reason, names in _REASONS.items() for name in names.split()}


def refusal(architecture: str) -> str:
    """Return why an architecture is not served, and what is."""
    reason = REFUSED.get(architecture)
    return f"does not serve {architecture}{f', because {reason}' if reason else ''}. It serves {', '.join(FAMILIES)}"
