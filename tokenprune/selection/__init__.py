# SPDX-License-Identifier: Apache-2.0
"""Visual tokens, observables, and the base class of the methods of each site.

This package exports the names for authors of methods and observables. `tokenprune` exports `Method`, `Pruner`,
`Selection`, `VisualTokens` and `Site`. See docs/extend/add-a-method.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Module of each public name. Modules are imported on first access.
_MODULES = {
    "tokenprune.selection.frames": ("Visual",),
    "tokenprune.selection.observable": (
        "Backend",
        "Observable",
        "ObservedAt",
        "PerToken",
    ),
    "tokenprune.selection.observable_bases": (
        "AttentionToTokens",
        "TowerBlock",
    ),
    "tokenprune.selection.observable_registry": (
        "available_observables",
        "register_observable",
    ),
    "tokenprune.selection.segments": (
        "Patches",
        "Segments",
    ),
    "tokenprune.selection.sites.attention": ("AttentionPattern",),
    "tokenprune.selection.sites.decode": ("DecodeMethod",),
    "tokenprune.selection.sites.encoder": (
        "EncoderMethod",
        "Tower",
    ),
    "tokenprune.selection.sites.frames": (
        "FrameMerger",
        "FrameMix",
    ),
    "tokenprune.selection.sites.pixels": (
        "ImageChooser",
        "ResizeMethod",
    ),
    "tokenprune.selection.sites.units": ("UnitDropper",),
    "tokenprune.selection.sites.video": ("VideoPruner",),
    "tokenprune.selection.source": ("TokenSource",),
    "tokenprune.selection.tokens": ("TextTokens",),
    "tokenprune.selection.videos": ("Videos",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

if TYPE_CHECKING:
    from tokenprune.selection.frames import Visual
    from tokenprune.selection.observable import Backend, Observable, ObservedAt, PerToken
    from tokenprune.selection.observable_bases import AttentionToTokens, TowerBlock
    from tokenprune.selection.observable_registry import available_observables, register_observable
    from tokenprune.selection.segments import Patches, Segments
    from tokenprune.selection.sites.attention import AttentionPattern
    from tokenprune.selection.sites.decode import DecodeMethod
    from tokenprune.selection.sites.encoder import EncoderMethod, Tower
    from tokenprune.selection.sites.frames import FrameMerger, FrameMix
    from tokenprune.selection.sites.pixels import ImageChooser, ResizeMethod
    from tokenprune.selection.sites.units import UnitDropper
    from tokenprune.selection.sites.video import VideoPruner
    from tokenprune.selection.source import TokenSource
    from tokenprune.selection.tokens import TextTokens
    from tokenprune.selection.videos import Videos


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tokenprune.selection' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])


__all__ = [*_MODULE_OF]
