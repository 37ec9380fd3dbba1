# SPDX-License-Identifier: Apache-2.0
"""Names of keys in a setting for vLLM; and the methods that it can serve: `shared.checks` allows them, and they
pass a trial run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

from tokenprune.errors import OptionError, TokenPruneError
from tokenprune.integrations.shared import checks
from tokenprune.methods.registry import available_methods, method_class
from tokenprune.selection.method import Method, Site
from tokenprune.selection.sites.encoder import EncoderMethod
from tokenprune.selection.sites.units import UnitDropper

KEY = "tokenprune"
NOTHING: Mapping[str, Any] = {}  # a request's value of our key, where it has none
FREE_KV = "experimental_free_kv"
RULES = ("min_keep", "methods", "rollout", "on_error")  # of a server's requests, or of those of one profile
ADD_ON = ("profiles", *RULES, "callers", "overload", "reload")  # keys that `tokenprune.integrations.vllm.gateway` reads
BESIDE = (*ADD_ON, "log", FREE_KV, "positions")  # keys of a server's setting, of no request's
PROFILE = "profile"  # the key by which a request names one of the server's profiles
DEFAULT = "default"  # the profile that every server has: its own setting
REQUEST = "request"  # label in metrics for a setting that a request wrote itself


def check_method(method: Method, in_llm: bool = False) -> None:
    """Raise OptionError if vLLM cannot serve this method, saying what to use instead."""
    if reason := checks.find_unserved_reason(method, in_llm) or _failure(method, in_llm):
        raise OptionError(reason)


def servable(in_llm: bool = False) -> list[str]:
    """Return the names of the methods that can be served with their default options."""
    return [name for name in available_methods() if _is_served(cast(Any, method_class(name)), in_llm)]


# The check runs each method.
@lru_cache(maxsize=1024)
def _is_served(cls: type[Method], in_llm: bool) -> bool:
    method = cls()
    return not (checks.find_unserved_reason(method, in_llm) or _failure(method, in_llm))


def _failure(method: Any, in_llm: bool) -> str | None:
    """Return the reason why a method fails on a small example, or None if it passes."""
    if method.site is Site.PRE_ENCODER or isinstance(method, (EncoderMethod, UnitDropper)):
        return None  # these see pixels, or the tower
    from tokenprune.integrations.vllm.selection import before_llm
    from tokenprune.integrations.vllm.selection import in_llm as inside

    try:
        (inside if in_llm else before_llm).probe(method)
    except TokenPruneError as error:
        return checks.format_refusal(method, str(error), in_llm)
    return None
