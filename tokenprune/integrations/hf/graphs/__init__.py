# SPDX-License-Identifier: Apache-2.0
"""Replay CUDA graphs of the layers of a decoder, in prefill and decoding steps (docs/guides/gpu.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tokenprune.errors import NotPatchedError, OptionError
from tokenprune.integrations.hf.graphs.settings import Graphs


@contextmanager
def graphed(model: Any, graphs: bool | str | Graphs = True) -> Iterator[Any]:
    """Use CUDA graphs for an unpatched model inside a `with` block.

    This is the fair baseline for a model that is patched with `graphs=`.

    Args:
        model: An unpatched model.
        graphs: True for the default limits, "auto", or a `Graphs`. See `tokenprune.patch`.

    Raises:
        OptionError: If `graphs` is not a valid setting.
        UnsupportedModelError: If the model type is not supported.

    Examples:
        >>> with tokenprune.graphs.graphed(model) as graphed_model:
        ...     ids = graphed_model.generate(**inputs, max_new_tokens=2, do_sample=False)
        >>> ids.shape[1] - inputs["input_ids"].shape[1]
        2
    """
    from tokenprune.integrations.hf.families import get_adapter
    from tokenprune.integrations.hf.graphs.decoder import build_graphed_decoder

    parts = build_graphed_decoder(get_adapter(model), graphs)
    for part in parts:
        part.attach()
    try:
        yield model
    finally:
        for part in parts:
            part.detach()


def warm_up(model: Any, lengths: Sequence[int], *, batch: int = 1) -> None:
    """Capture the graphs of a model patched with `graphs=` before its first prompt.

    Methods that prune inside the decoder capture their graphs only during real prompts.

    Args:
        model: A model patched with `graphs=`.
        lengths: Expected prompt lengths after pruning, in tokens, each at least 2.
        batch: Number of rows of a call.

    Raises:
        NotPatchedError: If the model is patched without graphs.
        OptionError: If a length is below 2, or `batch` is below 1.

    Examples:
        >>> model = tokenprune.patch(model, "divprune", keep=0.25, graphs=True)
        >>> tokenprune.graphs.warm_up(model, [64])
        >>> model = tokenprune.unpatch(model)
    """
    from tokenprune.integrations.hf.graphs.decoder import GraphedDecoder
    from tokenprune.integrations.shared.attachment import get_attachment

    parts = getattr(get_attachment(model).engine, "parts", ())
    part = next((part for part in parts if isinstance(part, GraphedDecoder)), None)
    if part is None:
        raise NotPatchedError("The model is patched without graphs. Pass graphs=True to tokenprune.patch.")
    if not lengths or any(length < 2 for length in (*lengths, batch + 1)):
        raise OptionError(f"lengths={list(lengths)}, batch={batch}: Pass lengths of at least 2 tokens, and batch >= 1.")
    part.warm_up(lengths, batch)


__all__ = ["Graphs", "graphed", "warm_up"]
