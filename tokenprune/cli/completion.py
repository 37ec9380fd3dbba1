# SPDX-License-Identifier: Apache-2.0
"""Shell completion of --methods: without importing a method, which would take seconds."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tokenprune.models.model_config import SHIPPED

_FOLDER = Path(__file__).parent.parent / "methods"
_REGISTERED = re.compile(r"^@register\(\s*\"(\w+)\"", re.MULTILINE)
_LAST = re.compile(r"^(.*[,+])?([^,+]*)$", re.DOTALL)


def list_builtin_methods() -> list[str]:
    """Return the names of the methods of this package, sorted; those of other packages are not read."""
    return sorted(
        name for path in _FOLDER.rglob("*.py") for name in _REGISTERED.findall(path.read_text(encoding="utf-8"))
    )


def complete_methods(incomplete: str) -> list[str]:
    """Return what a list of methods that is half written may go on as: "divprune+fa" -> "divprune+fastv" ..."""
    found = _LAST.match(incomplete)
    assert found is not None  # all of its parts are optional
    before, begun = found.groups()
    return [f"{before or ''}{name}" for name in list_builtin_methods() if name.startswith(begun)]


def complete_values(*values: str) -> Callable[[str], list[str]]:
    """Return what completes an option that takes one of these."""
    return lambda incomplete: [one for one in values if one.startswith(incomplete)]


def complete_models(incomplete: str) -> list[str]:
    """Return the models that ship, and the folders that begin like this."""
    shipped = [name for name in sorted(SHIPPED) if name.startswith(incomplete)]
    path = Path(incomplete)
    folder, begun = (path, "") if incomplete.endswith("/") else (path.parent, path.name)
    if not incomplete or not folder.is_dir():
        return shipped
    return [*shipped, *(str(one) for one in sorted(folder.iterdir()) if one.is_dir() and one.name.startswith(begun))]
