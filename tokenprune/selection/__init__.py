# SPDX-License-Identifier: Apache-2.0
"""Views and selections of visual tokens, and the base class of the methods of each site.

This package has the names for authors of methods and observables, beside `tokenprune.Method`, `Pruner`, `Selection`,
`VisualTokens` and `Site` (docs/extend/add-a-method.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# The module of each public name; importing one module of this package does not import the others.
_HOMES = {
    "tokenprune.selection.frames": ("Visual",),
    "tokenprune.selection.observable": (
        "AttentionToTokens",
        "Backend",
        "Observable",
        "ObservedAt",
        "PerToken",
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
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if TYPE_CHECKING:
    from tokenprune.selection.frames import Visual
    from tokenprune.selection.observable import AttentionToTokens, Backend, Observable, ObservedAt, PerToken, TowerBlock
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
    if name not in _HOME_OF:
        raise AttributeError(f"module 'tokenprune.selection' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])


__all__ = [*_HOME_OF]
