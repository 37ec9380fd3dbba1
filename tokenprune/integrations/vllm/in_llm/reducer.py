# SPDX-License-Identifier: Apache-2.0
"""Worker: hooks on the decoder's layers. They do nothing outside a step that was prepared (see `runner`)."""

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
    """One request whose images lose tokens in this step.

    start: the row of its first token in the step. end: after its last one; of a method that reads the whole prompt,
    after the prompt's last one (a recomputed request holds some of its answer too).
    grids: of each piece, if it is a full grid of known shape.
    """

    start: int
    end: int
    share: RequestStep
    grids: list[Grid | None]


@dataclass
class DecoderPass:
    """One pass through the decoder in which tokens leave.

    rows: number of rows of the step. left: number of rows that go on after the cut. The other fields are set during the
    pass. attended: query, key and value of the layer before the cut. entered: the input of that layer. stay: long
    `[left]`, the rows that go on. last: for each row, the index in `stay` of the last kept row up to it. positions:
    those of the kept rows.
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
        # The layers that see fewer tokens, by the names under which vLLM keeps what belongs to their attention.
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
        stays = torch.ones(step.rows, dtype=torch.bool, device=device)
        for cut in step.cuts:
            pieces = cut.share.cut_pieces
            places = [[place - cut.share.computed for place in piece.indices] for piece in pieces]
            ordinals, modalities = [one.ordinal for one in pieces], [one.modality for one in pieces]
            segments = build_segments(places, ordinals, modalities, cut.grids, device)
            # The last token of a prompt stays, as on the Hugging Face side: the answer begins there.
            last = None if cut.share.prompt is None else cut.share.prompt - 1 - cut.share.computed
            keep = choose(self.method, segments, [piece.keep for piece in pieces], self._seen(step, cut, state), last)
            gone = cut.start + segments.position[segments.mask & ~keep]
            stays.index_fill_(0, gone, False)
        step.attended = step.entered = None
        # A stable sort instead of nonzero(): how many they are is known, so nothing is asked of the device.
        step.kept = (~stays).to(torch.uint8).argsort(stable=True)[: step.num_kept]
        step.last = (stays.cumsum(0) - 1).clamp(min=0)
        step.positions = positions[..., step.kept]
        return step.positions, hidden[step.kept], residual[step.kept], *others

    def _follow(self, module: nn.Module, args: tuple) -> tuple | None:
        return None if self.step is None else (self.step.positions, *args[1:])

    def _restore(self, module: nn.Module, args: tuple, output: tuple) -> tuple | None:
        """Return as many rows as the runner expects. A dropped row gets the last kept row before it: the runner reads
        each request's last row, and a prompt that ends with an image may have lost that one."""
        if self.step is None:
            return None
        hidden, residual = output
        return hidden[self.step.last], residual[self.step.last]

    # -- what a method sees

    def _seen(self, step: DecoderPass, cut: RequestCut, state: Tensor) -> RequestSource:
        rows = slice(cut.start, cut.end)
        observed = None
        if step.attended is not None:
            query, key, value = (self._heads(one[rows]) for one in step.attended)
            observed = Observation(query, key, None, self.attention.impl.scale, value=value)
        entered = None if step.entered is None else LayerInput(step.entered[None, rows])
        width = cut.end - cut.start
        visual = [
            place - cut.share.computed
            for piece in cut.share.pieces
            for place in piece.indices
            if 0 <= place - cut.share.computed < width
        ]
        return RequestSource(
            state[None, rows], self.method.needs, self.decoder.norm, observed, self.reads_whole_prompt, visual, entered
        )

    def _heads(self, value: Tensor) -> Tensor:
        """`[W, H, Dh]` or `[W, H * Dh]` -> `[1, H, W, Dh]`."""
        return value.reshape(value.shape[0], -1, self.attention.head_size).transpose(0, 1)[None]


def get_decoder(model: Any) -> nn.Module:
    """Return the module of a multimodal vLLM model that holds the decoder's layers."""
    language_model = model.get_language_model()
    return getattr(language_model, "model", language_model)


def find_grids(model: Any, pieces: list[VisualPiece], items: list[Any]) -> list[Grid | None]:
    """Return the grid of each piece. items: vLLM's data of a prompt's items."""
    own = [model._grid(items[piece.item], piece.modality) for piece in pieces]
    return [
        find_grid(grid, len(piece.indices), piece.modality, model._image_grid)
        for grid, piece in zip(own, pieces, strict=True)
    ]
