# SPDX-License-Identifier: Apache-2.0
"""Check the model, its patch, its cache, and the options of `generate` for a session."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tokenprune.errors import BudgetError, OptionError, UnsupportedModelError, UnsupportedSetupError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.families import Adapter, get_adapter
from tokenprune.integrations.hf.guard.part import GuardPart
from tokenprune.models.families.tested import SESSIONS, SESSIONS_IN_WINDOWS
from tokenprune.selection.method import Site

SINCE = "5.19"  # the oldest tested version of transformers

# Model types with masks from token types. The token types must cover all keys.
MASKS_BY_TYPE = frozenset({"gemma3"})

# Options of `generate` that the session sets.
_SET_BY_SESSION = (
    "input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "inputs", *compat.CACHE_NAMES,
)  # fmt: skip
# Options that must be 1.
_MUST_BE_ONE = ("num_beams", "num_return_sequences")
# Options that replace the cache of the session.
_OTHER_CACHE = (
    "assistant_model", "prompt_lookup_num_tokens", "cache_implementation", "penalty_alpha", "dola_layers",
    "custom_generate", "return_dict_in_generate", "generation_config",
)  # fmt: skip


def get_session_adapter(model: nn.Module) -> Adapter:
    """Return the adapter of a model for a session.

    Raises:
        UnsupportedModelError: If sessions do not support the model type.
        UnsupportedSetupError: If transformers is too old, or the model is in training mode or compiled.
    """
    if compat.is_older_than(SINCE):
        raise UnsupportedSetupError(
            f"Sessions need transformers>={SINCE}, and {compat.VERSION} is installed. Upgrade transformers."
        )
    adapter = get_adapter(model)
    kind = adapter.config.model_type
    cache = DynamicCache(config=adapter.text_config)
    kinds = {type(layer) for layer in cache.layers}
    if other := sorted(cls.__name__ for cls in kinds - {DynamicLayer, DynamicSlidingWindowLayer}):
        raise UnsupportedModelError(
            f"Sessions cannot drop entries from the {', '.join(other)} in the cache of {kind!r}. "
            "Use a model from docs/guides/chats.md."
        )
    if kind not in SESSIONS:
        raise UnsupportedModelError(
            f"Sessions are not tested on model type {kind!r}, and answers could be wrong. Use one of "
            f"{', '.join(list_session_families())}."
        )
    if DynamicLayer not in kinds:
        raise UnsupportedModelError(
            f"All layers of this {kind!r} have sliding windows, so its cache is bounded. Use it without a session."
        )
    if DynamicSlidingWindowLayer in kinds and kind not in SESSIONS_IN_WINDOWS:
        raise UnsupportedModelError(
            f"This {kind!r} has sliding windows. Sessions are only tested on {kind!r} models without them."
        )
    check_mode(model)
    return adapter


def list_session_families() -> list[str]:
    """Return the model types on which sessions are tested, sorted."""
    return sorted(SESSIONS)


def check_window(adapter: Adapter, num_tokens: int, subject: str, advice: str) -> None:
    """Raise BudgetError if a cache would hold fewer entries than the sliding windows of the model.

    The masks of layers with full and with sliding attention would no longer agree.

    Args:
        adapter: Adapter of the model.
        num_tokens: Number of visual tokens.
        subject: Beginning of the error message.
        advice: End of the error message. `{window}` is replaced.
    """
    cache = DynamicCache(config=adapter.text_config)
    window = max((layer.sliding_window for layer in cache.layers if layer.is_sliding), default=0)
    if num_tokens < window:
        raise BudgetError(
            f"{subject} {num_tokens} visual tokens, fewer than the {window} of this model's sliding windows: "
            + advice.format(window=window)
        )


def check_patch(attachment: Any, adapter: Adapter) -> None:
    """Raise UnsupportedSetupError for a patch that a session does not support.

    A patch must prune before the decoder, each block on its own, without the question.

    Args:
        attachment: Attachment of the patched model.
        adapter: Adapter of the model.
    """
    for method, budget in zip(attachment.methods, attachment.budgets, strict=True):
        if method.site is not Site.PRE_LLM:
            reason = f"{method.name} acts {method.site.description}"
        elif method.weighs_attention:
            reason = f"{method.name} weighs attention by merged tokens, which a session can drop"
        elif method.query_aware:
            reason = f"{method.name} reads the question, which comes after the frames of a session"
        elif budget.ages is not None or budget.per == "prompt":
            reason = f"{budget!r} depends on all images of a prompt, and a session processes blocks"
        elif budget.video is not None and budget.video.per_second is None:
            reason = f"{budget!r} is a budget per video, and a session processes blocks"
        else:
            continue
        break
    else:
        if attachment.feature_cache is not None:
            reason = "feature_cache= keeps the features of dropped frames"
        elif any(isinstance(part, GuardPart) for part in attachment.engine.parts):
            reason = "the guard reads the question, which comes after the frames of a session (pass guard='off')"
        elif adapter.config.model_type in MASKS_BY_TYPE:
            reason = f"the token type masks of {adapter.config.model_type!r} are not tested with pruned blocks"
        else:
            return
    raise UnsupportedSetupError(
        f"A session does not support this patch: {reason}. Call tokenprune.unpatch(model) first, or patch with "
        "divprune or a similar method."
    )


def check_mode(model: nn.Module) -> None:
    """Raise UnsupportedSetupError for a model in training mode, or a compiled model."""
    if model.training:
        raise UnsupportedSetupError("The model is in training mode. Call model.eval() first.")
    if getattr(model, "_compiled_call_impl", None) is not None or type(model).__name__ == "OptimizedModule":
        raise UnsupportedSetupError(
            "The model is compiled, and the blocks of a session have different shapes. Use it without torch.compile."
        )


def get_placement(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return the device and dtype of a model's first parameter."""
    first = next(model.parameters())
    return first.device, first.dtype


def check_generate_options(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `generate` for a question, or raise OptionError for an unsupported option."""
    if names := sorted(set(options) & {*_SET_BY_SESSION}):
        raise OptionError(f"{names[0]} is set by the session. Leave it out.")
    if other := sorted(name for name in _OTHER_CACHE if options.get(name) is not None):
        raise OptionError(f"{other[0]} is not supported by a session, which uses its own cache. Leave it out.")
    if options.get("use_cache") is False:
        raise OptionError("use_cache=False is not supported by a session, which uses its own cache. Leave it out.")
    for name in _MUST_BE_ONE:
        value = options.get(name, getattr(model.generation_config, name, None)) or 1
        if value != 1:
            raise OptionError(f"{name}={value} is not supported by a session. Pass {name}=1, and ask several times.")
    return options
