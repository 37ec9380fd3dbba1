# SPDX-License-Identifier: Apache-2.0
"""Names for those who write methods and observables, beside `Method`, `Pruner`, `Selection`, `VisualTokens` and `Site`
(docs/add-a-method.md)."""

from __future__ import annotations

from tokenprune.methods.video.base import VideoPruner
from tokenprune.sites.attention import AttentionPattern
from tokenprune.sites.decode import DecodeMethod
from tokenprune.sites.encoder import EncoderMethod, Tower
from tokenprune.sites.frames import FrameMerger, FrameMix
from tokenprune.sites.pixels import ImageChooser, ResizeMethod
from tokenprune.sites.units import UnitDropper
from tokenprune.view.frames import Visual
from tokenprune.view.observable import AttentionToTokens, Backend, Observable, ObservedAt, PerToken, TowerBlock
from tokenprune.view.registry import available_observables, register_observable
from tokenprune.view.segments import Patches, Segments
from tokenprune.view.source import TokenSource
from tokenprune.view.tokens import TextTokens
from tokenprune.view.videos import Videos

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
