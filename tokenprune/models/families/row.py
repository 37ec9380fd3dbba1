# SPDX-License-Identifier: Apache-2.0
"""A row of the table of families: a model type, and how transformers and vLLM hand its images to the language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

OLDEST_TRANSFORMERS = "5.0"  # of transformers; pyproject.toml has the same
LAYER_TOKENS: Mapping[str | int, int] = {"position_embeddings": -2, "position_ids": -1}


@dataclass(frozen=True)
class Vllm:
    """An architecture of vLLM, by the name that stands in `architectures` of a checkpoint's config; none by default.

    models:  those that have it, by the names that users know.
    budget:  in words, the tokens that one budget is for.
    mrope:   its positions have three axes (time, height, width), and kept tokens keep theirs.
    per_run: every unbroken run of placeholders (a tile, a frame) has the budget for itself, instead of the whole
             image or video, as in transformers where nothing tells which of them belong together.
    in_llm:  tokens can leave between the layers of its language model.
    nested:  vLLM keeps its CLIP or SigLIP tower in `vision_tower.vision_model`. transformers 5 leaves the second name
             out when it saves a checkpoint.
    audio:   its prompts may hold audio, too, which stays.
    """

    architecture: str = ""
    models: str = ""
    budget: str = "an image"
    mrope: bool = False
    per_run: bool = False
    in_llm: bool = False
    nested: bool = False
    audio: bool = False


@dataclass(frozen=True)
class Family:
    """A model type.

    note, since:  remarks for users, and the first version of transformers with which it can be pruned, None if
                  only vLLM has it.
    vllm:         its architecture in vLLM.

    Prompt:
    videos:       "frames" where it is tested which tokens of a video are a frame, "whole" where a prompt may hold
                  videos, else "none". after_video: tokens of a video that follow its last frame.
    square:       "always" where every image (a tile, where each counts as one) is a square of tokens without newlines;
                  "runs" where each tile is also a run of placeholders of its own, and the prompt says which runs are
                  one image; "tile" where several such squares share a run of placeholders. Elsewhere a number of tokens
                  that happens to be a square says nothing.
    features_per_image: a list of features from the encoder has one entry per image; if not, runs of placeholders
                  separate them. step_within_image: the distance between placeholders of an image, at most.
    resizing:     how methods on pixels can make fewer tokens: "input" (the processor follows the image's size),
                  "target" (it makes every image one size, which can shrink) or None (as many tokens of any image).

    Vision tower:
    patches:      how patches become visual tokens, None if it is not known: "tiles" (each row of the tower is a square
                  tile, and a square of one or more patches makes a token), "packed" (tiles whose features are
                  reordered, cropped and separated by newlines), "runs" (patches of all images on one axis, ordered so
                  that consecutive ones make a token), "sized" (patches of all images on one axis, each image's row by
                  row).
    unit_side:    config -> how many patches on a side of a square become one visual token; None: each does.
    merges:       patches can merge in the tower.
    tower_rows:   contents of a row of the tower, where methods inside the tower depend on it:
                  "all images": one sequence with the patches of all images. The patches of a visual token are adjacent
                  to its end, so whole tokens can be dropped inside the tower.
                  "one image": the patches of an image in its own grid, then padding (NaFlex). A square of patches
                  (`unit_side`) becomes a token.
                  "one frame": a frame of a video in a CLIP or SigLIP tower. The token of each patch is known, so frames
                  can merge inside the tower.

    Decoder:
    stateful:     some layers carry a state instead of keys.
    static_cache: tokens can be left out of a static cache: each layer attends to all keys that it caches itself.
    vectors:      it returns a vector for each token, and writes no answer.
    complex_rotation: its layers get rotary positions as one complex tensor, and not as cosines and sines.
    decoder_names, norm_name: places of the decoder in the model, and of the last norm in the decoder.
    entry_tokens, layer_tokens: arguments of the decoder, and of each layer, that have an entry for each token and are
                  gathered with the embeddings (name or position -> axis of the tokens).
    """

    name: str
    note: str = ""
    since: str | None = OLDEST_TRANSFORMERS
    vllm: Vllm = Vllm()
    videos: Literal["none", "whole", "frames"] = "none"
    after_video: int = 0
    square: Literal["always", "runs", "tile", "no"] = "no"
    features_per_image: bool = True
    step_within_image: int = 1
    resizing: Literal["input", "target"] | None = "input"
    patches: str | None = None
    unit_side: Callable[[Any], int] | None = None
    merges: bool = False
    tower_rows: Literal["all images", "one image", "one frame"] | None = None
    stateful: bool = False
    static_cache: bool = True
    vectors: bool = False
    complex_rotation: bool = False
    decoder_names: tuple[str, ...] = ("language_model",)
    norm_name: str = "norm"
    entry_tokens: Mapping[str, int] = field(default_factory=dict, hash=False)
    layer_tokens: Mapping[str | int, int] = field(default_factory=lambda: LAYER_TOKENS, hash=False)

    @property
    def has_known_frames(self) -> bool:
        """True if it is known which tokens of a video are a frame."""
        return self.videos == "frames"

    @property
    def after_frames(self) -> int | None:
        """Number of a video's tokens after its last frame; None if the tokens of a frame are not known."""
        return self.after_video if self.has_known_frames else None

    def layout(self, config: Any) -> str | None:
        """Return how patches become visual tokens with the tower of a model's config, if one is given; see
        `patches`."""
        if getattr(config, "ps_version", None) == "v1":
            return None  # first checkpoints of InternVL, whose tokens stand column by column
        tower = getattr(getattr(config, "vision_config", None), "model_type", None)
        # Pixtral towers pack the patches of all images. LLaVA has one as a choice.
        return "sized" if self.patches == "tiles" and tower == "pixtral" else self.patches

    def get_unit_side(self, config: Any) -> int:
        """Return how many patches of the tower's grid, on a side of a square, become one visual token."""
        return 1 if self.unit_side is None else self.unit_side(config)

    def is_square(self, count: int, config: Any, whole_image: bool = False) -> bool:
        """Return True where an image of `count` tokens can only be a square of them. whole_image: all tiles of an image
        count as one, though each is a run of its own."""
        if self.layout(config) == "sized":
            return False
        if self.square == "tile" or (whole_image and self.square == "runs"):
            return count == count_tile_tokens(config)
        return self.square in ("always", "runs")


def count_tile_tokens(config: Any) -> int | None:
    """Return how many tokens a tile of an image makes; None where the config does not tell."""
    if (shrink := getattr(config, "scale_factor", None)) is not None:  # Idefics3 and SmolVLM have it
        return (config.vision_config.image_size // config.vision_config.patch_size // shrink) ** 2
    if (tokens := getattr(config, "image_seq_length", None)) is not None:
        return tokens
    shrink, size = getattr(config, "downsample_ratio", None), getattr(config, "force_image_size", None)
    if shrink is None or size is None:
        return None
    return round(size // config.vision_config.patch_size * shrink) ** 2  # InternVL in its authors' format
