# SPDX-License-Identifier: Apache-2.0
"""The setting `{"method": ..., "keep": ..., option: ...}` or `{"off": true}`: where it stands, what it may hold."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenprune.base import Method, Site
from tokenprune.budget import Budget
from tokenprune.encoder import EncoderMethod
from tokenprune.errors import BudgetError, OptionError, TokenPruneError
from tokenprune.integrations.vllm.select import probe
from tokenprune.registry import available_methods, build, method_class

KEY = "tokenprune"
# Raise it whenever the same setting begins to keep other tokens: it is part of every cache key.
ALGORITHM = 1
_LONGEST = 2048  # characters of a setting as JSON


@dataclass(frozen=True)
class Setting:
    """What to do with an item. method: None if the reduction is off for it."""

    method: Method | None = None
    keep: float | int = 1.0
    # Options that were given as files: name, path and digest of the content.
    files: tuple[tuple[str, str, str], ...] = ()

    @classmethod
    def of(cls, *layers: Any) -> Setting:
        """Merge settings as users write them, the later over the earlier, and check the result.

        A layer that names another method drops the options of the one before. Raises OptionError, UnknownMethodError
        or BudgetError, which are ValueErrors: a server answers them with HTTP 400.
        """
        return _parsed(tuple(_checked(layer) for layer in layers))

    @property
    def removes_nothing(self) -> bool:
        """Whether every token of any item stays."""
        return self.method is None or Budget.of(self.keep).is_identity()

    def as_dict(self) -> dict[str, Any]:
        """Return the setting with nothing left implicit; `Setting.of` reads it."""
        if self.method is None:
            return {"off": True}
        options = {field.name: getattr(self.method, field.name) for field in dataclasses.fields(self.method)}
        return {"method": self.method.name, "keep": self.keep} | options | {name: path for name, path, _ in self.files}

    def cache_key(self) -> dict[str, Any]:
        """What has to be part of a cache key of whatever was made under this setting."""
        return {"algorithm": ALGORITHM} | self.as_dict() | {name: digest for name, _, digest in self.files}

    def count(self, tokens: int) -> int:
        """How many of `tokens` visual tokens stay: a function of integers, the same in every process."""
        if self.removes_nothing:
            return tokens
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
    keep = merged.pop("keep", method_class(name).default_keep)
    if isinstance(keep, (dict, list, str)):
        raise BudgetError(f"{KEY}: keep must be a number, not {keep!r}: a share in (0, 1], or a number of tokens")
    Budget.of(keep)
    try:
        method = build(name, merged)
    except TypeError as error:  # an option of a type that the method itself did not check
        raise OptionError(f"{name}: {error}") from error
    check_method(method)
    files = [(name, path) for name, path in merged.items() if isinstance(path, str) and getattr(method, name) != path]
    return Setting(
        method, keep, tuple((*file, hashlib.sha256(Path(file[1]).read_bytes()).hexdigest()) for file in files)
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def check_method(method: Method) -> None:
    """Raise OptionError if vLLM cannot serve this method, saying what to use instead."""
    reason = _unservable(method)
    if reason:
        raise OptionError(f"{method.name} cannot be served by vLLM: {reason}. Servable are {', '.join(servable())}")


def _unservable(method: Method) -> str | None:
    if isinstance(method, EncoderMethod):
        if getattr(method, "vtu", "off") != "off":
            return f"vtu={method.vtu} changes attention inside the language model; leave it out"
        why = method.inexact
        return why and f"the prompt's length is settled before the tower runs, and {why}"
    if method.site is not Site.PRE_LLM:
        hint = {
            Site.PRE_ENCODER: "it changes the pictures themselves; let clients send smaller or fewer ones",
        }.get(method.site, "it acts inside the language model, after the prompt's length is settled")
        return f"{hint} ({method.site})"
    if _stages(method) != [method]:
        return (
            "it acts at several places, and only what enters the language model can be changed; switch the others off "
            "where it has an option for that (vscan: stage2=false)"
        )
    if missing := method.reads - {"encoder_attention"}:
        return f"it needs {', '.join(sorted(missing))}, and vLLM's fused layers give no such thing"
    if method.query_aware:
        return "it reads the question, but a picture's features are shared by all prompts that hold it"
    try:
        probe(method)
    except TokenPruneError as error:
        return str(error)
    return None


def _stages(method: Method) -> list[Method]:
    return [stage for stage, _ in method.stages(Budget.of(0.5), 32)]


def servable() -> list[str]:
    """Return the names of the methods that can be served with their default options."""
    return [name for name in available_methods() if _unservable(method_class(name)()) is None]
