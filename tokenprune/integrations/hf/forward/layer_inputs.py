# SPDX-License-Identifier: Apache-2.0
"""Make the inputs of decoder layers when tokens are gone: masks, positions, and the keys that they see."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from tokenprune.integrations.hf.cache.reduced_cache import Reduction, new_positions
from tokenprune.integrations.hf.cache.static_cache import KeySpan
from tokenprune.integrations.hf.sequence import masks
from tokenprune.integrations.hf.sequence.layout import Layout, gather_tokens
from tokenprune.integrations.hf.sequence.mask_functions import MaskFunction, MaskFunctions
from tokenprune.integrations.shared.attachable import get_hidden_states
from tokenprune.models.families import Family


class LayerFacts(Protocol):
    """Facts about the layers of a decoder; see `Adapter`, which has them."""

    @property
    def stateful(self) -> Collection[int]: ...

    @property
    def attention(self) -> str: ...

    @property
    def family(self) -> Family: ...


def columns_for(
    layer: int, layout: Layout, past: int, reduction: Reduction | None, device: torch.device,
    capacity: int | None = None,
) -> Tensor:  # fmt: skip
    """Return the logical positions of the keys that `layer` holds, long `[B, K]`, -1 = empty slot: those of the past,
    those of `layout`, and up to `capacity`, where a static cache has slots for them, those of tokens to come."""
    columns = layout.positions().to(device)
    if past:
        batch = len(columns)
        before = new_positions(0, past, batch, device) if reduction is None else reduction.held(layer, past)
        columns = torch.cat([before, torch.where(columns < 0, columns, columns + past)], dim=1)
    if capacity is not None:
        known = past + layout.length
        columns = torch.cat([columns, new_positions(known, capacity - known, len(columns), device)], dim=1)
    return columns


@dataclass(eq=False)
class LayerInputs:
    """Inputs of a group of decoder layers: those from `first` to the next group, which hold the same tokens.

    Nothing here changes but what is remembered: tensors made for one layer serve the others of the group.

    layout: the call's tokens that they hold. columns: long `[B, K]`, logical positions of all keys that they hold, -1 =
    empty slot. capacity: tokens that a static cache was made for, None = it grows. ragged: whether an earlier group has
    empty slots. past: the logical length of the cache; reduction: what is missing in it, None = nothing. start: the
    call's first group, for which the decoder itself made masks and positions; None: this is it. functions: what the
    decoder's masks are made of, None = not known. passes: True if it is known that layers get all of their arguments as
    they are: those that are handed no mask, and those that are.
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
        # The decoder made its mask for what arrives, empty slots included; it knows nothing of what the cache lacks.
        whole = self.reduction is None
        self.passes = (same and (whole or not self.ragged), same and whole and not self.past)

    # -- arguments of a layer

    def arguments(
        self, layer: int, args: tuple, kwargs: dict[str, Any], adapter: LayerFacts, keys: KeySpan | None
    ) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of `layer` for its tokens; the hidden states among them are in the group's layout
        already. keys: which of `columns` the layer attends to; None: it needs no mask."""
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
                        placed[name] = self.gathered(placed[name], dim)
                elif name in kwargs:
                    kwargs[name] = self.gathered(kwargs[name], dim)
            args = tuple(placed)
        return args, kwargs

    @cached_property
    def rows(self) -> Tensor | None:
        """long `[B, W]`: slots of the arrival layout that the group's layout consists of; None if they are the same."""
        if self.layout is self.arrival:
            return None
        index = self.layout.index
        return index if self.arrival.whole else self.arrival.slot_of.to(index.device).gather(1, index)

    def gathered(self, value: Any, dim: int) -> Any:
        """Gather a per-token tensor, or a tuple of them, for the group's layout; the same object is gathered once."""
        if self.rows is None or value is None:
            return value
        if (found := self._memo.get((id(value), dim))) is None:
            if isinstance(value, (tuple, list)):
                result: Any = type(value)([self.gathered(item, dim) for item in value])
            else:
                result = gather_tokens(value, self.rows, dim)
            # The value is kept beside the result: an id is only unique while its object lives.
            found = self._memo[id(value), dim] = (result, value)
        return found[0]

    def state_mask(self, mask: Tensor | None) -> Tensor | None:
        """Return the mask of a layer that carries a state: bool or int `[B, W]`, which of the call's tokens enter it
        (None = all). mask: the same for the arrival layout."""
        return mask if self.rows is None else masks.gather_token_mask(mask, self.rows, self.layout.valid)

    def attention_mask(
        self, mask: Any, keys: KeySpan, adapter: LayerFacts, dtype: torch.dtype, layer: int | None = None
    ) -> Any:
        """Return the attention mask of a layer that attends to `keys`. mask: what the decoder made for the arrival
        layout, or a `MaskFunction`. dtype: see `masks.causal_mask`. layer: which it is, if `mask` was handed to one."""
        made_for_these = self.capacity is None or self.arrival.whole
        if self.layout is self.arrival and self.reduction is None and made_for_these:
            return self._of_held(mask, keys)  # the decoder made it for exactly these tokens
        if mask is None and not self.ragged:
            return None
        if self.functions is not None and layer is not None:
            mask = self.functions.of_layer(layer, mask)

        if (found := self._memo.get(("mask", id(mask), keys))) is None:
            found = self._memo["mask", id(mask), keys] = (self._made_mask(mask, keys, adapter, dtype), mask)
        return found[0]

    def _made_mask(self, mask: Any, keys: KeySpan, adapter: LayerFacts, dtype: torch.dtype) -> Tensor | None:
        columns = self.visible_keys(keys)
        if isinstance(mask, MaskFunction):
            # True if it is known that a layer sees keys of its queries alone, none of which is padding.
            known = self.functions is not None and self.functions.no_padding_after_cut
            real = known and not self.past and not self.layout.whole
            queries = self.layout.index + self.past if self.past else self.layout.index
            return mask.mask(queries, columns, real and not self.ragged, real)
        if mask is not None:
            columns = self._arrival_columns(columns)
            if self.capacity is None:
                columns = self._behind_first(mask, columns)
            else:
                # Masks of sliding layers end before the tokens to come.
                columns = columns.masked_fill(columns >= mask.shape[-1], -1)
            return masks.gather_mask(mask, self.rows, columns)
        own = self.layout.positions()
        queries = torch.where(own < 0, -1, own + self.past)
        return masks.causal_mask(queries, columns, adapter.attention, dtype)

    # -- keys

    def visible_keys(self, keys: KeySpan) -> Tensor:
        """Return the logical positions (long `[B, n]`, -1 = hidden) that a layer sees which attends to `keys`."""

        if (found := self._memo.get(keys)) is None:
            found = keys.of(self.columns)
            found = self._memo[keys] = found if self.decode is None else self.decode.hide(found)
        return found

    def _of_held(self, mask: Any, keys: KeySpan) -> Any:
        """Return what a sliding layer, which holds the last keys, needs of a mask that was made for all of them."""
        wider = isinstance(mask, Tensor) and mask.ndim == 4 and self.capacity is None and mask.shape[-1] > keys.slots
        return mask[..., -keys.slots :] if wider else mask

    def _behind_first(self, mask: Any, columns: Tensor) -> Tensor:
        """Translate columns of all keys into those of `mask`, which may have the last ones alone: a sliding layer's."""
        keys = self.past + self.layout.length if self.arrival.whole else (self.start or self).columns.shape[1]
        first = keys - mask.shape[-1] if isinstance(mask, Tensor) else 0
        return columns if first <= 0 else (columns - first).clamp(min=-1)

    def _arrival_columns(self, columns: Tensor) -> Tensor:
        """Translate logical positions into columns of the masks that the decoder made."""
        if self.arrival.whole:
            return columns
        places = (self.start or self)._places
        return places.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, -1)

    @cached_property
    def _places(self) -> Tensor:
        """long `[B, past + length]`: the slot of each logical position, -1 if it is gone."""
        batch, count = self.columns.shape
        length = self.past + self.layout.length if self.capacity is None else self.capacity
        # Empty slots are written to a scratch entry at the end.
        target = self.columns.masked_fill(self.columns < 0, length)
        slots = torch.arange(count, device=target.device).expand_as(target)
        return target.new_full((batch, length + 1), -1).scatter_(1, target, slots)[:, :-1]
