# SPDX-License-Identifier: Apache-2.0
"""Shell completion. Methods are found by a regular expression, because importing them would take seconds."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tokenprune.models.model_config import SHIPPED

_FOLDER = Path(__file__).parent.parent / "methods"
_REGISTERED = re.compile(r"^@register\(\s*\"(\w+)\"", re.MULTILINE)
_LAST = re.compile(r"^(.*[,+])?([^,+]*)$", re.DOTALL)


def list_builtin_methods() -> list[str]:
    """Return the names of the methods of this package, sorted."""
    return sorted(
        name for path in _FOLDER.rglob("*.py") for name in _REGISTERED.findall(path.read_text(encoding="utf-8"))
    )


def complete_methods(incomplete: str) -> list[str]:
    """Return the completions of a list of methods: "divprune+fa" -> "divprune+fastv"."""
    match = _LAST.match(incomplete)
    assert match is not None  # all parts of the pattern are optional
    before, prefix = match.groups()
    return [f"{before or ''}{name}" for name in list_builtin_methods() if name.startswith(prefix)]


def complete_values(*values: str) -> Callable[[str], list[str]]:
    """Return a completion function for an option with these values."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def complete_models(incomplete: str) -> list[str]:
    """Return the shipped models and the folders that start with `incomplete`."""
    shipped = [name for name in sorted(SHIPPED) if name.startswith(incomplete)]
    path = Path(incomplete)
    folder, prefix = (path, "") if incomplete.endswith("/") else (path.parent, path.name)
    if not incomplete or not folder.is_dir():
        return shipped
    folders = (child for child in sorted(folder.iterdir()) if child.is_dir() and child.name.startswith(prefix))
    return [*shipped, *map(str, folders)]
