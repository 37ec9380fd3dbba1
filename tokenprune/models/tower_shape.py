# SPDX-License-Identifier: Apache-2.0
"""Closed-form FLOPs of a vision tower and of what projects its patches, from the model's config and the patches that it
is fed."""

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
    """The way a family joins patches into visual tokens.

    unit: how many patches become one, from its config. projector: multiply-adds for one of them after the tower, from
    the config and the unit. sized: whether images have their own size (else all are squares of one, or tiles of it).
    """

    unit: Callable[[Any], int]
    projector: Callable[[Any, int], int]
    sized: bool = False


def _wide(config: Any) -> int:
    """Numbers of a patch after the tower, over all layers that are read."""
    read = getattr(config, "vision_feature_layer", None)
    return _hidden(config.vision_config) * (len(read) if isinstance(read, (list, tuple)) else 1)


def _hidden(vision: Any) -> int:
    return getattr(vision, "embed_dim", None) or vision.hidden_size  # Qwen2-VL: `hidden_size` is the decoder's


def _text(config: Any) -> int:
    return config.get_text_config().hidden_size


def _qwen(config: Any, unit: int) -> int:
    joined = unit * _hidden(config.vision_config)
    mergers = 1 + len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())
    return mergers * joined * (joined + _text(config))


_LLAVA = _Join(lambda config: 1, lambda config, unit: _text(config) * (_wide(config) + _text(config)))
_INTERNVL = _Join(
    lambda config: round(config.downsample_ratio**-2),
    lambda config, unit: _text(config) * (unit * _hidden(config.vision_config) + _text(config)),
)
_IDEFICS = _Join(
    lambda config: config.scale_factor**2, lambda config, unit: unit * _hidden(config.vision_config) * _text(config)
)
_GEMMA = _Join(  # averages patches before it projects them
    lambda config: _square(config.vision_config) // config.mm_tokens_per_image,
    lambda config, unit: _hidden(config.vision_config) * _text(config),
)
_QWEN = _Join(lambda config: config.vision_config.spatial_merge_size**2, _qwen, sized=True)
FAMILY_JOINS = (
    dict.fromkeys(("llava", "llava_next", "llava_onevision"), _LLAVA)
    | dict.fromkeys(("smolvlm", "idefics3"), _IDEFICS)
    | dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), _QWEN)
    | {"internvl": _INTERNVL, "gemma3": _GEMMA}
)


def _sides(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _square(vision: Any) -> int:
    """Patches of an image of the size that the config names."""
    return math.prod(side // of for side, of in zip(_sides(vision.image_size), _sides(vision.patch_size), strict=True))


@dataclass(frozen=True)
class TowerShape:
    """The sizes that the closed form of a vision tower needs; `from_config` reads them from a model's config.

    layers, hidden: how many blocks, and the width of what goes through them.
    attention: heads times their width. intermediate: width of the MLP; mlp_matrices: 3 where it is gated, else 2.
    patch_numbers: numbers of a patch before it is embedded. protected: class tokens of a view.
    unit: patches that become one visual token. projector: multiply-adds for each of those, after the tower.
    window: patches that attend to each other in the first `windowed` of the blocks, in any order; None: there are no
    windows.
    view: patches of a view, where all have the same number; None: views have their own sizes.
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
        """config: of the whole model. Raises UnsupportedModelError for a family whose tower has no closed form here,
        and for a config with fewer patches than visual tokens."""
        join = FAMILY_JOINS.get(config.model_type)
        if join is None:
            raise UnsupportedModelError(
                f"the FLOPs of the vision tower of {config.model_type!r} are not known in closed form; they are for "
                f"{', '.join(sorted(FAMILY_JOINS))}"
            )
        vision = config.vision_config
        known = TOWERS.get(vision.model_type) or TowerRow(vision.model_type, "")
        hidden, unit = _hidden(vision), join.unit(config)
        if unit < 1:
            raise UnsupportedModelError(
                f"this config of {config.model_type!r} asks for more visual tokens than its vision tower has patches: "
                "take that of a real checkpoint"
            )
        layers = getattr(vision, "depth", None) or vision.num_hidden_layers
        heads = getattr(vision, "num_heads", None) or vision.num_attention_heads
        full = getattr(vision, "fullatt_block_indexes", None)
        sides = _sides(vision.patch_size)
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
            view=None if join.sized else _square(vision),
        )

    def flops(self, views: Sequence[float], shares: Sequence[float] | None = None) -> float:
        """Return multiply-adds x 2 of encoding and projecting `views`: numbers of patches that attend to each other,
        one for each image, tile or frame. As in `DecoderShape`, norms, rotary embedding and softmax are left out.

        Windows are counted as full ones, which overstates those at the rims of an image. shares: of a merge inside the
        tower, what is left of a view's tokens where it enters each block, and (last) where it leaves the last one; the
        merge sits between a block's attention and its MLP. Only blocks without windows are counted so exactly.
        """
        shares = [1.0] * (self.layers + 1) if shares is None else list(shares)
        patches, tokens = sum(views), sum(view + self.protected for view in views)
        total = 2 * patches * self.patch_numbers * self.hidden + 2 * patches / self.unit * self.projector * shares[-1]
        square = sum((view + self.protected) ** 2 for view in views)
        inside = sum((view + self.protected) * min(view, self.window or view) for view in views)
        # Which blocks have windows is not known: the mean of both kinds is the sum over all of them.
        pairs = (self.windowed * inside + (self.layers - self.windowed) * square) / self.layers
        for entering, leaving in itertools.pairwise(shares):
            total += 2 * tokens * entering * 4 * self.hidden * self.attention
            total += 4 * pairs * entering**2 * self.attention
            total += 2 * tokens * leaving * self.mlp_matrices * self.hidden * self.intermediate
        return total

    @property
    def num_weights(self) -> int:
        """Numbers in the matrices of all blocks, of what embeds patches, and of the projector; norms and positions are
        left out."""
        block = self.hidden * (4 * self.attention + self.mlp_matrices * self.intermediate)
        return self.layers * block + self.patch_numbers * self.hidden + self.projector

    def visual_tokens(self, views: Sequence[int]) -> int:
        """Return how many visual tokens the tower makes of `views`, without separators that a family adds."""
        return sum(view // self.unit for view in views)


def count_view_patches(config: Any, inputs: Mapping[str, Any]) -> list[int]:
    """Return the patches of each image, tile or frame that a model's tower is fed, from what its processor made
    (`pixel_values` or `image_grid_thw`, and the same of videos); tiles of zeros, which fill a batch, are left out."""
    views: list[int] = []
    patch = _sides(config.vision_config.patch_size)
    for grids, pixels in (("image_grid_thw", "pixel_values"), ("video_grid_thw", "pixel_values_videos")):
        if inputs.get(grids) is not None:
            for frames, height, width in inputs[grids].tolist():
                views += [height * width] * frames
        elif inputs.get(pixels) is not None:
            tiles = inputs[pixels].flatten(0, -4)
            real = int(tiles.flatten(1).any(1).sum())
            views += [math.prod(side // of for side, of in zip(tiles.shape[-2:], patch, strict=True))] * real
    return views
