# SPDX-License-Identifier: Apache-2.0
"""Names for those who write methods and observables, beside `Method`, `Pruner`, `Selection`, `VisualTokens` and `Site`
(docs/add-a-method.md)."""

from __future__ import annotations

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

__all__ = [
    "AttentionPattern",
    "AttentionToTokens",
    "Backend",
    "DecodeMethod",
    "EncoderMethod",
    "FrameMerger",
    "FrameMix",
    "ImageChooser",
    "Observable",
    "ObservedAt",
    "Patches",
    "PerToken",
    "ResizeMethod",
    "Segments",
    "TextTokens",
    "TokenSource",
    "Tower",
    "TowerBlock",
    "UnitDropper",
    "VideoPruner",
    "Videos",
    "Visual",
    "available_observables",
    "register_observable",
]
