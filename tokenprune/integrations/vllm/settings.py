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
from tokenprune.errors import BudgetError, OptionError
from tokenprune.integrations.places import check_places
from tokenprune.integrations.vllm.servable import IN_LLM, KEY, check_method, servable
from tokenprune.registry import build, method_class

__all__ = ["IN_LLM", "KEY", "Setting", "check_method", "check_override", "servable"]

# Raise it whenever the same setting begins to keep other tokens: it is part of every cache key.
ALGORITHM = 1
_LONGEST = 2048  # characters of a setting as JSON
_DEFAULT = object()


@dataclass(frozen=True)
class Setting:
    """What to do with an item.

    method, keep:  acts on the features of the encoder, in the encoder, or (`in_llm`) in the language model; None if all
                   tokens stay.
    pixels, share: acts on a picture before the encoder (see pixels.py); None if pictures stay as they are.
    per:           "image", or "frame" if every frame of a video has `keep` for itself (see `Budget`).
    in_llm:        whether `method` acts inside the language model, and leaves the prompt as it is.
    files:         options of `method` that were given as files: name, path and digest of the content.
    """

    method: Method | None = None
    keep: float | int = 1.0
    pixels: Method | None = None
    share: float = 1.0
    per: str = "image"
    in_llm: bool = False
    files: tuple[tuple[str, str, str], ...] = ()

    @classmethod
    def of(cls, *layers: Any) -> Setting:
        """Merge settings as users write them, the later over the earlier, and check the result.

        A layer that names other methods drops the options of the one before. Raises OptionError, UnknownMethodError
        or BudgetError, which are ValueErrors: a server answers them with HTTP 400.
        """
        return _parsed(tuple(_checked(layer) for layer in layers))

    @property
    def removes_nothing(self) -> bool:
        """Whether every feature of the encoder stays in the prompt."""
        return self.method is None or self.in_llm or Budget.of(self.keep).is_identity()

    def as_dict(self) -> dict[str, Any]:
        """Return the setting with nothing left implicit; `Setting.of` reads it."""
        steps = [(self.pixels, self.share, ()), (self.method, self.keep, self.files)]
        methods = [_written(method, files) for method, _, files in steps if method is not None]
        keeps = [keep for method, keep, _ in steps if method is not None]
        if not methods:
            return {"off": True}
        scope = ({} if self.per == "image" else {"per": self.per}) | ({IN_LLM: True} if self.in_llm else {})
        return (methods[0] | {"keep": keeps[0]} if len(methods) == 1 else {"method": methods, "keep": keeps}) | scope

    def cache_key(self) -> dict[str, Any]:
        """What has to be part of a cache key of whatever was made under this setting."""
        return {"algorithm": ALGORITHM} | self.as_dict() | {name: digest for name, _, digest in self.files}

    def count(self, tokens: int) -> int:
        """How many of `tokens` features of the encoder stay in the prompt: a function of integers, the same in every
        process."""
        return tokens if self.removes_nothing else self.wanted(tokens)

    def wanted(self, tokens: int) -> int:
        """How many of `tokens` visual tokens the method is to keep."""
        (wanted,) = Budget.of(self.keep).resolve([tokens], layer=0, shape=None, text_tokens=0)
        return min(tokens, max(1, self.method.budget(tokens, wanted)))


def check_override(server: Setting, request: Setting) -> None:
    """Raise OptionError if a request asks for another reduction than its server, and one of them is inside the language
    model: its layers are prepared for one."""
    off = request.method is None and request.pixels is None
    if (server.in_llm or request.in_llm) and not off and request != server:
        raise OptionError(
            f"{IN_LLM} is a matter of the whole server, set when it starts: a request can only switch the reduction "
            'off, with {"off": true}'
        )


