# SPDX-License-Identifier: Apache-2.0
"""Inputs of the decoder, and of its layers after tokens were dropped: masks, positions and visible keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.cache.reduced_cache import Reduction, build_positions
from tokenprune.integrations.hf.cache.static_cache import KeySpan
from tokenprune.integrations.hf.forward.token_state import Layout, gather_token_mask, gather_tokens
from tokenprune.integrations.hf.sequence import masks
from tokenprune.integrations.hf.sequence.mask_functions import MaskFunction, MaskFunctions
from tokenprune.integrations.shared.attachable import get_hidden_states
from tokenprune.models.families import Family

# Arguments that are fields of `DecoderInputs`, without the cache, which has two names.
_NAMES = ("inputs_embeds", "attention_mask", "position_ids")
_OWN = (*_NAMES, *compat.CACHE_NAMES)


@dataclass(frozen=True)
class DecoderInputs:
    """Arguments of one call of a decoder. Parts that change an argument return a changed copy.

    Attributes:
        embeds: Input embeddings, shape (batch, length, channels).
        mask: Attention mask in any form that the decoder takes, or None.
        positions: Position ids, shape (..., batch or 1, length), int64. None if the decoder counts them.
        cache: Key-value cache, or None.
        extras: All other arguments.
        names: Names of all arguments, including arguments with the value None.
    """

    embeds: Tensor
    mask: Any
    positions: Tensor | None
    cache: Any
    extras: dict[str, Any]
    names: frozenset[str]

    @staticmethod
    def from_arguments(arguments: Mapping[str, Any]) -> DecoderInputs:
        """Split the keyword arguments of a decoder's forward."""
        fields: dict[str, Any] = dict.fromkeys(_OWN)
        extras: dict[str, Any] = {}
        for name, value in arguments.items():
            (fields if name in fields else extras)[name] = value
        cache = fields[compat.CACHE if compat.CACHE in arguments else compat.EARLIER_CACHE]
        embeds, mask, positions = (fields[name] for name in _NAMES)
        return DecoderInputs(embeds, mask, positions, cache, extras, frozenset(arguments))

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for the decoder, in a new dictionary."""
        arguments, names = {**self.extras}, self.names
        earlier = compat.EARLIER_CACHE in names and compat.CACHE not in names
        cache = compat.EARLIER_CACHE if earlier else compat.CACHE
        values = (self.embeds, self.mask, self.positions, self.cache)
        for name, value in zip((*_NAMES, cache), values, strict=True):
            if value is not None or name in names:
                arguments[name] = value
        return arguments


class LayerFacts(Protocol):
    """The part of an `Adapter` that `LayerInputs` reads."""

    @property
    def stateful(self) -> Collection[int]: ...

    @property
    def attention(self) -> str: ...

    @property
    def family(self) -> Family: ...


def find_key_positions(
    layer: int, layout: Layout, past: int, reduction: Reduction | None, device: torch.device,
    capacity: int | None = None,
) -> Tensor:  # fmt: skip
    """Return the logical positions of the keys that `layer` holds, shape (batch, keys), int64, -1 for empty slots.

    Args:
        layer: Index of the layer.
        layout: Tokens of the call.
        past: Logical length of the cache.
        reduction: Positions that the cache holds, or None if it is complete.
        device: Device of the result.
        capacity: Capacity of a static cache, whose keys of later tokens are included, or None.
    """
    columns = layout.positions().to(device)
    if past:
        batch = len(columns)
        before = build_positions(0, past, batch, device) if reduction is None else reduction.get_past_slots(layer, past)
        columns = torch.cat([before, torch.where(columns < 0, columns, columns + past)], dim=1)
    if capacity is not None:
        known = past + layout.length
        columns = torch.cat([columns, build_positions(known, capacity - known, len(columns), device)], dim=1)
    return columns


@dataclass(eq=False)
class LayerInputs:
    """Inputs of a group of decoder layers with the same tokens: the layers from `first` to the next group.

    Tensors that were built for one layer are cached and reused for the other layers of the group.

    Attributes:
        first: Index of the first layer.
        layout: Tokens of the call that the layers hold.
        columns: Logical positions of all keys, shape (batch, keys), int64, -1 for empty slots.
        ragged: Whether the keys may have empty slots. The constructor takes the value of the previous group.
        past: Logical length of the cache before the call.
        reduction: Positions that the cache holds, or None if it is complete.
        start: First group of the call, whose masks and positions the decoder built. None for this group itself.
        capacity: Capacity of a static cache, or None if the cache grows.
        functions: Functions that build the decoder's masks, or None if they are unknown.
        passes: Whether layers take their arguments unchanged: without a mask, and with a mask.
    """

    first: int
    layout: Layout
    columns: Tensor
    ragged: bool
    past: int
    reduction: Reduction | None
    start: LayerInputs | None
    capacity: int | None = None
    functions: MaskFunctions | None = None
    _memo: dict[Any, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.arrival = self.layout if self.start is None else self.start.layout
        cached = None if self.reduction is None else self.reduction.decode
        self.decode = cached if cached is not None and self.first >= cached.layer else None
        missing = self.reduction is not None and self.reduction.ragged
        hidden = self.decode is not None and self.decode.has_hidden
        self.ragged = self.ragged or missing or hidden or self.layout.valid is not None
        same = self.layout is self.arrival and self.capacity is None and cached is None
        # The decoder's mask fits the arriving tokens and their empty slots, but not a reduced cache.
        is_complete = self.reduction is None
        self.passes = (same and (is_complete or not self.ragged), same and is_complete and not self.past)

    # -- arguments of a layer

    def arguments(
        self, layer: int, args: tuple, kwargs: dict[str, Any], adapter: LayerFacts, keys: KeySpan | None
    ) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of `layer` for the group's tokens.

        Args:
            layer: Index of the layer.
            args, kwargs: Arguments of the layer. Only the hidden states are in the group's layout already.
            adapter: Adapter of the model.
            keys: Columns that the layer attends to, or None if it runs without a mask.
        """
        kwargs = dict(kwargs)
        if "attention_mask" in kwargs or self.ragged:
            mask = kwargs.get("attention_mask")
            if layer in adapter.stateful:
                mask = self.state_mask(mask)
            elif keys is None:
                mask = None
            else:
                mask = self.attention_mask(mask, keys, adapter, get_hidden_states(args, kwargs).dtype, layer)
            kwargs["attention_mask"] = mask
        if self.rows is not None:
            placed = list(args)
            for name, dim in adapter.family.layer_tokens.items():
                if isinstance(name, int):
                    if name < len(placed):
                        placed[name] = self.gather_for_group(placed[name], dim)
                elif name in kwargs:
                    kwargs[name] = self.gather_for_group(kwargs[name], dim)
            args = tuple(placed)
        return args, kwargs

    @cached_property
    def rows(self) -> Tensor | None:
        """Slots of the arrival layout that form the group's layout, shape (batch, width), or None if they are equal."""
        if self.layout is self.arrival:
            return None
        index = self.layout.index
        return index if self.arrival.is_uncut else self.arrival.slot_index.to(index.device).gather(1, index)

    def gather_for_group(self, value: Any, dim: int) -> Any:
        """Gather a per-token tensor, or a tuple of such tensors, for the group's layout. Results are cached by id."""
        if self.rows is None or value is None:
            return value
        if (entry := self._memo.get((id(value), dim))) is None:
            if isinstance(value, (tuple, list)):
                result: Any = type(value)([self.gather_for_group(item, dim) for item in value])
            else:
                result = gather_tokens(value, self.rows, dim)
            # The value is stored with the result, because an id is unique only while its object lives.
            entry = self._memo[id(value), dim] = (result, value)
        return entry[0]

    def state_mask(self, mask: Tensor | None) -> Tensor | None:
        """Cut the token mask of a layer with a recurrent state, shape (batch, width). None means all tokens."""
        return mask if self.rows is None else gather_token_mask(mask, self.rows, self.layout.valid)

    def attention_mask(
        self, mask: Any, keys: KeySpan, adapter: LayerFacts, dtype: torch.dtype, layer: int | None = None
    ) -> Any:
        """Return the attention mask of a layer.

        Args:
            mask: The decoder's mask for the arrival layout, or a `MaskFunction`.
            keys: Columns that the layer attends to.
            adapter: Adapter of the model.
            dtype: See `masks.build_causal_mask`.
            layer: Index of the layer, if `mask` is one of its arguments.
        """
        fits_capacity = self.capacity is None or self.arrival.is_uncut
        if self.layout is self.arrival and self.reduction is None and fits_capacity:
            return self._select_last_columns(mask, keys)  # the decoder built it for exactly these tokens
        if mask is None and not self.ragged:
            return None
        if self.functions is not None and layer is not None:
            mask = self.functions.select_for_layer(layer, mask)

        if (entry := self._memo.get(("mask", id(mask), keys))) is None:
            entry = self._memo["mask", id(mask), keys] = (self._build_mask(mask, keys, adapter, dtype), mask)
        return entry[0]

    def _build_mask(self, mask: Any, keys: KeySpan, adapter: LayerFacts, dtype: torch.dtype) -> Tensor | None:
        columns = self.visible_keys(keys)
        if isinstance(mask, MaskFunction):
            # True if a layer sees only the keys of the call's tokens, without padding.
            known = self.functions is not None and self.functions.no_padding_after_cut
            has_no_padding = known and not self.past and not self.layout.is_uncut
            queries = self.layout.index + self.past if self.past else self.layout.index
            return mask.build_mask(queries, columns, has_no_padding and not self.ragged, has_no_padding)
        if mask is not None:
            columns = self._to_arrival_columns(columns)
            if self.capacity is None:
                columns = self._shift_columns(mask, columns)
            else:
                # Masks of sliding layers end before the columns of later tokens.
                columns = columns.masked_fill(columns >= mask.shape[-1], -1)
            return masks.gather_mask(mask, self.rows, columns)
        positions = self.layout.positions()
        queries = torch.where(positions < 0, -1, positions + self.past)
        return masks.build_causal_mask(queries, columns, adapter.attention, dtype)

    # -- keys

    def visible_keys(self, keys: KeySpan) -> Tensor:
        """Return the logical positions of `keys`, shape (batch, keys), int64, -1 for hidden keys."""
        if (visible := self._memo.get(keys)) is None:
            visible = keys.select(self.columns)
            visible = self._memo[keys] = visible if self.decode is None else self.decode.hide(visible)
        return visible

    def _select_last_columns(self, mask: Any, keys: KeySpan) -> Any:
        """Return the columns of a mask that a sliding layer needs, which holds only the last keys."""
        wider = isinstance(mask, Tensor) and mask.ndim == 4 and self.capacity is None and mask.shape[-1] > keys.slots
        return mask[..., -keys.slots :] if wider else mask

    def _shift_columns(self, mask: Any, columns: Tensor) -> Tensor:
        """Translate columns of all keys to columns of `mask`, which has only the last keys in a sliding layer."""
        keys = self.past + self.layout.length if self.arrival.is_uncut else (self.start or self).columns.shape[1]
        first = keys - mask.shape[-1] if isinstance(mask, Tensor) else 0
        return columns if first <= 0 else (columns - first).clamp(min=-1)

    def _to_arrival_columns(self, columns: Tensor) -> Tensor:
        """Translate logical positions to columns of the decoder's masks."""
        if self.arrival.is_uncut:
            return columns
        slots = (self.start or self)._slot_index
        return slots.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, -1)

    @cached_property
    def _slot_index(self) -> Tensor:
        """Slot of each logical position, shape (batch, past + length), int64, -1 if it was dropped."""
        batch, count = self.columns.shape
        length = self.past + self.layout.length if self.capacity is None else self.capacity
        # Empty slots are written to a scratch entry at the end.
        target = self.columns.masked_fill(self.columns < 0, length)
        slots = torch.arange(count, device=target.device).expand_as(target)
        return target.new_full((batch, length + 1), -1).scatter_(1, target, slots)[:, :-1]
