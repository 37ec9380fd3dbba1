# SPDX-License-Identifier: Apache-2.0
"""The setting `{"method": ..., "keep": ..., option: ...}` or `{"off": true}`: where it stands, what it may hold."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tokenprune.base import Method, Site
from tokenprune.budget import Budget
from tokenprune.errors import BudgetError, OptionError, TokenPruneError
from tokenprune.integrations.vllm.select import probe
from tokenprune.registry import available_methods, build, method_class

KEY = "tokenprune"
IN_LLM = "experimental_in_llm"  # the key that allows methods inside the language model
# Raise it whenever the same setting begins to keep other tokens: it is part of every cache key.
ALGORITHM = 1
_LONGEST = 2048  # characters of a setting as JSON


@dataclass(frozen=True)
class Setting:
    """What to do with an item. method: None if the reduction is off for it. in_llm: whether it acts inside the language
    model, and leaves the prompt as it is."""

    method: Method | None = None
    keep: float | int = 1.0
    in_llm: bool = False

    @classmethod
    def of(cls, *layers: Any) -> Setting:
        """Merge settings as users write them, the later over the earlier, and check the result.

        A layer that names another method drops the options of the one before. Raises OptionError, UnknownMethodError
        or BudgetError, which are ValueErrors: a server answers them with HTTP 400.
        """
        return _parsed(tuple(_checked(layer) for layer in layers))

    @property
    def removes_nothing(self) -> bool:
        """Whether every token of any item stays in the prompt."""
        return self.method is None or self.in_llm or Budget.of(self.keep).is_identity()

    def as_dict(self) -> dict[str, Any]:
        """Return the setting with nothing left implicit; `Setting.of` reads it."""
        if self.method is None:
            return {"off": True}
        in_llm = {IN_LLM: True} if self.in_llm else {}
        return {"method": self.method.name, "keep": self.keep} | in_llm | dataclasses.asdict(self.method)

    def cache_key(self) -> dict[str, Any]:
        """What has to be part of a cache key of whatever was made under this setting."""
        return {"algorithm": ALGORITHM} | self.as_dict()

    def count(self, tokens: int) -> int:
        """How many of `tokens` visual tokens stay in the prompt: a function of integers, the same in every process."""
        return tokens if self.removes_nothing else self.wanted(tokens)

    def wanted(self, tokens: int) -> int:
        """How many of `tokens` visual tokens the method is to keep."""
        (wanted,) = Budget.of(self.keep).resolve([tokens], layer=0, shape=None, text_tokens=0)
        return min(tokens, max(1, self.method.budget(tokens, wanted)))


def _checked(layer: Any) -> str:
    """Return a layer as JSON; raises OptionError for what is no layer at all."""
    if not isinstance(layer, Mapping) or not all(isinstance(key, str) for key in layer):
        raise OptionError(
            f'{KEY} must be an object like {{"method": "divprune", "keep": 0.25}} or {{"off": true}}, '
            f"not {_short(layer)}"
        )
    try:
        text = json.dumps(dict(layer))
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"{KEY} must hold what JSON can hold: {error}") from error
    if len(text) > _LONGEST:
        raise OptionError(f"{KEY} is {len(text)} characters long; at most {_LONGEST} are read")
    off = layer.get("off", False)
    if not isinstance(off, bool):
        raise OptionError(f"{KEY}: off must be true or false, not {_short(off)}")
    if off and len(layer) > 1:
        raise OptionError(f"{KEY}: off stands alone; leave out {', '.join(sorted(set(layer) - {'off'}))}")
    return text


@lru_cache(maxsize=256)
def _parsed(layers: tuple[str, ...]) -> Setting:
    # A request is looked at several times, and requests are much alike.
    merged: dict[str, Any] = {}
    for layer in layers:
        given = json.loads(layer)
        if given.get("method", merged.get("method")) != merged.get("method"):
            merged = {key: value for key, value in merged.items() if key == "keep"}
        merged = {key: value for key, value in merged.items() if key != "off"} | given
    if merged.pop("off", False):
        return Setting()
    if "method" not in merged:
        raise OptionError(f'{KEY} names no method: {{"method": "divprune", "keep": 0.25}}, for example')
    name = merged.pop("method")
    in_llm = merged.pop(IN_LLM, False)
    if not isinstance(in_llm, bool):
        raise OptionError(f"{KEY}: {IN_LLM} must be true or false, not {_short(in_llm)}")
    keep = merged.pop("keep", method_class(name).default_keep)
    if isinstance(keep, (dict, list, str)):
        raise BudgetError(f"{KEY}: keep must be a number, not {keep!r}: a share in (0, 1], or a number of tokens")
    Budget.of(keep)
    try:
        method = build(name, merged)
    except TypeError as error:  # an option of a type that the method itself did not check
        raise OptionError(f"{name}: {error}") from error
    check_method(method, in_llm)
    return Setting(method, keep, in_llm)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def check_override(server: Setting, request: Setting) -> None:
    """Raise OptionError if a request asks for another reduction than its server, and one of them is inside the language
    model: its layers are prepared for one."""
    if (server.in_llm or request.in_llm) and request.method is not None and request != server:
        raise OptionError(
            f"{IN_LLM} is a matter of the whole server, set when it starts: a request can only switch the reduction "
            'off, with {"off": true}'
        )


def check_method(method: Method, in_llm: bool = False) -> None:
    """Raise OptionError if vLLM cannot serve this method, saying what to use instead."""
    reason = _unservable_in_llm(method) if in_llm else _unservable(method)
    if reason:
        key = f" with {IN_LLM}" if in_llm else ""
        raise OptionError(
            f"{method.name} cannot be served by vLLM{key}: {reason}. Servable are {', '.join(servable(in_llm))}"
        )


def _unservable_in_llm(method: Method) -> str | None:
    if method.site is not Site.IN_LLM:
        return f"it does not act inside the language model ({method.site}); leave {IN_LLM} out"
    if type(method).stages is not Method.stages:
        return "it cuts at several layers, and one is what there is"
    from tokenprune.integrations.vllm.in_llm.select import probe

    try:
        probe(method)
    except TokenPruneError as error:
        return str(error)
    return None


def _unservable(method: Method) -> str | None:
    if method.site is Site.IN_LLM and _unservable_in_llm(method) is None:
        return (
            f'it acts inside the language model, after the prompt\'s length is settled; "{IN_LLM}": true allows it, '
            "with limits (docs/serving.md)"
        )
    if method.site is not Site.PRE_LLM:
        hint = {
            Site.PRE_ENCODER: "it changes the pictures themselves; let clients send smaller or fewer ones",
            Site.IN_ENCODER: "it acts inside the vision tower",
        }.get(method.site, "it acts inside the language model, after the prompt's length is settled")
        return f"{hint} ({method.site})"
    if type(method).stages is not Method.stages:
        return "it acts at several places, and only what enters the language model can be changed"
    if method.needs:
        return f"it needs {', '.join(sorted(method.needs))}, and vLLM's fused layers give no such thing"
    if method.query_aware:
        return "it reads the question, but a picture's features are shared by all prompts that hold it"
    try:
        probe(method)
    except TokenPruneError as error:
        return str(error)
    return None


def servable(in_llm: bool = False) -> list[str]:
    """Return the names of the methods that can be served with their default options."""
    reason = _unservable_in_llm if in_llm else _unservable
    return [name for name in available_methods() if reason(method_class(name)()) is None]
