# SPDX-License-Identifier: Apache-2.0
"""The model families that the plugin serves. A quirk of a family is an entry here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tokenprune.tokens import square_grid


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
    square:  what has a budget for itself is a square of tokens without newlines: "always", or for a "tile", where it
             has as many tokens as one.
    """

    mrope: bool = False
    per_run: bool = False
    in_llm: bool = False
    nested: bool = False
    behind_video: int | None = None
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
    if (shrink := getattr(config, "scale_factor", None)) is None:  # Idefics3 and SmolVLM have it
        return getattr(config, "image_seq_length", None)
    return (config.vision_config.image_size // config.vision_config.patch_size // shrink) ** 2


# By the name that stands in `architectures` of a checkpoint's config.
FAMILIES: dict[str, Family] = {
    "LlavaForConditionalGeneration": Family(in_llm=True, nested=True, square="always"),
    "LlavaNextForConditionalGeneration": Family(in_llm=True, nested=True),
    "LlavaOnevisionForConditionalGeneration": Family(in_llm=True, nested=True, behind_video=1),
    "Mistral3ForConditionalGeneration": Family(in_llm=True),
    "Qwen2VLForConditionalGeneration": Family(mrope=True, in_llm=True, behind_video=0),
    "Qwen2_5_VLForConditionalGeneration": Family(mrope=True, in_llm=True, behind_video=0),
    "Qwen3VLForConditionalGeneration": Family(mrope=True, in_llm=True, behind_video=0),
    "InternVLForConditionalGeneration": Family(per_run=True, in_llm=True, square="tile"),
    "Gemma3ForConditionalGeneration": Family(per_run=True, nested=True, square="always"),
    "Idefics3ForConditionalGeneration": Family(in_llm=True, square="tile"),
    "SmolVLMForConditionalGeneration": Family(in_llm=True, square="tile"),
}
