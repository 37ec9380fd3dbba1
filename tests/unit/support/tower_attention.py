# SPDX-License-Identifier: Apache-2.0
"""References for the attention inside vision towers."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tokenprune import Pruner, Selection, Site


def make_seer(layers: tuple = (0.25, -1), site: str = "PRE_LLM") -> tuple[Any, list]:
    """A method that keeps what the tower's class token, or all its patches, look at, and notes what it saw."""
    seen: list[Any] = []

    @dataclass(frozen=True)
    class Seer(Pruner):
        """Keep what the tower attends to."""

        layer: int = 1

        @property
        def encoder_layers(self) -> tuple:
            return layers

        def select(self, tokens: Any) -> Selection:
            maps = {layer: tokens.encoder_attention(layer) for layer in layers}
            seen.append(SimpleNamespace(maps=maps, patches=tokens.patches, segments=tokens.segments))
            return Selection.top(maps[layers[-1]].mean(1), tokens)

    Seer.name, Seer.site, Seer.needs = "seer", Site(site), frozenset({"encoder_attention"})
    return Seer(), seen
