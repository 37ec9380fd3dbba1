# SPDX-License-Identifier: Apache-2.0
"""Tell our arguments of `--model_args` from those of the model that is patched."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

import tokenprune
from tokenprune.base import Method, Site
from tokenprune.budget import Budget
from tokenprune.errors import OptionError
from tokenprune.registry import method_class

UNPATCHED = ("none", "unpatched")
# What else `keep` may mean; see `Budget`.
_TARGETS = ("average_tokens", "kv_share", "flops_share")
_BUDGET = ("keep", *_TARGETS, "per")
_PASSED = ("config", "guard")  # to `tokenprune.patch`, as they are
OURS = ("method", *_BUDGET, *_PASSED)


@dataclass(frozen=True)
class Setting:
    """What `--model_args` say. patch: arguments of `tokenprune.patch`, None for the unpatched model; methods: what it
    patches with; rest: arguments of the model that is patched."""

    patch: dict[str, Any] | None
    methods: list[Method]
    rest: dict[str, Any]

    @property
    def acts_on_pixels(self) -> bool:
        return any(method.site is Site.PRE_ENCODER for method in self.methods)


def read(arguments: dict[str, Any], base: str, accepted: Collection[str], anything: bool = False) -> Setting:
    """Return the `Setting` that arguments, without `base`, describe.

    accepted: names of the arguments that the base takes; a name that an option has too is the base's argument, and
    `method.option=...` the option. anything: whether the base may take others as well.
    Raises UnknownMethodError, OptionError or BudgetError, before any weights are loaded.
    """
    ours = {name: arguments[name] for name in OURS if name in arguments}
    names = _names(ours)
    options: dict[str, dict[str, Any]] = {name: {} for name in names}
    rest = {}
    for name, value in arguments.items():
        if name in ours:
            continue
        owners = _owners(name, names)
        if name in accepted or (anything and not owners):
            rest[name] = value
        elif len(owners) == 1:
            option = name.rpartition(".")[2]
            options[owners[0]][option] = _typed(owners[0], option, value)
        elif owners:
            raise OptionError(
                f"{name}={value} is an option of {' and '.join(owners)}: write {owners[0]}.{name}={value} for one"
            )
        else:
            raise OptionError(_unknown(name, names, base, accepted))
    methods = [tokenprune.method(name, **options[name]) for name in names]
    if "config" in ours:
        from tokenprune.config import read_config

        methods = read_config(ours["config"]).steps()[0]
    return Setting(_patch(ours, methods), methods, rest)


def _names(ours: dict[str, Any]) -> list[str]:
    method = ours.get("method")
    if method is None and "config" not in ours:
        raise OptionError(
            "method= is missing: name one (`tokenprune methods` lists them), several with + between them, or none for "
            "the unpatched model"
        )
    if "config" in ours and (extra := [name for name in ours if name not in _PASSED]):
        raise OptionError(f"config= names method and budget already: leave out {', '.join(extra)}, or config=")
    if method is None:
        return []
    if str(method) in UNPATCHED:
        if extra := [name for name in ours if name != "method"]:
            raise OptionError(f"method={method} leaves the model as it is: leave out {', '.join(extra)} too")
        return []
    names = str(method).split("+")
    for name in names:
        method_class(name)  # raises with close matches
    if len(set(names)) < len(names):
        raise OptionError(f"method={method} names a method twice")
    return names


def _owners(name: str, methods: list[str]) -> list[str]:
    """The methods that have the option `name`, or the one that it names in front of a dot."""
    method, dot, option = name.rpartition(".")
    owners = [one for one in methods if option in {field.name for field in fields(method_class(one))}]
    return [one for one in owners if one == method] if dot else owners


def _typed(method: str, option: str, value: Any) -> Any:
    """A comma would end the argument, so the entries of a list have + between them."""
    if not isinstance(tokenprune.method_info(method).options[option], tuple):
        return value
    return tuple(_number(part) for part in str(value).split("+"))


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _unknown(name: str, methods: list[str], base: str, accepted: Collection[str]) -> str:
    options = [field.name for method in methods for field in fields(method_class(method))]
    close = difflib.get_close_matches(name, [*OURS, *options, *accepted], n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    told = f"options of {'+'.join(methods)} are {', '.join(options) or '(none)'}; " if methods else ""
    return f"there is no argument {name!r}: {hint}{told}{base} takes {', '.join(sorted(accepted))}"


def _patch(ours: dict[str, Any], methods: list[Method]) -> dict[str, Any] | None:
    if not methods:
        return None
    passed = {name: ours[name] for name in _PASSED if name in ours}
    keep = _keep({name: ours[name] for name in _BUDGET if name in ours}, len(methods))
    named = {} if "config" in ours else {"method": methods}
    return named | ({} if keep is None else {"keep": keep}) | passed


def _keep(given: dict[str, Any], methods: int) -> Any:
    """What `patch` gets as `keep`: a Budget for each method, or None where nothing is said."""
    if not given:
        return None
    kinds = [name for name in given if name != "per"]
    if len(kinds) != 1:
        raise OptionError(f"give one of keep, {', '.join(_TARGETS)}, not {', '.join(kinds) or 'per alone'}")
    (kind,) = kinds
    value = given[kind]
    parts = [_number(part) for part in value.split("+")] if isinstance(value, str) else [value]
    if len(parts) not in (1, methods):
        raise OptionError(f"{kind}={value} has {len(parts)} entries for {methods} methods: give one, or one for each")
    scope = {"per": given["per"]} if "per" in given else {}
    budgets = [Budget(**{kind: part}, **scope) for part in parts]
    return budgets * (methods if len(parts) == 1 else 1)
