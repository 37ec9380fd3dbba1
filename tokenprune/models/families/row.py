# SPDX-License-Identifier: Apache-2.0
"""The row of a model family: how transformers and vLLM pass its images to the language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

OLDEST_TRANSFORMERS = "5.0"  # keep in sync with pyproject.toml
LAYER_TOKENS: Mapping[str | int, int] = {"position_embeddings": -2, "position_ids": -1}


@dataclass(frozen=True)
class Vllm:
    """The vLLM side of a family.

    Args:
        architecture: Name in `architectures` of the checkpoint's config. Empty if vLLM does not serve the family.
        models: User-facing names of the models.
        budget: Description of the tokens that share one budget, such as "an image".
        mrope: Positions have three axes (time, height, width), and kept tokens keep theirs.
        per_run: Each run of placeholders (a tile or a frame) has its own budget, because vLLM does not provide which
            runs belong to one image.
        in_llm: Tokens can be dropped between decoder layers.
        nested: vLLM keeps the CLIP or SigLIP tower in `vision_tower.vision_model`. transformers 5 omits the second name
            when it saves a checkpoint.
        audio: Prompts may contain audio tokens, which are kept.
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
    """A model type, and how it passes images to the language model.

    The defaults describe the common contract: placeholders in the prompt are replaced by image features, and the
    decoder is a standard transformers decoder. docs/extend/add-a-family.md explains when to set a field.

    Args:
        name: Model type of the config.
        note: Remark for users, shown on docs/reference/families.md.
        since: First supported version of transformers. None if only vLLM has the family.
        vllm: The vLLM side of the family.
        videos: Support of videos. "frames": the tokens of each frame are known; "whole": prompts may contain videos,
            but frames are unknown; "none": no videos.
        after_video: Number of video tokens after the last frame.
        square: Images that are squares of tokens. "always": every image (or tile that counts as an image) is a square
            without newlines; "runs": every tile is a square and a separate run of placeholders, and the prompt defines
            which runs form an image; "tile": several squares share a run; "no": unknown.
        features_per_image: The encoder returns one list entry per image. Otherwise, runs of placeholders separate
            images.
        step_within_image: Maximum distance between consecutive placeholders of an image.
        resizing: How methods on pixels can reduce tokens. "input": the token count follows the size of the image;
            "target": the processor resizes all images to one size, which can be reduced; None: the token count is
            fixed.
        patches: How patches become visual tokens. "tiles": each row of the tower is a square tile, and a square of
            patches becomes a token; "packed": tiles whose features are reordered, cropped and separated by newlines;
            "runs": patches of all images on one axis, where consecutive patches become a token; "sized": patches of all
            images on one axis in row order; None: unknown.
        unit_side: Function of the config that returns the side, in patches, of the square that becomes one token. None
            is 1.
        merges: Patches can be merged inside the tower.
        tower_rows: Contents of one row of the tower, for methods inside the tower. "all images": one sequence with the
            patches of all images, where the patches of a token are adjacent; "one image": patches of one image in its
            own grid, then padding (NaFlex); "one frame": one frame of a video; None: such methods are not supported.
        stateful: Some decoder layers carry a state instead of keys.
        static_cache: Tokens can be dropped with a static cache: each layer attends only to keys that it caches.
        vectors: The model returns one vector per token and generates no text.
        complex_rotation: Layers receive rotary positions as one complex tensor, instead of cosines and sines.
        decoder_names: Attribute path of the decoder in the model.
        norm_name: Attribute path of the final norm in the decoder.
        entry_tokens: Decoder arguments with one entry per token, gathered with the embeddings (name -> token axis).
        layer_tokens: Layer arguments with one entry per token (name or position -> token axis).

    Examples:
        >>> Family("my_model", square="always", patches="tiles").is_square(576, config=None)
        True
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
        """True if the tokens of each video frame are known."""
        return self.videos == "frames"

    @property
    def after_frames(self) -> int | None:
        """Number of video tokens after the last frame. None if the tokens of each frame are unknown."""
        return self.after_video if self.has_known_frames else None

    def layout(self, config: Any) -> str | None:
        """Return how patches become visual tokens for a model's config. See `patches`."""
        if getattr(config, "ps_version", None) == "v1":
            return None  # the first InternVL checkpoints order tokens by column
        tower = getattr(getattr(config, "vision_config", None), "model_type", None)
        # LLaVA can have a Pixtral tower, which packs the patches of all images.
        return "sized" if self.patches == "tiles" and tower == "pixtral" else self.patches

    def get_unit_side(self, config: Any) -> int:
        """Return the side, in patches, of the square that becomes one visual token."""
        return 1 if self.unit_side is None else self.unit_side(config)

    def is_square(self, count: int, config: Any, whole_image: bool = False) -> bool:
        """Return True if an image with `count` tokens is a square of tokens.

        Args:
            count: Number of tokens of the image.
            config: The model's config.
            whole_image: Count all tiles of an image as one image, although each tile is a separate run.
        """
        if self.layout(config) == "sized":
            return False
        if self.square == "tile" or (whole_image and self.square == "runs"):
            return count == count_tile_tokens(config)
        return self.square in ("always", "runs")


def count_tile_tokens(config: Any) -> int | None:
    """Return the number of tokens of an image tile, or None if the config does not define it."""
    if (shrink := getattr(config, "scale_factor", None)) is not None:  # Idefics3 and SmolVLM
        return (config.vision_config.image_size // config.vision_config.patch_size // shrink) ** 2
    if (tokens := getattr(config, "image_seq_length", None)) is not None:
        return tokens
    shrink, size = getattr(config, "downsample_ratio", None), getattr(config, "force_image_size", None)
    if shrink is None or size is None:
        return None
    return round(size // config.vision_config.patch_size * shrink) ** 2  # InternVL in the original format
