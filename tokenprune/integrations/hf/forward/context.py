# SPDX-License-Identifier: Apache-2.0
"""The state of one forward pass of a patched model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.cache.view import CacheView, view_of
from tokenprune.integrations.hf.forward.layer_inputs import LayerInputs, columns_for
from tokenprune.integrations.hf.forward.token_state import TokenState
from tokenprune.integrations.hf.sequence.layout import Layout
from tokenprune.kernels.transfer import Recent
from tokenprune.selection.segments import Segments

if TYPE_CHECKING:
    from tokenprune.integrations.hf.forward.plan import Merged
    from tokenprune.integrations.hf.forward.report import Report
    from tokenprune.integrations.hf.sequence.mask_functions import MaskFunctions


@dataclass(frozen=True, eq=False)
class OnHost:
    """A call's tokens, as far as the host knows them; calls with prompts of one shape share it.

    masks: bool `[B, L]` for each modality, where its placeholders are. padding: bool `[B, L]`, or None if the caller
    passed no mask. ids: long `[B, L]`, or None where they are not known or no part reads them. positions: those that
    the caller passed, long `[..., B or 1, L]`, or None. numbered: whether its mask numbers tokens above 1.
    """

    masks: dict[str, Tensor]
    padding: Tensor | None
    ids: Tensor | None
    positions: Tensor | None = None
    numbered: bool = False

    @staticmethod
    def read(flat: Tensor, shapes: dict[str, torch.Size], modalities: Collection[str]) -> OnHost:
        """Return what was brought to the host, end to end: masks by modality, and others by name, with these shapes."""
        parts = flat.clone().split([shape.numel() for shape in shapes.values()])
        found = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        masks, padding, numbered = {name: found[name].bool() for name in modalities}, None, False
        if (mask := found.get("mask")) is not None:
            length = next(iter(masks.values())).shape[1]
            padding, numbered = mask[:, -length:] == 0, bool((mask > 1).any())
        return OnHost(masks, padding, found.get("ids"), found.get("positions"), numbered)

    @cached_property
    def placeholders_per_row(self) -> dict[str, list[int]]:
        """The number of placeholders in each row, by modality."""
        return {modality: mask.sum(1).tolist() for modality, mask in self.masks.items()}

    @cached_property
    def real_after_cut(self) -> bool:
        """True if a cut leaves no padding: the caller masks no visual token."""
        return bool((self.real | ~self.visual).all())

    @cached_property
    def visual(self) -> Tensor:
        """bool `[B, L]`: the placeholders of all modalities."""
        return torch.stack(list(self.masks.values())).any(0)

    @cached_property
    def real(self) -> Tensor:
        """bool `[B, L]`: everything but padding."""
        return torch.ones_like(self.visual) if self.padding is None else ~self.padding

    @cached_property
    def padding_to_drop(self) -> Tensor | None:
        """bool `[B, L]`: padding that leaves with the first cut, None without any. A visual token that the caller masks
        is not among it: budgets count it."""
        padding = ~self.real & ~self.visual
        return padding if bool(padding.any()) else None

    @cached_property
    def tokens_per_row(self) -> list[int]:
        """The number of tokens of each row that are no padding."""
        return (self.real | self.visual).sum(1).tolist()

    @cached_property
    def text(self) -> tuple[Tensor, int]:
        """bool `[B, L]`: text after the first placeholder of a row; and how many a row has at most, with padding."""
        after = (self.visual.cumsum(1) > 0) & ~self.visual
        return after & self.real, max(1, int(after.sum(1).max()))

    @cached_property
    def last(self) -> list[int]:
        """The position of the last token of each row, padding left out."""
        return (self.real * torch.arange(1, self.real.shape[1] + 1, device="cpu")).argmax(1).tolist()

    @cached_property
    def visual_ends(self) -> list[tuple[int, int]]:
        """Return (row, position) of the last token of each row where that is a visual one, padding left out."""
        return [(row, position) for row, position in enumerate(self.last) if self.visual[row, position]]


_NOT_READ = OnHost({}, None, None)
_PROMPTS = Recent()
_NOTHING = torch.empty(0, 0, dtype=torch.long, device="cpu")
_NO_LAYOUT = Layout(_NOTHING, None, 0, [])
_NO_SEGMENTS = Segments([], [], [], _NOTHING, _NOTHING.bool(), [], [])
_NO_TOKENS = TokenState(_NO_SEGMENTS, _NO_LAYOUT)


@dataclass(eq=False)
class Call:
    """One forward of the base model. Lives on a stack of its thread, never on the model.

    arguments: of the base model's forward, as the adapter reads them. outputs: the encoder's output for each modality.
    host: the prompt, known where images are encoded or handed over. notes: for the statistics.
    cached: the decoder's cache. state: the tokens at the current layer. merged: tokens that a tower merged, which leave
    at the decoder's entry, or None.
    report: where the call has visual tokens (`has_images`), the cuts to make and what was removed. Nobody may ask for
    that of another call.
    The rest is set where tokens are missing (`active`). groups: what the layers are handed, one for each group of
    layers that hold the same tokens. maskless: layers that need no attention mask. busy: those at which something is
    done in any case.
    """

    arguments: dict[str, Any]
    outputs: dict[str, Any] = field(default_factory=dict)
    host: OnHost = _NOT_READ
    notes: list[str] = field(default_factory=list)

    cached: CacheView = field(init=False)
    state: TokenState = _NO_TOKENS
    merged: Merged | None = None
    has_images: bool = False
    report: Report = field(init=False, repr=False)

    groups: list[LayerInputs] = field(default_factory=list)
    maskless: frozenset[int] = frozenset()
    busy: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.cached = view_of(self.arguments.get(compat.CACHE, self.arguments.get(compat.EARLIER_CACHE)))

    @property
    def active(self) -> bool:
        """True if tokens are missing: in the cache, or by cuts of this call."""
        return self.state.layout is not _NO_LAYOUT

    @property
    def past(self) -> int:
        """The logical length of the cache before the call."""
        return self.cached.past

    # -- the prompt

    def padding(self, length: int) -> Tensor | None:
        """bool `[B, length]`, True at padding among the call's tokens, or None if the caller passed no mask."""
        return self.cached.padding(self.arguments.get("attention_mask"), length)

    def read_to_host(self, masks: dict[str, Tensor], with_ids: bool) -> None:
        """Set `host`: bring the masks of placeholders, bool `[B, L]` for each modality, the padding, the caller's
        positions and (`with_ids`) the ids to the host in one go. A call that removes no tokens by their number waits
        for the device no other time."""
        first = next(iter(masks.values()))
        positions, mask = self.arguments.get("position_ids"), self.arguments.get("attention_mask")
        if positions is not None and positions.is_floating_point():
            positions = None  # a family's own, in fractions, which all that is read with them would become
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            padding = self.padding(first.shape[1])
            mask = None if padding is None else ~padding
        elif mask.is_floating_point():
            mask = mask.ceil().long()
        ids = self.arguments.get("input_ids") if with_ids else None
        asked = {"mask": mask, "ids": ids, "positions": positions}
        given = {name: one.to(first.device) for name, one in (masks | asked).items() if one is not None}
        # With numbers among them all become numbers.
        flat = torch.cat([one.flatten() for one in given.values()]).cpu()
        shapes = {name: one.shape for name, one in given.items()}
        key = (flat.dtype, flat.numpy().tobytes(), *shapes.items())
        self.host = _PROMPTS.get(key, lambda: OnHost.read(flat, shapes, masks))

    # -- the cache

    def take_cache(self, cache: Any) -> None:
        """Set the decoder's cache, where it is not the one that the base model was handed."""
        if cache is not self.cached.cache:
            self.cached = view_of(cache)

    def save_to_cache(self) -> None:
        """Note on the cache what it holds now."""
        cached = self.cached
        if self.active and (cached.reduction is not None or cached.decode is not None or not self.state.layout.whole):
            slots = [(group.first, group.columns) for group in self.groups]
            cached.save(cached.past + self.state.layout.length, slots, self.groups[-1].ragged)

    # -- which tokens a layer holds

    @property
    def cuts(self) -> frozenset[int]:
        """The layers at whose input a method may choose; none where the call is not planned."""
        plan = self.report.plan if self.has_images else None
        return frozenset() if plan is None else plan.cuts

    def cuts_at(self, layer: int) -> bool:
        """Return True if a method chooses which tokens leave at the input of `layer` (0: at the decoder's entry)."""
        plan = self.report.plan if self.has_images else None
        return plan is not None and layer in plan.cuts and len(self.state.segments) > 0

    @cached_property
    def starts(self) -> frozenset[int]:
        """The layers from which on the cache holds other tokens than before them."""
        reduction = self.cached.reduction
        return frozenset() if reduction is None else frozenset([first for first, _ in reduction.slots])

    def touches(self, layer: int, kwargs: dict[str, Any]) -> bool:
        """Return False if `layer`, called with `kwargs`, gets these as they are and nothing is read of them."""
        if not self.groups:
            return False
        return layer in self.busy or not self.groups[-1].passes[kwargs.get("attention_mask") is not None]

    def group(self, layer: int, functions: MaskFunctions | None = None) -> LayerInputs:
        """Return what the layers from `layer` on are handed if they hold the tokens of the current layout.

        functions: what the decoder's masks are made of; later groups have those of the first.
        """
        start, cached = self.groups[0] if self.groups else None, self.cached
        functions = functions if start is None else start.functions
        device = self.state.layout.index.device if start is None else start.columns.device
        columns = columns_for(layer, self.state.layout, cached.past, cached.reduction, device, cached.capacity)
        ragged = bool(self.groups) and self.groups[-1].ragged
        about = (cached.past, cached.reduction, start, cached.capacity, functions)
        return LayerInputs(layer, self.state.layout, columns, ragged, *about)
