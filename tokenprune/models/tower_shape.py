# SPDX-License-Identifier: Apache-2.0
"""Closed-form FLOPs of a vision tower and its projector, from the model's config and the number of patches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenprune.errors import UnsupportedModelError
from tokenprune.models.families import TOWERS, TowerRow


@dataclass(frozen=True)
class _Join:
    """Conversion of patches to visual tokens in a family.

    Args:
        unit: Function of the config: number of patches per visual token.
        projector: Function of config and unit: multiply-adds per visual token after the tower.
        sized: Images have individual sizes. Otherwise, all images are squares of one size, or tiles of it.
    """

    unit: Callable[[Any], int]
    projector: Callable[[Any, int], int]
    sized: bool = False


def _compute_feature_width(config: Any) -> int:
    """Return the width of a patch after the tower, over all feature layers."""
    read = getattr(config, "vision_feature_layer", None)
    return _get_tower_width(config.vision_config) * (len(read) if isinstance(read, (list, tuple)) else 1)


def _get_tower_width(vision: Any) -> int:
    return getattr(vision, "embed_dim", None) or vision.hidden_size  # Qwen2-VL: `hidden_size` is the decoder's


def _get_decoder_width(config: Any) -> int:
    return config.get_text_config().hidden_size


def _count_multiply_adds(config: Any, unit: int) -> int:
    joined = unit * _get_tower_width(config.vision_config)
    mergers = 1 + len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())
    return mergers * joined * (joined + _get_decoder_width(config))


_LLAVA = _Join(
    lambda config: 1,
    lambda config, unit: _get_decoder_width(config) * (_compute_feature_width(config) + _get_decoder_width(config)),
)
_INTERNVL = _Join(
    lambda config: round(config.downsample_ratio**-2),
    lambda config, unit: (
        _get_decoder_width(config) * (unit * _get_tower_width(config.vision_config) + _get_decoder_width(config))
    ),
)
_IDEFICS = _Join(
    lambda config: config.scale_factor**2,
    lambda config, unit: unit * _get_tower_width(config.vision_config) * _get_decoder_width(config),
)
_GEMMA = _Join(  # pools patches before the projection
    lambda config: _count_square_patches(config.vision_config) // config.mm_tokens_per_image,
    lambda config, unit: _get_tower_width(config.vision_config) * _get_decoder_width(config),
)
_QWEN = _Join(lambda config: config.vision_config.spatial_merge_size**2, _count_multiply_adds, sized=True)
FAMILY_JOINS = (
    dict.fromkeys(("llava", "llava_next", "llava_onevision"), _LLAVA)
    | dict.fromkeys(("smolvlm", "idefics3"), _IDEFICS)
    | dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), _QWEN)
    | {"internvl": _INTERNVL, "gemma3": _GEMMA}
)


def _get_sides(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _count_square_patches(vision: Any) -> int:
    """Return the number of patches of an image with the size in the config."""
    return math.prod(
        image_side // patch_side
        for image_side, patch_side in zip(_get_sides(vision.image_size), _get_sides(vision.patch_size), strict=True)
    )


@dataclass(frozen=True)
class TowerShape:
    """Sizes of a vision tower for closed-form costs.

    Args:
        layers: Number of blocks.
        hidden: Width of the hidden states.
        attention: Number of heads times their width.
        intermediate: Width of the MLP.
        mlp_matrices: Weight matrices of an MLP: 3 with a gate, 2 without.
        patch_numbers: Values per patch before the embedding.
        unit: Patches per visual token.
        projector: Multiply-adds per visual token after the tower.
        protected: Class tokens per view.
        window: Patches per attention window. None without windows.
        windowed: Number of blocks with windows.
        view: Patches per view. None if views have individual sizes.
    """

    layers: int
    hidden: int
    attention: int
    intermediate: int
    mlp_matrices: int
    patch_numbers: int
    unit: int
    projector: int
    protected: int = 0
    window: int | None = None
    windowed: int = 0
    view: int | None = None

    @classmethod
    def from_config(cls, config: Any) -> TowerShape:
        """Create the shape from a model's config.

        Raises:
            UnsupportedModelError: If the family has no closed form, or the config has fewer patches than visual tokens.
        """
        join = FAMILY_JOINS.get(config.model_type)
        if join is None:
            raise UnsupportedModelError(
                f"the vision tower of {config.model_type!r} has no closed form of FLOPs. Supported are models of the "
                "LLaVA, InternVL, Idefics3, Gemma 3 and Qwen-VL families."
            )
        vision = config.vision_config
        known = TOWERS.get(vision.model_type) or TowerRow(vision.model_type, "")
        hidden, unit = _get_tower_width(vision), join.unit(config)
        if unit < 1:
            raise UnsupportedModelError(
                f"this config of {config.model_type!r} has more visual tokens than its vision tower has patches. "
                "Use the config of a checkpoint."
            )
        layers = getattr(vision, "depth", None) or vision.num_hidden_layers
        heads = getattr(vision, "num_heads", None) or vision.num_attention_heads
        full = getattr(vision, "fullatt_block_indexes", None)
        sides = _get_sides(vision.patch_size)
        channels: Any = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3)
        gated = "silu" in str(getattr(vision, "hidden_act", "")) or known.gated
        return cls(
            layers=layers,
            hidden=hidden,
            attention=heads * (getattr(vision, "head_dim", None) or hidden // heads),
            intermediate=getattr(vision, "intermediate_size", None) or int(hidden * vision.mlp_ratio),
            mlp_matrices=3 if gated else 2,
            patch_numbers=channels * math.prod(sides) * getattr(vision, "temporal_patch_size", 1),
            unit=unit,
            projector=join.projector(config, unit),
            protected=known.class_tokens,
            window=None if full is None else (vision.window_size // sides[0]) ** 2,
            windowed=0 if full is None else layers - len(set(full)),
            view=None if join.sized else _count_square_patches(vision),
        )

    def flops(self, views: Sequence[float], shares: Sequence[float] | None = None) -> float:
        """Return the FLOPs (2 per multiply-add) of encoding and projecting `views`.

        Excludes norms, rotary embedding and softmax. Windows count as full windows, which overestimates windows at
        image borders.

        Args:
            views: Number of patches of each image, tile or frame.
            shares: For a merge inside the tower, the share of tokens that enter each block, and (last) that leave the
                last block. The merge is between attention and MLP of a block. Exact only for blocks without windows.
        """
        shares = [1.0] * (self.layers + 1) if shares is None else list(shares)
        patches, tokens = sum(views), sum(view + self.protected for view in views)
        total = 2 * patches * self.patch_numbers * self.hidden + 2 * patches / self.unit * self.projector * shares[-1]
        square = sum((view + self.protected) ** 2 for view in views)
        inside = sum((view + self.protected) * min(view, self.window or view) for view in views)
        # The config does not contain the order of windowed blocks, so all blocks count with the mean of both kinds.
        pairs = (self.windowed * inside + (self.layers - self.windowed) * square) / self.layers
        for entering, leaving in itertools.pairwise(shares):
            total += 2 * tokens * entering * 4 * self.hidden * self.attention
            total += 4 * pairs * entering**2 * self.attention
            total += 2 * tokens * leaving * self.mlp_matrices * self.hidden * self.intermediate
        return total

    @property
    def num_weights(self) -> int:
        """Number of weights in the blocks, the patch embedding and the projector, without norms and positions."""
        block = self.hidden * (4 * self.attention + self.mlp_matrices * self.intermediate)
        return self.layers * block + self.patch_numbers * self.hidden + self.projector

    def visual_tokens(self, views: Sequence[int]) -> int:
        """Return the number of visual tokens of `views`, without separators."""
        return sum(view // self.unit for view in views)


def count_view_patches(config: Any, inputs: Mapping[str, Any]) -> list[int]:
    """Return the number of patches of each image, tile or frame in processor outputs.

    Args:
        config: Config of the model.
        inputs: Processor outputs: `pixel_values` or `image_grid_thw`, and the same for videos. All-zero tiles are batch
            padding and are skipped.
    """
    views: list[int] = []
    patch = _get_sides(config.vision_config.patch_size)
    for grids, pixels in (("image_grid_thw", "pixel_values"), ("video_grid_thw", "pixel_values_videos")):
        if inputs.get(grids) is not None:
            for frames, height, width in inputs[grids].tolist():
                views += [height * width] * frames
        elif inputs.get(pixels) is not None:
            tiles = inputs[pixels].flatten(0, -4)
            num_tiles = int(tiles.flatten(1).any(1).sum())
            views += [math.prod(side // size for side, size in zip(tiles.shape[-2:], patch, strict=True))] * num_tiles
    return views
