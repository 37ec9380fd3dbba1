# SPDX-License-Identifier: Apache-2.0
"""Settings for vLLM from method objects, and the methods that vLLM serves."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import Any

from tokenprune.budgets import Budget
from tokenprune.errors import OptionError
from tokenprune.integrations.vllm.settings.parse import check_method, parse_setting
from tokenprune.methods.registry import available_methods, build
from tokenprune.selection.method import Method
from tokenprune.settings import Setting


def served(
    method: Method | None = None,
    keep: float = 1.0,
    pixel_method: Method | None = None,
    share: float = 1.0,
    per: str = "image",
    bounds: tuple[float, ...] = (),
) -> Setting:
    """Return the normalized setting with these methods and budgets (an int is a token count)."""
    steps = [(step, budget) for step, budget in ((pixel_method, share), (method, keep)) if step is not None]
    value: dict[str, Any] = {"method": [{"method": step.name, **_options(step)} for step, _ in steps], "per": per}
    value["keep"] = [Budget.from_number(budget).to_json() for _, budget in steps]
    return replace(parse_setting(value), bounds=bounds)


def _options(method: Method) -> dict[str, Any]:
    return {option.name: getattr(method, option.name) for option in fields(method)}


def served_methods(in_llm: bool = False) -> list[str]:
    """Return the names of the methods that vLLM serves with their default options."""
    return [name for name in available_methods() if _is_served(build(name, {}), in_llm)]


@cache  # the check runs each method
def _is_served(method: Method, in_llm: bool) -> bool:
    try:
        check_method(method, in_llm)
    except OptionError:
        return False
    return True
