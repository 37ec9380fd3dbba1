# SPDX-License-Identifier: Apache-2.0
"""Say which models can draft, and for which targets, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.generation import GenerationMixin

from tokenprune.errors import OptionError, UnsupportedModelError
from tokenprune.integrations.hf.families import get_adapter

# What decides how many placeholders a processor writes for an image, in the config of a model or of its tower.
_GEOMETRY = (
    "patch_size", "image_size", "spatial_merge_size", "temporal_patch_size", "tokens_per_second", "image_seq_length",
    "image_grid_pinpoints", "scale_factor", "downsample_ratio", "mm_tokens_per_image", "pooling_kernel_size",
    "vision_feature_select_strategy", "projector_patch_to_query_dict", "downsample_factor",
)  # fmt: skip


def writer(model: nn.Module) -> GenerationMixin:
    """Return the module of `model` that has `generate`: itself, or what a wrapper (an adapter library) holds.

    Raises UnsupportedModelError where there is none.
    """
    for module in model.modules():
        if isinstance(module, GenerationMixin):
            return module
    raise UnsupportedModelError(
        f"{type(model).__name__} has no generate() of transformers: drafts are for models that write text"
    )


def check_target(model: nn.Module) -> None:
    """Raise UnsupportedModelError or UnsupportedSetupError where `generate` takes no drafts of this model."""
    get_adapter(model)  # raises what it does not know
    top = writer(model)
    kind = top.config.model_type
    if type(top).generate is not GenerationMixin.generate:
        raise UnsupportedModelError(
            f"{kind!r} has a generate() of its own, and it is not known what that hands to a draft: use "
            "tokenprune.patch instead"
        )
    if top.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{kind!r} writes its answer in another decoder than it reads images with")
    if any(getattr(module, "_is_stateful", False) for module in top.modules()):
        raise UnsupportedModelError(
            f"{kind!r} has layers that carry a state, which cannot take back what was drafted: transformers refuses "
            "assistants for it, so use tokenprune.patch instead"
        )


def check_pair(model: nn.Module, draft: nn.Module) -> None:
    """Raise OptionError where `draft` cannot read what was written for `model`, token by token."""
    if draft is model:
        raise OptionError("draft= is the model itself: leave it out for a draft that shares the model's weights")
    check_target(draft)
    ours, theirs = writer(draft).config, writer(model).config
    sizes = [config.get_text_config().vocab_size for config in (theirs, ours)]
    if sizes[0] != sizes[1]:
        raise OptionError(
            f"the model has {sizes[0]} token ids and the draft {sizes[1]}, and drafts are taken token by token: use a "
            "draft with the model's vocabulary"
        )
    ids = [get_adapter(one).placeholders for one in (model, draft)]
    if ids[0] != ids[1]:
        raise OptionError(f"the model's placeholders are {ids[0]} and the draft's {ids[1]}: both read one prompt")
    for name, one, other in _differences(theirs, ours):
        raise OptionError(
            f"{name} is {one} for the model and {other} for the draft, so that an image has another number of tokens: "
            "use a draft that takes the same prompts"
        )
    if encodes_ahead(model) != encodes_ahead(draft):
        raise OptionError(
            f"{theirs.model_type} and {ours.model_type} get their images in different ways: use a draft of the model's "
            "own family"
        )


def _differences(ours: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value, value) of what decides the number of an image's tokens, where two configs differ."""
    pairs: list[tuple[str, Any, Any]] = [("", ours, theirs)]
    pairs.append(("vision_config.", getattr(ours, "vision_config", None), getattr(theirs, "vision_config", None)))
    for where, left, right in pairs:
        for name in _GEOMETRY:
            values = getattr(left, name, None), getattr(right, name, None)
            if None not in values and values[0] != values[1]:
                yield where + name, *values


def encodes_ahead(model: nn.Module) -> bool:
    """Return whether `generate` encodes images before any forward, and keeps the pixels to itself."""
    return writer(model)._supports_mm_encoder_outputs()
