# SPDX-License-Identifier: Apache-2.0
"""The check of method x family x engine x cache, before anything changes.

patch(), the vLLM plugin, `tokenprune families`, `recommend` and the pages call it. Its facts come from tables: of a
family and its vision tower in `models.families`, of an observable in its own class, of a cache in `hf.py`. Checks that
need a loaded model, a server or the tensors of a call are beside these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenprune.budgets import Budget
from tokenprune.errors import TokenPruneError
from tokenprune.integrations.shared.checks import hf, vllm
from tokenprune.integrations.shared.checks.hf import DYNAMIC, STATIC, Cache
from tokenprune.integrations.shared.checks.reading import AFTER_THE_TOWER, reads_tower
from tokenprune.integrations.shared.checks.vllm import describe_unserved_family, find_unserved_reason, format_refusal
from tokenprune.models.families import Family
from tokenprune.selection.method import Method, Site
from tokenprune.selection.observable import Backend

__all__ = [
    "AFTER_THE_TOWER",
    "DYNAMIC",
    "STATIC",
    "Cache",
    "check",
    "check_cache",
    "check_together",
    "describe_unserved_family",
    "find_unserved_reason",
    "find_unsupported_reason",
    "format_refusal",
    "reads_tower",
]


def find_unsupported_reason(
    method: Method, family: Family | str | None = None, engine: Backend = Backend.HF, cache: Cache = DYNAMIC,
    config: Any = None,
) -> str | None:  # fmt: skip
    """Return why `method` is not supported on `family` in `engine` with `cache`, or None if it is supported.

    Args:
        method: The method. In transformers all its stages must be supported, or those of its preferred variant.
        family: A model type, an architecture of vLLM, or a row. None asks about the method only.
        engine: The engine that runs the model.
        cache: The kind of cache.
        config: The model's config, for facts about its vision tower.
    """
    if engine is not Backend.HF:
        error = _find_error(method, family, engine, cache, config, acts=True)
        return None if error is None else str(error)
    preferred = method.preferred
    if preferred != method and find_unsupported_reason(preferred, family, engine, cache, config) is None:
        return None
    stages = [stage for stage, _ in method.stages(Budget.from_keep(0.5), 32)]
    errors = (_find_error(stage, family, engine, cache, config, acts=True) for stage in stages)
    return next((str(error) for error in errors if error is not None), None)


def check(
    method: Method, family: Family | str, engine: Backend = Backend.HF, config: Any = None, acts: bool = True
) -> None:
    """Raise an error if one stage of a method is not supported; see `find_unsupported_reason`.

    acts: False for a stage whose budget removes nothing. It then needs nothing from the family.
    """
    if (error := _find_error(method, family, engine, DYNAMIC, config, acts)) is not None:
        raise error


def check_cache(site: Site, family: Family | str, cache: Cache, name: str = "A method") -> None:
    """Raise UnsupportedSetupError if methods at `site` are not supported on `family` with `cache`."""
    if (error := hf.find_cache_error(site, family, cache, name)) is not None:
        raise error


def check_together(methods: Sequence[Method]) -> None:
    """Raise OptionError if `methods`, in the order in which data meets them, cannot be combined in one model."""
    if (error := hf.find_combination_error(methods)) is not None:
        raise error


def _find_error(
    method: Method, family: Family | str | None, engine: Backend, cache: Cache, config: Any, acts: bool
) -> TokenPruneError | None:
    if engine is Backend.HF:
        error = hf.find_error(method, family, config, acts)
        return error or hf.find_cache_error(method.site, family, cache, method.name)
    return vllm.find_error(method, family, engine is Backend.VLLM_IN_LLM, config)
