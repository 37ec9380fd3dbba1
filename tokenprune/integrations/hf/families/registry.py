# SPDX-License-Identifier: Apache-2.0
"""Registry of adapters by model type."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, TypeVar

from tokenprune.models.families import FAMILIES, SUPPORTED, Family, get_family

ADAPTERS: dict[str, Any] = {}  # subclasses of `Adapter` by model type
_A = TypeVar("_A", bound=type)


def register_adapter(*families: str | Family) -> Callable[[_A], _A]:
    """Register an adapter class for model types. Replaces earlier adapters of these types.

    Args:
        families: Names of model types in the family table, or rows that are added to the table.

    Returns:
        A class decorator.

    Examples:
        >>> from tokenprune.integrations.hf.families import Adapter
        >>> adapter_class = register_adapter(Family("my_model_type", square="always"))(Adapter)
        >>> "my_model_type" in list_supported_families()
        True
    """

    def register(cls: _A) -> _A:
        rows = [family if isinstance(family, Family) else get_family(family) for family in families]
        FAMILIES.update((row.name, row) for row in rows)
        ADAPTERS.update((row.name, cls) for row in rows)
        return cls

    return register


def list_supported_families() -> list[str]:
    """Return the sorted names of supported model types: the tested types, and all types with a registered adapter."""
    return sorted({*SUPPORTED, *ADAPTERS})


def suggest_families(model_type: str = "") -> str:
    """Return a sentence for error messages with the closest supported model types and a page about adding types."""
    close = difflib.get_close_matches(model_type, list_supported_families(), n=3, cutoff=0.0) if model_type else []
    nearest = f"The closest supported types are {', '.join(map(repr, close))}; " if close else ""
    return (
        f"{nearest}docs/reference/families.md lists all types, and docs/extend/add-a-family.md shows how to add a type."
    )
