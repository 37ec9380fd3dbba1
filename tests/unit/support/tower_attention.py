# SPDX-License-Identifier: Apache-2.0
"""References for the attention inside vision towers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tokenprune import Pruner, Selection, Site


@contextmanager
def use_attention(attention: Callable[..., Any], configs: Iterable[Any]) -> Iterator[None]:
    """Make modules with these configs use `attention` within this context."""
    name, saved = "made_up_attention", [(config, config._attn_implementation) for config in configs]
    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    for config, _ in saved:
        config._attn_implementation = name
    try:
        yield
    finally:
        for config, implementation in saved:
            config._attn_implementation = implementation


def make_seer(layers: tuple = (0.25, -1), site: str = "PRE_LLM") -> tuple[Any, list]:
    """Return a method that keeps the tokens with the most tower attention, and the list of its recorded inputs."""
    records: list[Any] = []

    @dataclass(frozen=True)
    class Seer(Pruner):
        layer: int = 1

        @property
        def encoder_layers(self) -> tuple:
            return layers

        def select(self, tokens: Any) -> Selection:
            maps = {layer: tokens.encoder_attention(layer) for layer in layers}
            records.append(SimpleNamespace(maps=maps, patches=tokens.patches, segments=tokens.segments))
            return Selection.top(maps[layers[-1]].mean(1), tokens)

    Seer.name, Seer.site, Seer.needs = "seer", Site(site), frozenset({"encoder_attention"})
    return Seer(), records
