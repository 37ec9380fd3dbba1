# SPDX-License-Identifier: Apache-2.0
"""Checks before a session starts or goes on: the model, its cache, and the options of `generate`."""

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

SINCE = "5.19"  # the oldest transformers on which sessions are tested

# Model types whose masks transformers makes from token types, which must cover all keys.
MASKS_BY_TYPE = frozenset({"gemma3"})

# Options of `generate` that a session gives itself, or that need another cache than its own.
_OWN = (
    "input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "inputs", *compat.CACHE_NAMES,
)  # fmt: skip
_ONE = ("num_beams", "num_return_sequences")
_OTHER_WAYS = (
    "assistant_model", "prompt_lookup_num_tokens", "cache_implementation", "penalty_alpha", "dola_layers",
    "custom_generate", "return_dict_in_generate", "generation_config",
)  # fmt: skip


def adapter_of(model: nn.Module) -> Adapter:
    """Return the adapter of a model with which a session can be held; raises UnsupportedModelError or
    UnsupportedSetupError."""
    if compat.is_older_than(SINCE):
        raise UnsupportedSetupError(
            f"sessions need transformers {SINCE}, and this is {compat.VERSION}: pip install 'transformers>={SINCE}'"
        )
    adapter = get_adapter(model)
    kind = adapter.config.model_type
    cache = DynamicCache(config=adapter.text_config)
    kinds = {type(layer) for layer in cache.layers}
    if other := sorted(one.__name__ for one in kinds - {DynamicLayer, DynamicSlidingWindowLayer}):
        raise UnsupportedModelError(
            f"model type {kind!r} keeps {', '.join(other)} in its cache, from which no entries can be taken: "
            f"sessions are for {', '.join(session_families())}"
        )
    if kind not in SESSIONS:
        raise UnsupportedModelError(
            f"sessions are not tested on model type {kind!r}: they are for {', '.join(session_families())}. Answers "
            "of others could be wrong in silence"
        )
    if DynamicLayer not in kinds:
        raise UnsupportedModelError(f"all layers of this {kind!r} have sliding windows: its cache is bounded as it is")
    if DynamicSlidingWindowLayer in kinds and kind not in SESSIONS_IN_WINDOWS:
        raise UnsupportedModelError(f"this {kind!r} has sliding windows, on which its sessions are not tested")
    check_mode(model)
    return adapter


def session_families() -> list[str]:
    """Return the model types with which sessions are tested, sorted."""
    return sorted(SESSIONS)


def check_window(adapter: Adapter, left: int, who: str, way_out: str) -> None:
    """Raise BudgetError where fewer entries are left than a sliding window has: masks of both kinds of layer then no
    longer agree. who: whose doing that is. way_out: advice, with a place for `{window}`."""
    cache = DynamicCache(config=adapter.text_config)
    window = max((layer.sliding_window for layer in cache.layers if layer.is_sliding), default=0)
    if left < window:
        raise BudgetError(
            f"{who} {left} visual tokens, fewer than the {window} of this model's sliding windows: "
            + way_out.format(window=window)
        )


def check_patch(attachment: Any, adapter: Adapter) -> None:
    """Raise UnsupportedSetupError for a patch that does more than choose in each block by itself, at the decoder's
    entry. attachment: what `tokenprune.patch` left on the model."""
    for method, budget in zip(attachment.methods, attachment.budgets, strict=True):
        if method.site is not Site.PRE_LLM:
            reason = f"{method.name} acts {method.site.description}"
        elif method.weighs_attention:
            reason = f"{method.name} weighs attention by what was merged, of which a session forgets a part"
        elif method.query_aware:
            reason = f"{method.name} reads the question, which a session hears after its frames"
        elif budget.ages is not None or budget.per == "prompt":
            reason = f"{budget!r} depends on other images of a prompt, which a session sees block by block"
        elif budget.video is not None and budget.video.per_second is None:
            reason = f"{budget!r} is for a whole video, which a session sees block by block"
        else:
            continue
        break
    else:
        if attachment.feature_cache is not None:
            reason = "feature_cache= keeps what a session drops"
        elif any(isinstance(part, GuardPart) for part in attachment.engine.parts):
            reason = "its guard reads questions, which a session hears after its frames (guard='off' leaves it out)"
        elif adapter.config.model_type in MASKS_BY_TYPE:
            reason = f"the masks of {adapter.config.model_type!r} by type of token are not tested with pruned blocks"
        else:
            return
    raise UnsupportedSetupError(
        f"a session does not go with this patch: {reason}. Call tokenprune.unpatch(model) first, patch with a method "
        "that acts before the language model and reads no question, as divprune does, or load the model once more"
    )


def check_mode(model: nn.Module) -> None:
    """Raise UnsupportedSetupError for a model that is in training or compiled."""
    if model.training:
        raise UnsupportedSetupError("the model is in training mode: call model.eval() first")
    if getattr(model, "_compiled_call_impl", None) is not None or type(model).__name__ == "OptimizedModule":
        raise UnsupportedSetupError(
            "the model is compiled, and each block of a session has another shape: use the model without torch.compile"
        )


def place_of(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return device and dtype of a model's first parameter."""
    first = next(model.parameters())
    return first.device, first.dtype


def generate_options(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `generate` for a question; raises OptionError for those that a session cannot follow."""
    if own := sorted(set(options) & {*_OWN}):
        raise OptionError(f"{own[0]} of a question is given by the session: leave it out")
    if other := sorted(name for name in _OTHER_WAYS if options.get(name) is not None):
        raise OptionError(f"{other[0]} does not go with a session, which answers from its own cache: leave it out")
    if options.get("use_cache") is False:
        raise OptionError("use_cache=False does not go with a session, which answers from its own cache: leave it out")
    for name in _ONE:
        number = options.get(name, getattr(model.generation_config, name, None)) or 1
        if number != 1:
            raise OptionError(f"{name}={number} does not go with a session: pass {name}=1, and ask several times")
    return options
