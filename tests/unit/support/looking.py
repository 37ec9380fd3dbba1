# SPDX-License-Identifier: Apache-2.0
"""A method that records its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenprune import Pruner, Selection, VisualTokens


def look(
    read: Callable[[VisualTokens], Any], needs: tuple[str, ...] = (), layers: tuple[Any, ...] = ()
) -> tuple[Pruner, list[Any]]:
    """Return a method that keeps the first tokens, and the list of `read(tokens)` of its calls."""
    records: list[Any] = []

    class Look(Pruner):
        name, encoder_layers = "look", layers

        def select(self, tokens: VisualTokens) -> Selection:
            records.append(read(tokens))
            return Selection.top(tokens.mask.float(), tokens)

    Look.needs = frozenset(needs)
    return Look(), records
