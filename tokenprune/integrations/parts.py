# SPDX-License-Identifier: Apache-2.0
"""Build the parts of a patch for a model of transformers or timm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenprune.budgets import Budget
from tokenprune.errors import OptionError, UnsupportedSetupError, require
from tokenprune.selection.method import Method

if TYPE_CHECKING:
    from tokenprune.integrations.hf.graphs.settings import Graphs
    from tokenprune.integrations.hf.guard.settings import Guard


def read_guard(guard: Any, processor: Any) -> Guard | None:
    """Return the guard to attach, or None if it is off. Raise OptionError if `guard` is invalid."""
    if guard == "off" or (guard is None and processor is None):
        return None
    from tokenprune.integrations.hf.guard.settings import Guard

    settings: Guard = Guard.from_argument("warn" if guard is None else guard)
    return None if settings.mode == "off" else settings


def build_parts(
    model: Any,
    methods: list[Method],
    budgets: list[Budget],
    record: bool,
    processor: Any,
    guard: Guard | None,
    feature_cache: int | None,
    graphs: bool | str | Graphs | None,
) -> list[Any]:
    """Return the parts to attach to `model`, in order. The last part holds the statistics."""
    from tokenprune.integrations.timm import build_timm_patch, is_timm

    if is_timm(model):
        if processor is not None:
            raise OptionError("A timm model has no processor. Leave out processor=.")
        if guard is not None and guard.mode == "auto":
            raise UnsupportedSetupError('A timm model reads no prompts, so guard="auto" is not supported.')
        if feature_cache is not None:
            raise UnsupportedSetupError("A timm model does not support feature_cache=.")
        if graphs:
            raise UnsupportedSetupError("A timm model does not support graphs=, because it has no decoder.")
        return [build_timm_patch(model, methods, budgets)]
    require("transformers", "tokenprune.patch")
    from tokenprune.integrations.hf.patch import build_hf_parts

    return build_hf_parts(model, methods, budgets, record, processor, guard, feature_cache, graphs)
