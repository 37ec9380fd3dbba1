# SPDX-License-Identifier: Apache-2.0
"""Worker: hooks on the decoder's layers. They have an effect only in a step that `runner` prepared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.integrations.vllm.in_llm.layout import RequestStep, VisualPiece
from tokenprune.integrations.vllm.selection.before_llm import Grid, find_grid
from tokenprune.integrations.vllm.selection.in_llm import RequestSource, build_segments, choose
from tokenprune.kernels.observation import Observation
from tokenprune.selection.method import Pruner
from tokenprune.selection.observable import ObservedAt
from tokenprune.selection.observable_registry import select_observables
from tokenprune.selection.segments import LayerInput


@dataclass(frozen=True)
class RequestCut:
    """A request whose images lose tokens in this step.

    Attributes:
        start: Row of its first token in the step.
        end: Row after its last token. For methods that read the whole prompt, the row after the prompt's last token: a
            recomputed request also has tokens of its answer.
        request: Tokens of the request in the step.
        grids: Grid of each piece, or None if it is not known.
    """

    start: int
    end: int
    request: RequestStep
    grids: list[Grid | None]


@dataclass
class DecoderPass:
    """A pass through the decoder in which tokens are dropped. The fields with a default are set during the pass.

    Attributes:
        cuts: The requests that lose tokens.
        rows: Number of rows of the step.
        num_kept: Number of rows after the cut.
        attended: Query, key and value of the layer before the cut.
        entered: Input of that layer.
        kept: Indices of the kept rows, shape (num_kept,), int64.
        last: For each row, the index in `kept` of the last kept row up to it.
        positions: Positions of the kept rows.
    """

    cuts: list[RequestCut]
    rows: int
    num_kept: int
    attended: tuple[Tensor, Tensor, Tensor] | None = field(default=None, repr=False)
    entered: Tensor | None = None
    kept: Tensor | None = None
    last: Tensor | None = None
    positions: Tensor | None = None


class Reducer:
    """Cuts at the input of one decoder layer."""

    def __init__(self, decoder: Any, method: Pruner) -> None:
        self.method = method
        self.decoder = decoder
        self.reads_whole_prompt = not method.prefix_cache_safe
        self.step: DecoderPass | None = None
        layers = list(decoder.layers)
        self.attention: Any = layers[method.cut_layer - 1].self_attn.attn
        # Names of the layers after the cut. vLLM stores metadata and slots of attention by these names.
        self.names = {layer.self_attn.attn.layer_name for layer in layers[method.cut_layer :]}
        if select_observables(method.needs, ObservedAt.LAYER_BEFORE):
            self.attention.register_forward_pre_hook(self._observe)
        if select_observables(method.needs, ObservedAt.INPUT_BEFORE):
            layers[method.cut_layer - 1].register_forward_pre_hook(self._keep_input)
        layers[method.cut_layer].register_forward_pre_hook(self._cut)
        for layer in layers[method.cut_layer + 1 :]:
            layer.register_forward_pre_hook(self._follow)
        layers[-1].register_forward_hook(self._restore)

    @contextmanager
    def apply(self, step: DecoderPass | None) -> Iterator[None]:
        """Apply `step` to the decoder's passes within the context."""
        self.step = step
        try:
            yield
        finally:
            self.step = None

    # -- hooks

    def _observe(self, module: nn.Module, args: tuple) -> None:
        if self.step is not None:
            self.step.attended = args[0], args[1], args[2]

    def _keep_input(self, module: nn.Module, args: tuple) -> None:
        if self.step is not None:
            _, hidden, residual, *_ = args
            self.step.entered = hidden if residual is None else hidden + residual

    def _cut(self, module: nn.Module, args: tuple) -> tuple | None:
        if self.step is None:
            return None
        positions, hidden, residual, *others = args
        step, device = self.step, hidden.device
        state = hidden + residual  # vLLM adds the two within the layer
        is_kept = torch.ones(step.rows, dtype=torch.bool, device=device)
        for cut in step.cuts:
            pieces = cut.request.cut_pieces
            indices = [[index - cut.request.computed for index in piece.indices] for piece in pieces]
            ordinals, modalities = [piece.ordinal for piece in pieces], [piece.modality for piece in pieces]
            segments = build_segments(indices, ordinals, modalities, cut.grids, device)
            # The last token of a prompt is kept, as in transformers: the answer begins there.
            last = None if cut.request.prompt is None else cut.request.prompt - 1 - cut.request.computed
            source = self._build_source(step, cut, state)
            keep = choose(self.method, segments, [piece.keep for piece in pieces], source, last)
            dropped = cut.start + segments.position[segments.mask & ~keep]
            is_kept.index_fill_(0, dropped, False)
        step.attended = step.entered = None
        # A stable sort does not synchronize with the device, as nonzero() would. The number of kept rows is known.
        step.kept = (~is_kept).to(torch.uint8).argsort(stable=True)[: step.num_kept]
        step.last = (is_kept.cumsum(0) - 1).clamp(min=0)
        step.positions = positions[..., step.kept]
        return step.positions, hidden[step.kept], residual[step.kept], *others

    def _follow(self, module: nn.Module, args: tuple) -> tuple | None:
        return None if self.step is None else (self.step.positions, *args[1:])

    def _restore(self, module: nn.Module, args: tuple, output: tuple) -> tuple | None:
        """Return the number of rows that the runner expects.

        A dropped row gets the last kept row before it. The runner reads the last row of each request, which is dropped
        if an image ends the prompt.
        """
        if self.step is None:
            return None
        hidden, residual = output
        return hidden[self.step.last], residual[self.step.last]

    # -- values that a method may read

    def _build_source(self, step: DecoderPass, cut: RequestCut, state: Tensor) -> RequestSource:
        rows = slice(cut.start, cut.end)
        observed = None
        if step.attended is not None:
            query, key, value = (self._split_heads(states[rows]) for states in step.attended)
            observed = Observation(query, key, None, self.attention.impl.scale, value=value)
        entered = None if step.entered is None else LayerInput(step.entered[None, rows])
        width = cut.end - cut.start
        visual = [
            index - cut.request.computed
            for piece in cut.request.pieces
            for index in piece.indices
            if 0 <= index - cut.request.computed < width
        ]
        return RequestSource(
            state[None, rows], self.method.needs, self.decoder.norm, observed, self.reads_whole_prompt, visual, entered
        )

    def _split_heads(self, value: Tensor) -> Tensor:
        """(tokens, heads, width) or (tokens, heads * width) -> (1, heads, tokens, width)."""
        return value.reshape(value.shape[0], -1, self.attention.head_size).transpose(0, 1)[None]


def get_decoder(model: Any) -> nn.Module:
    """Return the module with the decoder's layers of a multimodal model of vLLM."""
    language_model = model.get_language_model()
    return getattr(language_model, "model", language_model)


def find_grids(model: Any, pieces: list[VisualPiece], items: list[Any]) -> list[Grid | None]:
    """Return the grid of each piece.

    Args:
        items: vLLM's data of the items of the prompt.
    """
    item_grids = [model._grid(items[piece.item], piece.modality) for piece in pieces]
    return [
        find_grid(grid, len(piece.indices), piece.modality, model._image_grid)
        for grid, piece in zip(item_grids, pieces, strict=True)
    ]
