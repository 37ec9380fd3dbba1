# SPDX-License-Identifier: Apache-2.0
"""The state of one forward pass of a patched model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.cache.decode_state import DecodeState
from tokenprune.integrations.hf.cache.layer_storage import slots_handed_out
from tokenprune.integrations.hf.cache.reduced_cache import Reduction, attach, cached_tokens, reduction_of
from tokenprune.integrations.hf.cache.static_cache import (
    KeySpan,
    Room,
    StaticReduction,
    filled_span,
    held_keys,
    is_static,
    room_of,
    span_of,
    take_fewer_slots,
)
from tokenprune.integrations.hf.cache.static_cache import attach as attach_static
from tokenprune.integrations.hf.forward.layer_inputs import LayerInputs, columns_for
from tokenprune.integrations.hf.sequence import masks
from tokenprune.integrations.hf.sequence.layout import Layout
from tokenprune.integrations.hf.sequence.mask_functions import MaskFunctions
from tokenprune.view.tokens import Segments

if TYPE_CHECKING:
    from tokenprune.integrations.hf.families import Adapter
    from tokenprune.integrations.hf.forward.plan import Plan
    from tokenprune.integrations.hf.forward.stats import Report

T = TypeVar("T")


class FeatureStates:
    """What each feature of a patch keeps for one forward: one object of a class of its own, found by that class."""

    def __init__(self) -> None:
        self._objects: dict[type, Any] = {}

    def __getitem__(self, kind: type[T]) -> T:
        return self._objects[kind]

    def get(self, kind: type[T]) -> T | None:
        """Return the object of class `kind`, or None if there is none."""
        return self._objects.get(kind)

    def put(self, value: T) -> T:
        """Keep `value` in place of an earlier object of its class, and return it."""
        self._objects[type(value)] = value
        return value

    def pop(self, kind: type[T]) -> T | None:
        """Return the object of class `kind` and let go of it; None if there is none."""
        return self._objects.pop(kind, None)


@dataclass(frozen=True)
class OnHost:
    """What the host knows of a call's tokens.

    masks: bool `[B, L]` for each modality, where its placeholders are. padding: bool `[B, L]`, or None if the caller
    told of none. ids: long `[B, L]`, or None where they are not known or nobody reads them.
    """

    masks: dict[str, Tensor]
    padding: Tensor | None
    ids: Tensor | None

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
        """How many tokens of each row are no padding."""
        return (self.real | self.visual).sum(1).tolist()

    @cached_property
    def visual_ends(self) -> list[tuple[int, int]]:
        """Return (row, position) of the last token of each row where that is a visual one, padding left out."""
        last = (self.real * torch.arange(1, self.real.shape[1] + 1)).argmax(1).tolist()
        return [(row, position) for row, position in enumerate(last) if self.visual[row, position]]


@dataclass(eq=False)
class Call:
    """One forward of the base model. Lives on a stack of its thread, never on the model.

    arguments: what the base model's forward got. outputs: the encoder's output for each modality. masks: bool `[B, L]`
    for each modality, where its placeholders are; host: the same on the host, and more. Both are known where images are
    encoded or handed over. notes: what the statistics are to say. state: what each feature keeps.
    cache, past: the decoder's cache and its logical length; room: the slots of a static one, None = it grows.
    segments: the visual tokens that are left; report: what was removed; both only where the call brings images.
    The rest is set where tokens are missing (`active`). plan: the cuts to make. layout: the tokens at the current
    layer; extras: what the adapter carries along with them. groups: what the layers are handed, one for each group of
    layers that hold the same tokens. maskless: layers that need no attention mask.
    """

    arguments: dict[str, Any]
    outputs: dict[str, Any] = field(default_factory=dict)
    masks: dict[str, Tensor] = field(default_factory=dict)
    host: OnHost | None = None
    notes: list[str] = field(default_factory=list)
    state: FeatureStates = field(default_factory=FeatureStates)

    cache: Cache | None = None
    past: int = 0
    room: Room | None = None
    segments: Segments | None = None
    report: Report | None = None

    plan: Plan | None = None
    layout: Layout | None = None
    extras: Any = None
    groups: list[LayerInputs] = field(default_factory=list)
    maskless: frozenset[int] = frozenset()

    @property
    def active(self) -> bool:
        """Whether tokens are missing: in the cache, or by cuts of this call."""
        return self.layout is not None

    # -- the prompt

    def padding(self, length: int) -> Tensor | None:
        """bool `[B, length]`, True at padding among the call's tokens, or None if the caller told of none."""
        mask = self.arguments.get("attention_mask")
        if is_static(self.arguments.get("past_key_values")):
            return masks.padding_of(mask, self._static_past, length)
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            return None
        return ~mask[:, -length:].bool()

    @cached_property
    def _static_past(self) -> int:
        """The logical length of a static cache at the beginning of the call, where it is asked for first."""
        return int(self.arguments["past_key_values"].get_seq_length())

    def read_to_host(self, masks: dict[str, Tensor], with_ids: bool) -> None:
        """Set `masks`, and bring them, the padding and (`with_ids`) the ids to the host in one go: a call that removes
        no tokens by their number waits for the device no other time."""
        self.masks = masks
        first = next(iter(masks.values()))
        flags, padding = dict(masks), self.padding(first.shape[1])
        if padding is not None:
            flags[""] = padding.to(first.device)
        ids = self.arguments.get("input_ids") if with_ids else None
        parts = [*flags.values(), *([] if ids is None else [ids.to(first.device)])]
        # With ids among them all become numbers.
        flat = torch.cat([part.flatten() for part in parts]).cpu().split([part.numel() for part in parts])
        found = {name: one.view(mask.shape).bool() for (name, mask), one in zip(flags.items(), flat, strict=False)}
        ids = None if ids is None else flat[-1].view(ids.shape)
        self.host = OnHost({name: found[name] for name in masks}, found.get(""), ids)

    def visual(self, device: torch.device) -> Tensor:
        """bool `[B, L]` on `device`: the placeholders of all modalities."""
        return torch.stack(list(self.masks.values())).any(0).to(device)

    # -- the cache

    @property
    def reduction(self) -> Reduction | None:
        """What is missing in the cache; None if nothing is."""
        return reduction_of(self.cache)

    @property
    def decode(self) -> DecodeState | None:
        """What the cache remembers for a method that acts while decoding."""
        return None if self.reduction is None else self.reduction.decode

    @property
    def capacity(self) -> int | None:
        """How many tokens a static cache was made for; None for one that grows."""
        return None if self.room is None else self.room.capacity

    def take_cache(self, cache: Cache | None) -> None:
        """Read what the decoder's cache holds."""
        self.cache, self.past = cache, 0 if cache is None else int(cache.get_seq_length())
        self.room = room_of(cache)

    def save_to_cache(self) -> None:
        """Note on the cache what it holds now."""
        if not self.active or self.cache is None or not any(map(slots_handed_out, self.cache.layers)):
            return  # layers that are checkpointed cache nothing
        decode = self.state.get(DecodeState) or self.decode  # of this call's own cut, or of an earlier one
        if self.reduction is not None or decode is not None or not self.layout.whole:
            slots = [(group.first, group.columns) for group in self.groups]
            length, ragged = self.past + self.layout.length, self.groups[-1].ragged
            if self.room is None:
                attach(self.cache, Reduction(length, slots, ragged, decode))
            else:
                room = self.room
                attach_static(self.cache, StaticReduction(length, slots, ragged, decode, room.capacity, room.full))

    # -- which tokens a layer holds

    def cuts_at(self, layer: int) -> bool:
        """Whether a method is asked which tokens leave at the input of `layer` (0: at the decoder's entry)."""
        return self.plan is not None and layer in self.plan.cuts and len(self.segments) > 0

    def starts_group(self, layer: int) -> bool:
        """Whether the layers from `layer` on hold other tokens than those before it, where a cut at it is made."""
        in_cache = self.reduction is not None and any(first == layer for first, _ in self.reduction.slots)
        return in_cache or self.layout is not self.groups[-1].layout

    def group(self, layer: int) -> LayerInputs:
        """Return what the layers from `layer` on are handed if they hold the tokens of the current layout."""
        start = self.groups[0] if self.groups else None
        device = self.layout.index.device if start is None else start.columns.device
        columns = columns_for(layer, self.layout, self.past, self.reduction, device, self.capacity)
        ragged = bool(self.groups) and self.groups[-1].ragged
        about = (self.past, self.reduction, start, self.capacity, self.state.get(MaskFunctions))
        return LayerInputs(layer, self.layout, columns, ragged, *about)

    def group_of(self, layer: int) -> LayerInputs:
        """Return the group that `layer` belongs to, of those opened so far."""
        return next(group for group in reversed(self.groups) if group.first <= layer)

    def key_span(self, layer: int, adapter: Adapter, kwargs: dict[str, Any]) -> KeySpan | None:
        """Return which columns of its group `layer`, called with `kwargs`, will attend to; None where it needs no
        mask."""
        if layer in self.maskless:
            return None
        if self.room is not None:
            return span_of(self.cache.layers[layer], self.held(layer), self.layout.width)
        shared = adapter.key_count(layer, kwargs)
        if shared is not None:
            return KeySpan(-shared, None, shared)
        # No cache, or a layer that has not run yet: it will see this call's tokens only.
        cached = cached_tokens(self.cache, layer) or 0
        if cached:
            self._check_cached(layer, cached)
        keys = cached + self.layout.width
        return KeySpan(-keys, None, keys)

    def _check_cached(self, layer: int, cached: int) -> None:
        """Raise UnsupportedSetupError where it matters which keys another library took out of a layer's cache."""
        if self.reduction is None or getattr(self.cache.layers[layer], "is_sliding", False):
            return
        missing = self.reduction.of_layer(layer).shape[1] - cached
        if missing > 0 and (self.reduction.ragged or self.decode is not None):
            why = "methods that drop while decoding" if self.decode is not None else "rows of different lengths"
            raise UnsupportedSetupError(
                f"{missing} keys of decoder layer {layer} were taken out of the cache by something else than this "
                f"patch, which does not know which ones: {why} cannot be combined with compression of the cache; "
                "generate one row at a time, with methods that drop before or inside the decoder"
            )

    def known_span(self, layer: int, adapter: Adapter, kwargs: dict[str, Any]) -> KeySpan | None:
        """Return `key_span` without what tokens to come will fill."""
        if self.room is None:
            return self.key_span(layer, adapter, kwargs)
        return filled_span(self.cache.layers[layer], self.held(layer), self.layout.width)

    def past_keys(self, layer: int, adapter: Adapter) -> Tensor | None:
        """Return the keys `[B, H, K, D]` that `layer` will attend to beside the call's own; None without any."""
        if self.room is None:
            count = cached_tokens(self.cache, layer)
            return adapter.cached_keys(layer, self.cache)[:, :, -count:] if count else None
        count = self.known_span(layer, adapter, {}).slots - self.layout.width
        return held_keys(adapter.cached_keys(layer, self.cache), self.held(layer))[:, :, -count:] if count else None

    # -- static caches

    def held(self, layer: int) -> int:
        """Return how many tokens of the past the group of `layer` has."""
        return self.past if self.reduction is None else self.past - self.reduction.removed(layer)

    def fit_slots(self, layer: int) -> None:
        """Let `layer` of a static cache have no more slots than its group will fill."""
        if self.room is None:
            return
        full = take_fewer_slots(self.cache.layers[layer], self.groups[-1].columns.shape[1])
        if full is not None:
            self.room.full[layer] = full

    def filled(self, layer: int) -> int | None:
        """Return how many of the keys that a static layer hands out are tokens; None for other layers."""
        if self.room is None:
            return None
        return filled_span(self.cache.layers[layer], self.held(layer), self.layout.width).slots
