# SPDX-License-Identifier: Apache-2.0
"""The methods that vLLM can serve: `tokenprune.abilities` allows them, and they pass a trial run."""

from __future__ import annotations

from functools import lru_cache

from tokenprune import abilities
from tokenprune.base import Method, Site
from tokenprune.errors import OptionError, TokenPruneError
from tokenprune.registry import available_methods, method_class
from tokenprune.setting import IN_LLM
from tokenprune.sites.encoder import EncoderMethod
from tokenprune.sites.units import UnitDropper

__all__ = ["IN_LLM", "KEY", "check_method", "servable"]

KEY = "tokenprune"


def check_method(method: Method, in_llm: bool = False) -> None:
    """Raise OptionError if vLLM cannot serve this method, saying what to use instead."""
    if reason := abilities.unserved(method, in_llm) or _failure(method, in_llm):
        raise OptionError(f"{reason}. Servable are {', '.join(servable(in_llm))}")


def servable(in_llm: bool = False) -> list[str]:
    """Return the names of the methods that can be served with their default options."""
    return [name for name in available_methods() if _is_served(method_class(name), in_llm)]


# The check runs each method, and the answer to a refused request names all of them: without a cache the front end would
# run them each time.
@lru_cache(maxsize=1024)
def _is_served(cls: type[Method], in_llm: bool) -> bool:
    method = cls()
    return not (abilities.unserved(method, in_llm) or _failure(method, in_llm))


def _failure(method: Method, in_llm: bool) -> str | None:
    """Return the reason why a method fails on a small example, or None if it passes."""
    if method.site is Site.PRE_ENCODER or isinstance(method, (EncoderMethod, UnitDropper)):
        return None  # these see pixels, or the tower
    from tokenprune.integrations.vllm.selection import before_llm
    from tokenprune.integrations.vllm.selection import in_llm as inside

    try:
        (inside if in_llm else before_llm).probe(method)
    except TokenPruneError as error:
        return abilities.refusal(method, str(error), in_llm)
    return None
