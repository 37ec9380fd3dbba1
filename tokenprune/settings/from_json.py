# SPDX-License-Identifier: Apache-2.0
"""Read a setting such as `{"method": "fastv", "keep": 0.5, "layer": 3}` from JSON, and check its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from tokenprune.budgets import Budget
from tokenprune.budgets.checks import TARGETS
from tokenprune.errors import BudgetError, OptionError, shorten
from tokenprune.methods.registry import did_you_mean, method_class
from tokenprune.settings.json_values import to_plain_json
from tokenprune.settings.keys import IN_LLM, LIMIT, SCOPE
from tokenprune.settings.max_visual_tokens import check_limit

_EXAMPLE = '{"method": "divprune", "keep": 0.25}'
_BY_AGE = '{"keep": 1.0, "age": [[0, 1.0], [2, 0.5]], "step": 4}'
_LIST = '{"method": [{"method": "dynres", "min_scale": 0.5}, "divprune"]}'


def read_setting(value: Any, where: str) -> dict[str, Any]:
    """Return the fields of a `Setting` for a JSON object.

    Args:
        value: JSON object.
        where: Name of the setting in messages.

    Raises:
        OptionError: If a key or a value is invalid.
        UnknownMethodError: If a method is not registered.
        BudgetError: If `keep` is invalid.
    """
    if not isinstance(value, Mapping):
        raise OptionError(f'{where} must be an object like {_EXAMPLE} or {{"off": true}}, not {shorten(value)}')
    value = to_plain_json(value, where)
    _check_scope(value, where)
    options = {name: option for name, option in value.items() if name not in SCOPE}
    _check_options(options, where)
    fields = {"keep": value.get("keep"), "per": value.get("per"), "off": value.get("off")}
    fields |= {"in_llm": value.get(IN_LLM), "max_visual_tokens": value.get(LIMIT)}
    if "method" not in value:
        return fields | ({"options": (options,)} if options else {})
    methods = _read_methods(value["method"], options, where)
    return fields | {
        "names": tuple(name for name, _ in methods),
        "options": tuple(options for _, options in methods),
    }


def _check_scope(value: Mapping[str, Any], where: str) -> None:
    off, in_llm, per = value.get("off"), value.get(IN_LLM), value.get("per")
    if "off" in value and not isinstance(off, bool):
        raise OptionError(f"{where}: off must be true or false, not {shorten(off)}")
    if off and len(value) > 1:
        raise OptionError(f"{where}: off excludes other keys. Leave out {', '.join(sorted(set(value) - {'off'}))}.")
    if IN_LLM in value and not isinstance(in_llm, bool):
        raise OptionError(f"{where}: {IN_LLM} must be true or false, not {shorten(in_llm)}")
    if LIMIT in value:
        check_limit(value[LIMIT], [])
    if "per" in value and not isinstance(per, str):
        raise OptionError(f'{where}: per must be "image" or "frame", not {shorten(per)}')
    if "keep" in value and value["keep"] is None:
        Budget.from_keep(None)  # raises: null differs from a missing keep


def _check_options(options: Mapping[str, Any], where: str) -> None:
    """Raise an error for keys that are not options but arguments of `patch` or parts of `keep`."""
    if "feature_cache" in options:
        raise OptionError(
            f"{where}: feature_cache is not part of a setting. Pass it to tokenprune.patch() (vLLM has its own cache)."
        )
    for name in TARGETS[1:]:
        if name in options:
            raise BudgetError(f'{where}: {name} is part of keep. Write "keep": {{"{name}": {shorten(options[name])}}}.')
    if "age" in options:  # a method may have an option `step`
        raise BudgetError(f'{where}: age and step are part of keep. Write for example "keep": {_BY_AGE}.')


def _read_methods(named: Any, options: dict[str, Any], where: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and the options of each method.

    Args:
        named: Value of "method".
        options: Options next to "method". Only allowed for a single method.
        where: Name of the setting in messages.
    """
    if named == []:
        raise OptionError(f"{where}: method is an empty list. Name at least one method.")
    methods = [_read_method(value, where) for value in (named if isinstance(named, list) else [named])]
    if options and len(methods) > 1:
        raise OptionError(describe_ambiguity(where, options))
    ((name, method_options), *others) = methods
    if duplicates := sorted(set(options) & set(method_options)):
        raise OptionError(f"{where}: {', '.join(duplicates)} is set twice. Set it only with its method.")
    return [(name, method_options | options), *others]


def _read_method(value: Any, where: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of the value of "method", or of an entry of its list."""
    if not isinstance(value, dict) or "method" not in value:
        return method_class(cast(Any, value)).name, {}  # raises an error with similar names
    options = {name: option for name, option in value.items() if name != "method"}
    if "keep" in options:
        raise OptionError(f'{where}: keep belongs next to the methods: {{"method": [...], "keep": [0.5, 0.25]}}')
    return method_class(value["method"]).name, options


def describe_missing_method(where: str, off: bool | None = None) -> str:
    """Return the error message for a setting without a method.

    Args:
        where: Name of the setting in the message.
        off: Value of the key "off". None if the setting does not have the key.
    """
    if off is False:
        return f'{where}: "off": false requires a method. Write for example {_EXAMPLE}.'
    return f"{where} names no method. Write for example {_EXAMPLE}."


def describe_ambiguity(where: str, options: Mapping[str, Any]) -> str:
    """Return the error message for options that may belong to any of several methods."""
    for option in options:
        if hint := did_you_mean(option, SCOPE):
            return f"{where} has no key {option!r}. {hint.strip()}"
    return (
        f"{where}: options {', '.join(options)} are ambiguous for several methods. Set them with their method, such as "
        f"{_LIST}."
    )
