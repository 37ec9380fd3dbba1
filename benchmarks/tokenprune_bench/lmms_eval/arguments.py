# SPDX-License-Identifier: Apache-2.0
"""Separate the arguments of `--model_args` for tokenprune from the arguments of the base model."""

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
_BUDGET = (
    *(name for name in TARGETS if name != "frames"),
    "per",
)  # `frames` is a list, and base models may have an argument of this name
_PASSED = ("config", "guard")  # arguments of `tokenprune.patch`
OURS = ("method", *_BUDGET, *_PASSED)


@dataclass(frozen=True)
class ModelArguments:
    """Parsed `--model_args`.

    Attributes:
        config: Setting to patch with, or None for the unpatched model.
        rest: Arguments of the base model.
        guard: `guard` of `tokenprune.patch`.
    """

    config: Setting | None
    rest: dict[str, Any]
    guard: str = "off"  # off by default, so that benchmarks measure the method without the guard

    @property
    def methods(self) -> list[Method]:
        return [] if self.config is None else self.config.methods

    @property
    def acts_on_pixels(self) -> bool:
        return any(method.site is Site.PRE_ENCODER for method in self.methods)


def parse_arguments(
    arguments: dict[str, Any], base: str, accepted: Collection[str], anything: bool = False
) -> ModelArguments:
    """Parse the arguments of `--model_args` without `base`.

    Args:
        arguments: The arguments.
        base: Name of the base model.
        accepted: Arguments of the base model. They take precedence over options of the same name, for which
            `method.option=...` is required.
        anything: Whether the base model accepts other arguments.

    Raises:
        UnknownMethodError: If a method is not known.
        OptionError: If an argument is not known or not valid.
        BudgetError: If the budget is not valid.
    """
    ours = {name: arguments[name] for name in OURS if name in arguments}
    names = _parse_method_names(ours)
    options: dict[str, dict[str, Any]] = {name: {} for name in names}
    rest = {}
    for name, value in arguments.items():
        if name in ours:
            continue
        owners = _find_owners(name, names)
        if name in accepted or (anything and not owners):
            rest[name] = value
        elif len(owners) == 1:
            option = name.rpartition(".")[2]
            options[owners[0]][option] = _parse_list_option(owners[0], option, value)
        elif owners:
            raise OptionError(
                f"{name}={value} is an option of {' and '.join(owners)}. Write {owners[0]}.{name}={value}."
            )
        else:
            raise OptionError(_describe_unknown_argument(name, names, base, accepted))
    guard = {"guard": ours["guard"]} if "guard" in ours else {}
    if "config" in ours:
        config = read_config(ours["config"])
        return ModelArguments(config, rest, **({"guard": config.guard} if config.guard else {}) | guard)
    if not names:
        return ModelArguments(None, rest)
    methods = [{"method": name, **options[name]} for name in names]
    config = Setting.from_json({"method": methods} | _parse_budget(ours), "--model_args")
    config.steps()  # raises for invalid budgets
    return ModelArguments(config, rest, **guard)


def _parse_method_names(ours: dict[str, Any]) -> list[str]:
    method = ours.get("method")
    if method is None and "config" not in ours:
        raise OptionError(
            "method= is missing. Pass a method (see `tokenprune methods`), a stack such as dart+fastv, or none for the "
            "unpatched model."
        )
    if "config" in ours and (extra := [name for name in ours if name not in _PASSED]):
        raise OptionError(f"config= already has a method and a budget. Leave out {', '.join(extra)}, or config=.")
    if method is None:
        return []
    if str(method) in UNPATCHED:
        if extra := [name for name in ours if name != "method"]:
            raise OptionError(f"method={method} does not patch the model. Leave out {', '.join(extra)}.")
        return []
    names = str(method).split("+")
    for name in names:
        method_class(name)  # raises with close matches
    if len(set(names)) < len(names):
        raise OptionError(f"method={method} has a method twice.")
    return names


def _find_owners(name: str, methods: list[str]) -> list[str]:
    """Return the methods with the option `name`. A method name before a dot selects one method."""
    method, dot, option = name.rpartition(".")
    owners = [each for each in methods if option in {field.name for field in fields(method_class(each))}]
    return [owner for owner in owners if owner == method] if dot else owners


def _parse_list_option(method: str, option: str, value: Any) -> Any:
    """Convert the value of a list option. Entries are separated by "+", because a comma ends the argument."""
    if not isinstance(tokenprune.method_info(method).options[option], tuple):
        return value
    return tuple(map(parse_number, str(value).split("+")))


def _parse_budget(ours: dict[str, Any]) -> dict[str, Any]:
    """Return the entries `keep` and `per` of a setting, if present."""
    targets = {
        name: [parse_number(part) for part in str(ours[name]).split("+")]
        if isinstance(ours[name], str)
        else [ours[name]]
        for name in TARGETS
        if name in ours
    }
    per = {"per": ours["per"]} if "per" in ours else {}
    if not targets:
        return per
    if len(targets) > 1:
        return {
            "keep": {name: parts[0] for name, parts in targets.items()}
        } | per  # Setting.from_json raises for several targets
    ((name, parts),) = targets.items()
    keeps = parts if name == "keep" else [{name: part} for part in parts]
    return {"keep": keeps if len(keeps) > 1 else keeps[0]} | per


def _describe_unknown_argument(name: str, methods: list[str], base: str, accepted: Collection[str]) -> str:
    options = [field.name for method in methods for field in fields(method_class(method))]
    close = difflib.get_close_matches(name, [*OURS, *options, *accepted], n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    page = "See docs/measure/lmms-eval.md for the arguments."
    return f"Unknown argument {name!r} for base={base}: {hint}{page}"
