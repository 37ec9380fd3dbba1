# SPDX-License-Identifier: Apache-2.0
"""Adapters to model families: `base` has the common contract, other files have exceptions.

The adapters import transformers, so they load with the first use of a name below.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenprune.integrations.hf.families.base import (
        Adapter,
        list_supported_families,
        register_adapter,
        suggest_families,
    )
    from tokenprune.integrations.hf.families.find import get_adapter

_FILES = ("base", "find", "plain", "qformer", "retrieval", "special")
__all__ = ["Adapter", "get_adapter", "list_supported_families", "register_adapter", "suggest_families"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base, find, *_ = (vars(importlib.import_module(f"{__name__}.{file}")) for file in _FILES)
    globals().update((one, (base | find)[one]) for one in __all__)
    return globals()[name]
