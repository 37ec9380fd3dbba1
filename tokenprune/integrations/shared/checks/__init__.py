# SPDX-License-Identifier: Apache-2.0
"""Check a method against a family, an engine and a kind of cache before anything changes.

`patch()`, the vLLM plugin, `tokenprune families`, `recommend` and the generated pages call these functions. The facts
come from tables: families and vision towers in `models.families`, observables in their own classes, caches in `hf.py`.
Checks that need a loaded model, a server or the tensors of a call are in other files.
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
    """Return why a method is not supported, or None if it is supported.

    Args:
        method: The method. In transformers all its stages must be supported, or all stages of its preferred variant.
        family: A model type, an architecture of vLLM, or a row of the family table. None checks the method only.

    Returns:
        A message for the user, or None.

    Examples:
        >>> find_unsupported_reason(tokenprune.method("divprune"), "llava") is None
        True
        >>> print(find_unsupported_reason(tokenprune.method("fastv"), engine=Backend.VLLM))
        fastv cannot be served by vLLM: it acts inside the language model...
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
    """Raise an error if a stage of a method is not supported; see `find_unsupported_reason`.

    Args:
        family: A model type, an architecture of vLLM, or a row of the family table.
        acts: False for a stage whose budget keeps all tokens. Such a stage needs nothing from the family.

    Raises:
        TokenPruneError: The error, of the class that fits the reason.

    Examples:
        >>> check(tokenprune.method("divprune"), "llava")
    """
    if (error := _find_error(method, family, engine, DYNAMIC, config, acts)) is not None:
        raise error


def check_cache(site: Site, family: Family | str, cache: Cache, name: str = "A method") -> None:
    """Raise UnsupportedSetupError if methods at `site` are not supported on a family with a kind of cache.

    Examples:
        >>> check_cache(Site.PRE_LLM, "llava", STATIC)
    """
    if (error := hf.find_cache_error(site, family, cache, name)) is not None:
        raise error


def check_together(methods: Sequence[Method]) -> None:
    """Raise OptionError if `methods`, in the order in which they act, cannot be combined in one model.

    Examples:
        >>> check_together([tokenprune.method("tome"), tokenprune.method("divprune")])
    """
    if (error := hf.find_combination_error(methods)) is not None:
        raise error


def _find_error(
    method: Method, family: Family | str | None, engine: Backend, cache: Cache, config: Any, acts: bool
) -> TokenPruneError | None:
    if engine is Backend.HF:
        error = hf.find_error(method, family, config, acts)
        return error or hf.find_cache_error(method.site, family, cache, method.name)
    return vllm.find_error(method, family, engine is Backend.VLLM_IN_LLM, config)