def _checked(layer: Any) -> str:
    """Return a layer as JSON; raises OptionError for what is no layer at all."""
    if not isinstance(layer, Mapping) or not all(isinstance(key, str) for key in layer):
        raise OptionError(
            f'{KEY} must be an object like {{"method": "divprune", "keep": 0.25}} or {{"off": true}}, '
            f"not {_short(layer)}"
        )
    if "config" in layer:  # a server's own was read before
        raise OptionError(f"{KEY}: config names a file of the server: it belongs to its setting, not to a request")
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
        if "method" in given and _names(given["method"]) != _names(merged.get("method")):
            # A list of budgets belongs to the methods that it was given for.
            kept = ("keep", "per")
            merged = {key: value for key, value in merged.items() if key in kept and not isinstance(value, list)}
        merged = {key: value for key, value in merged.items() if key != "off"} | given
    if merged.pop("off", False):
        return Setting()
    if "method" not in merged:
        raise OptionError(f'{KEY} names no method: {{"method": "divprune", "keep": 0.25}}, for example')
    named, keep = merged.pop("method"), merged.pop("keep", _DEFAULT)
    entries = named if isinstance(named, list) else [named]
    per, in_llm = merged.pop("per", "image"), merged.pop(IN_LLM, False)
    if per not in ("image", "frame"):
        raise OptionError(f'{KEY}: per must be "image" or "frame", not {_short(per)}')
    if not isinstance(in_llm, bool):
        raise OptionError(f"{KEY}: {IN_LLM} must be true or false, not {_short(in_llm)}")
    if not entries:
        raise OptionError(f"{KEY}: method is an empty list: name at least one method")
    if in_llm and len(entries) > 1:
        raise OptionError(f"{KEY}: {IN_LLM} goes with one method, not with {len(entries)}")
    if merged and len(entries) > 1:
        raise OptionError(
            f"{KEY}: options {', '.join(merged)} are ambiguous for several methods: give them with their method, "
            '{"method": [{"method": "dynres", "min_scale": 0.5}, "divprune"]}, for example'
        )
    keeps = keep if isinstance(keep, list) else [keep] * len(entries)
    if len(keeps) != len(entries):
        raise BudgetError(f"{KEY}: keep has {len(keeps)} entries for {len(entries)} methods: give one for each, or one")
    steps = [_step(*pair, merged, in_llm) for pair in zip(entries, keeps, strict=True)]
    check_places([method for method, _, _ in steps])
    pixels = [step for step in steps if step[0].site is Site.PRE_ENCODER]
    others = [step for step in steps if step[0].site is not Site.PRE_ENCODER]
    if len(others) > 1:
        raise OptionError(f"{KEY}: one method can act behind a picture's pixels, not {len(others)}: leave one out")
    method, keep, files = (others or [(None, 1.0, ())])[0]
    if per == "frame" and method is not None and method.site is not Site.PRE_LLM:
        raise OptionError(f'{KEY}: per="frame" goes with methods that act on the features, not with {method.name}')
    return Setting(method, keep, *(pixels or [(None, 1.0)])[0][:2], per, in_llm, files)


def _names(methods: Any) -> list[Any]:
    """The names in what stands under "method"."""
    entries = methods if isinstance(methods, list) else [methods]
    return [entry.get("method") if isinstance(entry, dict) else entry for entry in entries]


def _step(
    entry: Any, keep: Any, options: dict[str, Any], in_llm: bool
) -> tuple[Method, float | int, tuple[tuple[str, str, str], ...]]:
    """Return one of the methods of a setting, its budget and its files (see `Setting`), checked."""
    if isinstance(entry, dict) and "method" in entry:
        options = {key: value for key, value in entry.items() if key != "method"}
        entry = entry["method"]
        if "keep" in options:
            raise OptionError(
                f'{KEY}: keep stands beside the list of methods, {{"method": [...], "keep": [0.5, 0.25]}}'
            )
    if keep is _DEFAULT:
        keep = method_class(entry).default_keep
    if isinstance(keep, (dict, list, str)):
        raise BudgetError(f"{KEY}: keep must be a number, not {keep!r}: a share in (0, 1], or a number of tokens")
    Budget.of(keep)
    try:
        method = build(entry, options)
    except TypeError as error:  # an option of a type that the method itself did not check
        raise OptionError(f"{entry}: {error}") from error
    check_method(method, in_llm)
    if method.site is Site.PRE_ENCODER:
        if isinstance(keep, int):
            raise BudgetError(f"{method.name} takes keep as a share (a float), not {keep}")
        method.check_keep(keep)
    read = [(name, path) for name, path in options.items() if isinstance(path, str) and getattr(method, name) != path]
    return method, keep, tuple((*one, hashlib.sha256(Path(one[1]).read_bytes()).hexdigest()) for one in read)


def _written(method: Method, files: tuple[tuple[str, str, str], ...]) -> dict[str, Any]:
    """A method and its options as a setting holds them."""
    options = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    return {"method": method.name} | options | {name: path for name, path, _ in files}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
