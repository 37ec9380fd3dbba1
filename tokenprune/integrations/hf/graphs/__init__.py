# SPDX-License-Identifier: Apache-2.0
"""Graphed prefill: a decoder's first tokens as the replay of CUDA graphs (docs/guides/gpu.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tokenprune.errors import NotPatchedError, OptionError
from tokenprune.integrations.hf.graphs.settings import Graphs


@contextmanager
def graphed(model: Any, graphs: bool | Graphs = True) -> Iterator[Any]:
    """Replay the prefill of a model without a patch as graphs within a `with` block: what a pruned one is fairly
    compared with. Raises OptionError for what is no setting, and UnsupportedModelError."""
    from tokenprune.integrations.hf.families import get_adapter
    from tokenprune.integrations.hf.graphs.prefill import graphed_prefill

    parts = graphed_prefill(get_adapter(model), graphs)
    for part in parts:
        part.attach()
    try:
        yield model
    finally:
        for part in parts:
            part.detach()


def warm_up(model: Any, lengths: Sequence[int], *, batch: int = 1) -> None:
    """Capture the graphs of a model patched with `graphs=` ahead of the first prompt; those of methods that cut inside
    the decoder are captured by prompts alone.

    lengths: tokens of the prompts to come, after the cut. batch: rows of a call. Raises NotPatchedError for a model
    that is patched without graphs, and OptionError for lengths below 2.
    """
    from tokenprune.integrations.hf.graphs.prefill import GraphedPrefill
    from tokenprune.integrations.shared.attachment import get_attachment

    parts = getattr(get_attachment(model).engine, "parts", ())
    part = next((part for part in parts if isinstance(part, GraphedPrefill)), None)
    if part is None:
        raise NotPatchedError("the model is patched without graphs: pass graphs=True to patch")
    if not lengths or any(length < 2 for length in (*lengths, batch + 1)):
        raise OptionError(f"lengths={list(lengths)} and batch={batch} must be numbers of tokens from 2 on, and of rows")
    part.warm_up(lengths, batch)


__all__ = ["Graphs", "graphed", "warm_up"]
