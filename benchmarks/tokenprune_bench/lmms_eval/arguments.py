# SPDX-License-Identifier: Apache-2.0
"""Tell our arguments of `--model_args` from those of the model that is patched."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

import tokenprune
from tokenprune.budgets.checks import TARGETS
from tokenprune.errors import OptionError
from tokenprune.methods.registry import method_class
from tokenprune.selection.method import Method, Site
from tokenprune.settings import Setting
from tokenprune.settings.one_line import parse_number
from tokenprune.settings.saved import read_config

UNPATCHED = ("none", "unpatched")
_BUDGET = (*(name for name in TARGETS if name != "frames"), "per")  # a list is no argument, and a base may have it
_PASSED = ("config", "guard")  # to `tokenprune.patch`, as they are
OURS = ("method", *_BUDGET, *_PASSED)


@dataclass(frozen=True)
class ModelArguments:
    """The parsed `--model_args`, in which a setting stands among arguments of a model of lmms-eval.

    config: what to patch with, None for the unpatched model. rest: arguments of the base model. guard: of
    `tokenprune.patch`.
    """

    config: Setting | None
    rest: dict[str, Any]
    guard: str = "off"  # unless asked for: what is measured is the method, not the guard

    @property
    def methods(self) -> list[Method]:
        return [] if self.config is None else self.config.methods

    @property
    def acts_on_pixels(self) -> bool:
        return any(method.site is Site.PRE_ENCODER for method in self.methods)


def read(arguments: dict[str, Any], base: str, accepted: Collection[str], anything: bool = False) -> ModelArguments:
    """Return the `ModelArguments` that arguments, without `base`, describe.

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
    guard = {"guard": ours["guard"]} if "guard" in ours else {}
    if "config" in ours:
        config = read_config(ours["config"])
        return ModelArguments(config, rest, **({"guard": config.guard} if config.guard else {}) | guard)
    if not names:
        return ModelArguments(None, rest)
    methods = [{"method": name, **options[name]} for name in names]
    config = Setting.from_json({"method": methods} | _budget(ours), "--model_args")
    config.steps()  # raises
    return ModelArguments(config, rest, **guard)


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
    """Return the methods that have the option `name`, or the one that it names in front of a dot."""
    method, dot, option = name.rpartition(".")
    owners = [one for one in methods if option in {field.name for field in fields(method_class(one))}]
    return [one for one in owners if one == method] if dot else owners


def _typed(method: str, option: str, value: Any) -> Any:
    """Return a list where the option is one: a comma would end the argument, so its entries have + between them."""
    if not isinstance(tokenprune.method_info(method).options[option], tuple):
        return value
    return tuple(map(parse_number, str(value).split("+")))


def _budget(ours: dict[str, Any]) -> dict[str, Any]:
    """Return the entries `keep` and `per` of a setting, as far as they are given."""
    given = {
        name: [parse_number(part) for part in str(ours[name]).split("+")]
        if isinstance(ours[name], str)
        else [ours[name]]
        for name in TARGETS
        if name in ours
    }
    per = {"per": ours["per"]} if "per" in ours else {}
    if not given:
        return per
    if len(given) > 1:
        return {"keep": {name: parts[0] for name, parts in given.items()}} | per  # too many: parse says so
    ((name, parts),) = given.items()
    keeps = parts if name == "keep" else [{name: part} for part in parts]
    return {"keep": keeps if len(keeps) > 1 else keeps[0]} | per


def _unknown(name: str, methods: list[str], base: str, accepted: Collection[str]) -> str:
    options = [field.name for method in methods for field in fields(method_class(method))]
    close = difflib.get_close_matches(name, [*OURS, *options, *accepted], n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    own = f"options of {'+'.join(methods)} are {', '.join(options) or '(none)'}; " if methods else ""
    return f"there is no argument {name!r}: {hint}{own}{base} takes {', '.join(sorted(accepted))}"
