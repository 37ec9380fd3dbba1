# SPDX-License-Identifier: Apache-2.0
"""Adapters for model families. `base` has the default adapter, the other modules have the exceptions.

The adapters import transformers, so they load on first use of a name in `__all__`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenprune.integrations.hf.families.base import Adapter
    from tokenprune.integrations.hf.families.find import get_adapter
    from tokenprune.integrations.hf.families.registry import (
        list_supported_families,
        register_adapter,
        suggest_families,
    )

_MODULES = ("base", "find", "registry", "plain", "qformer", "retrieval", "special")  # importing them registers adapters
__all__ = ["Adapter", "get_adapter", "list_supported_families", "register_adapter", "suggest_families"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base, find, registry, *_ = (vars(importlib.import_module(f"{__name__}.{module}")) for module in _MODULES)
    globals().update((export, (base | find | registry)[export]) for export in __all__)
    return globals()[name]
