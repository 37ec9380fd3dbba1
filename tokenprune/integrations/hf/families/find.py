# SPDX-License-Identifier: Apache-2.0
"""Select the adapter of a model."""

from __future__ import annotations

import os

from torch import nn

from tokenprune.errors import UnsupportedModelError, shorten
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.families.base import Adapter
from tokenprune.integrations.hf.families.registry import ADAPTERS, suggest_families
from tokenprune.integrations.hf.families.retrieval import find_outer_model
from tokenprune.integrations.shared.versions import check_tested
from tokenprune.models.families import PIXELS_ONLY, REFUSED, SUPPORTED


def get_adapter(model: nn.Module) -> Adapter:
    """Build the adapter of a model.

    Args:
        model: Model of transformers, or a wrapper of it.

    Raises:
        UnsupportedModelError: If the model is not supported.
        UnsupportedSetupError: If transformers is newer than the tested versions.

    Examples:
        >>> get_adapter(model).config.model_type == model.config.model_type
        True
    """
    model = find_outer_model(model)
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind is None and type(model).__name__ in ("DataParallel", "DistributedDataParallel"):
        raise UnsupportedModelError(
            f"{type(model).__name__} wraps the model. Patch the model before wrapping it, and pass .module to "
            "tokenprune.stats and tokenprune.unpatch."
        )
    if isinstance(model, (str, os.PathLike)):
        raise UnsupportedModelError(
            f"{shorten(str(model))} is a name or a path, not a model. Load it first, for example with "
            "AutoModelForImageTextToText.from_pretrained(...)."
        )
    if kind is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a transformers model, because config.model_type is missing. "
            f"{suggest_families()}"
        )
    check_tested("transformers", str(compat.VERSION), compat.NEWEST)
    since = SUPPORTED[kind].since if kind in SUPPORTED else None
    if since is not None and compat.is_older_than(since):
        raise UnsupportedModelError(
            f"Model type {kind!r} needs transformers {since} or later, and this is transformers {compat.VERSION}. "
            f"Run pip install 'transformers>={since}'."
        )
    if kind in REFUSED and kind not in PIXELS_ONLY and kind not in ADAPTERS:
        raise UnsupportedModelError(f"Model type {kind!r} is not supported: {REFUSED[kind]}. {suggest_families(kind)}")
    try:
        return ADAPTERS.get(kind, Adapter)(model)
    except UnsupportedModelError:
        if (missing := _describe_missing_modality(model)) is None:
            raise
        raise UnsupportedModelError(
            f"{type(model).__name__} is {missing}. Pass a whole vision-language model, such as "
            "LlavaForConditionalGeneration."
        ) from None


def _describe_missing_modality(model: nn.Module) -> str | None:
    """Describe a model that has only text or only images. Return None if it may have both."""
    modalities = getattr(model, "input_modalities", ())
    modalities = {modalities} if isinstance(modalities, str) else set(modalities)
    # Remote code often leaves `input_modalities` at its default, "text".
    if modalities == {"text"} and not hasattr(model.config, "vision_config"):
        return "a text model without visual tokens"
    if modalities and modalities <= {"image", "video"}:
        return "a vision model without a language model"
    return None
