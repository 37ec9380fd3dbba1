# SPDX-License-Identifier: Apache-2.0
"""Check targets and drafts of assisted generation before anything changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.generation import GenerationMixin

from tokenprune.errors import OptionError, UnsupportedModelError
from tokenprune.integrations.hf.families import get_adapter

# Config fields that determine the number of placeholders of an image.
_GEOMETRY = (
    "patch_size", "image_size", "spatial_merge_size", "temporal_patch_size", "tokens_per_second", "image_seq_length",
    "image_grid_pinpoints", "scale_factor", "downsample_ratio", "mm_tokens_per_image", "pooling_kernel_size",
    "vision_feature_select_strategy", "projector_patch_to_query_dict", "downsample_factor",
)  # fmt: skip


def find_generator(model: nn.Module) -> GenerationMixin:
    """Return the module with `generate`: `model`, or the model inside a wrapper. Raises UnsupportedModelError."""
    for module in model.modules():
        if isinstance(module, GenerationMixin):
            return module
    raise UnsupportedModelError(
        f"{type(model).__name__} is not a generative model of transformers. Drafts need a model with generate()."
    )


def check_target(model: nn.Module) -> None:
    """Raise UnsupportedModelError if assisted generation does not support the model."""
    get_adapter(model)  # raises for unknown model types
    generator = find_generator(model)
    kind = generator.config.model_type
    if type(generator).generate is not GenerationMixin.generate:
        raise UnsupportedModelError(
            f"{kind!r} overrides generate(), which assisted generation does not support. Use tokenprune.patch instead."
        )
    if generator.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{kind!r} is an encoder-decoder model. Drafts need a decoder-only model.")
    if any(getattr(module, "_is_stateful", False) for module in generator.modules()):
        raise UnsupportedModelError(
            f"{kind!r} has stateful layers, which cannot undo rejected drafts. Use tokenprune.patch instead."
        )


def check_pair(model: nn.Module, draft: nn.Module) -> None:
    """Raise OptionError if `draft` does not use the same prompts and tokens as `model`."""
    if draft is model:
        raise OptionError("draft= is the model itself. To share its weights, leave it out.")
    check_target(draft)
    draft_config, model_config = find_generator(draft).config, find_generator(model).config
    sizes = [config.get_text_config().vocab_size for config in (model_config, draft_config)]
    if sizes[0] != sizes[1]:
        raise OptionError(
            f"The model has {sizes[0]} token ids and the draft {sizes[1]}. Use a draft with the same vocabulary."
        )
    ids = [get_adapter(module).placeholders for module in (model, draft)]
    if ids[0] != ids[1]:
        raise OptionError(f"The placeholders of the model are {ids[0]}, and of the draft {ids[1]}. They must be equal.")
    for name, model_value, draft_value in _find_differences(model_config, draft_config):
        raise OptionError(
            f"{name} is {model_value} for the model and {draft_value} for the draft, so their images have different "
            "numbers of tokens. Use a draft of the same family."
        )
    if encodes_ahead(model) != encodes_ahead(draft):
        raise OptionError(
            f"{model_config.model_type} and {draft_config.model_type} get their images in different ways. Use a draft "
            "of the same family."
        )


def _find_differences(first: Any, second: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, first value, second value) of the fields that change the number of tokens of an image."""
    pairs: list[tuple[str, Any, Any]] = [("", first, second)]
    pairs.append(("vision_config.", getattr(first, "vision_config", None), getattr(second, "vision_config", None)))
    for prefix, first_config, second_config in pairs:
        for name in _GEOMETRY:
            values = getattr(first_config, name, None), getattr(second_config, name, None)
            if None not in values and values[0] != values[1]:
                yield prefix + name, *values


def encodes_ahead(model: nn.Module) -> bool:
    """Return whether `generate` encodes images before the first forward, which then gets no pixels."""
    return find_generator(model)._supports_mm_encoder_outputs()
