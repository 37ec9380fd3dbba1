# SPDX-License-Identifier: Apache-2.0
"""The state of one forward pass of a patched model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from tokenprune.integrations.attachable import hidden_states
from tokenprune.integrations.hf import masks
from tokenprune.integrations.hf.adapters import Adapter
from tokenprune.integrations.hf.cache import Reduction, attach, cached_tokens, new_positions, reduction_of
from tokenprune.integrations.hf.layout import Layout, gather_tokens
from tokenprune.integrations.hf.observe import Inputs, Observation
from tokenprune.integrations.hf.report import Report
from tokenprune.tokens import Segments

if TYPE_CHECKING:
    from tokenprune.integrations.hf.block_attention import BlockPlan
    from tokenprune.integrations.hf.cutting import Merged
    from tokenprune.integrations.hf.decode_state import DecodeState
    from tokenprune.integrations.hf.guarding import Verdict
    from tokenprune.integrations.hf.unmerging import Unmerged


@dataclass(frozen=True)
class OnHost:
    """What the host knows of a call's tokens.

    visual: bool `[B, L]` for each modality, where its placeholders are. padding: bool `[B, L]`, or None if the caller
    told of none. ids: long `[B, L]`, or None where they are not known or nobody reads them.
    """

    visual: dict[str, Tensor]
    padding: Tensor | None
    ids: Tensor | None


@dataclass
class Call:
    """One forward of the base model. Lives on a stack of its thread, never on the model.

    arguments: what the base model's forward got. outputs: the encoder's output for each modality. reads_text: whether
    the ids of a prompt are read.
    The rest is set when the decoder is entered and there is something to do (`active`): `past` is the logical length of
    the cache, `arrival` the layout of the tensors that the decoder hands to its layers, `layout` the one at the current
    layer.
    """

    arguments: dict[str, Any]
    outputs: dict[str, Any] = field(default_factory=dict)
    visual: dict[str, Tensor] = field(default_factory=dict)
    reads_text: bool = False

    active: bool = False
    cache: Cache | None = None
    reduction: Reduction | None = None
    past: int = 0
    segments: Segments | None = None
    layout: Layout | None = None
    arrival: Layout | None = None
    group: int = 0
    columns: list[tuple[int, Tensor]] = field(default_factory=list)
    ragged: bool = False
    extras: Any = None
    observation: Observation | None = None
    ahead: Observation | None = None  # of the layer behind the cut, made for the cut
    inputs: Inputs = field(default_factory=Inputs)  # what methods read of the entry, and of the layer before a cut
    looking: bool = False  # whether a layer is run only to see its queries and keys
    report: Report | None = None
    cuts: set[int] = field(default_factory=set)
    decode: DecodeState | None = None  # of the cache as it came
    started: DecodeState | None = None  # of this call's cut
    decides_at: int | None = None
    merged: Merged | None = None  # what is left of the visual tokens after a merge in the encoder
    unmerged: Unmerged | None = None  # such tokens that stay one for the decoder's weights alone
    text: list[int] = field(default_factory=list)
    verdict: Verdict | None = None  # of the guard, which may have a cut leave more tokens than its budget says
    blocks: BlockPlan | None = None  # if this call's attention goes in blocks
    notes: list[str] = field(default_factory=list)
    memo: dict[Any, Any] = field(default_factory=dict)

    def padding(self, length: int) -> Tensor | None:
        """bool `[B, length]`, True at padding among the call's tokens, or None if the caller told of none."""
        mask = self.arguments.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            return None
        return ~mask[:, -length:].bool()

    @cached_property
    def host(self) -> OnHost:
        """The masks of placeholders and padding, and the ids, brought to the host in one go: a call that removes no
        tokens by their number waits for the device no other time."""
        first = next(iter(self.visual.values()))
        masks, padding = dict(self.visual), self.padding(first.shape[1])
        if padding is not None:
            masks[""] = padding.to(first.device)
        ids = self.arguments.get("input_ids") if self.reads_text else None
        parts = [*masks.values(), *([] if ids is None else [ids.to(first.device)])]
        # With ids among them all become numbers.
        flat = torch.cat([part.flatten() for part in parts]).cpu().split([part.numel() for part in parts])
        found = {name: one.view(mask.shape).bool() for (name, mask), one in zip(masks.items(), flat, strict=False)}
        ids = None if ids is None else flat[-1].view(ids.shape)
        return OnHost({name: found[name] for name in self.visual}, found.get(""), ids)

    @cached_property
    def padding_to_drop(self) -> Tensor | None:
        """bool `[B, L]`, on the host: padding that leaves with the first cut, None without any. A visual token that the
        caller masks is not among it: budgets count it."""
        padding = self.host.padding
        if padding is not None:
            padding = padding & ~torch.stack(list(self.host.visual.values())).any(0)
        return padding if padding is not None and bool(padding.any()) else None

    def visual_ends(self) -> list[tuple[int, int]]:
        """Return (row, position) of the last token of each row where that is a visual one, padding left out."""
        visual, padding = torch.stack(list(self.host.visual.values())).any(0), self.host.padding
        real = torch.ones_like(visual) if padding is None else ~padding
        last = (real * torch.arange(1, visual.shape[1] + 1)).argmax(1).tolist()
        return [(row, position) for row, position in enumerate(last) if visual[row, position]]

    def tokens_per_row(self, batch: int, length: int) -> list[int]:
        """Return how many of a row's `length` tokens are no padding."""
        padding = self.padding_to_drop
        return [length] * batch if padding is None else (length - padding.sum(1)).tolist()

    # -- the cache

    def take_cache(self, cache: Cache | None) -> None:
        """Read what the decoder's cache holds."""
        self.cache, self.reduction = cache, reduction_of(cache)
        self.past = int(cache.get_seq_length()) if cache is not None else 0
        self.ragged = self.reduction is not None and self.reduction.ragged

    def leave_cache(self) -> None:
        """Note on the cache what it holds now."""
        if self.active and self.cache is not None:
            length, decode = self.past + self.layout.length, self.started or self.decode
            attach(self.cache, Reduction(length, self.columns, self.ragged, decode))

    # -- which keys a layer holds

    def starts_group(self, layer: int) -> bool:
        """Whether the layers from `layer` on hold other tokens than those before it."""
        return layer in self.cuts or (
            self.reduction is not None and any(first == layer for first, _ in self.reduction.slots)
        )

    def open_group(self, layer: int) -> None:
        """The layers from `layer` on hold the past of their group and the tokens of the current layout."""
        current = self.layout.positions().to(self.arrival.index.device)
        if self.past:
            current = torch.where(current < 0, current, current + self.past)
            if self.reduction is not None:
                before = self.reduction.of_layer(layer)
            else:
                before = new_positions(0, self.past, current.shape[0], current.device)
            current = torch.cat([before, current], dim=1)
        self.columns.append((layer, current))
        self.group = layer
        self.ragged = self.ragged or self.layout.valid is not None

    def columns_of(self, layer: int, keys: int | None = None) -> Tensor:
        """long `[B, K]`: logical positions of the keys that `layer` will attend to in this call, -1 = empty slot.

        keys: how many they are, where that is not told by the layer's own cache."""
        columns = self._columns_of_group(layer)
        if keys is None:
            # No cache, or a layer that has not run yet: it will see this call's tokens only.
            keys = (cached_tokens(self.cache, layer) or 0) + self.layout.width
        # A sliding layer has thrown its oldest slots away.
        return columns[:, -keys:]

    def _columns_of_group(self, layer: int) -> Tensor:
        return next(columns for first, columns in reversed(self.columns) if first <= layer)

    def arrival_columns(self, columns: Tensor) -> Tensor:
        """Translate logical positions into columns of the masks that the decoder made."""
        if self.arrival.width == self.arrival.length and self.arrival.valid is None:
            return columns
        if "arrival" not in self.memo:
            first = self.columns[0][1]
            target = torch.where(first < 0, self.past + self.arrival.length, first)
            inverse = first.new_full((first.shape[0], self.past + self.arrival.length + 1), -1)
            slots = torch.arange(first.shape[1], device=first.device).expand_as(first)
            self.memo["arrival"] = inverse.scatter_(1, target, slots)[:, :-1]
        found = self.memo["arrival"].gather(1, columns.clamp(min=0))
        return found.masked_fill(columns < 0, -1)

    # -- what a layer gets

    def rows(self) -> Tensor | None:
        """long `[B, W]`: slots of the arrival layout that the current layout consists of; None if they are the same."""
        if self.layout is self.arrival:
            return None
        key = ("rows", self.group)
        if key not in self.memo:
            self.memo[key] = self.arrival.slot_of.to(self.layout.index.device).gather(1, self.layout.index)
        return self.memo[key]

    def gathered(self, value: Any, dim: int) -> Any:
        """Gather a per-token tensor, or a tuple of them, for the current layout; the same object is gathered once."""
        rows = self.rows()
        if rows is None or value is None:
            return value
        if isinstance(value, (tuple, list)):
            return type(value)(self.gathered(item, dim) for item in value)
        key = (self.group, id(value), dim)
        if key not in self.memo:
            # The value is kept beside the result: an id is only unique while its object lives.
            self.memo[key] = (value, gather_tokens(value, rows, dim))
        return self.memo[key][1]

    def layer_arguments(
        self, layer: int, args: tuple, kwargs: dict[str, Any], adapter: Adapter
    ) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of a layer for the current layout; the hidden states among them are in it already."""
        if "attention_mask" in kwargs or self.ragged:
            mask = kwargs.get("attention_mask")
            if layer in adapter.stateful:
                kwargs["attention_mask"] = self.state_mask(mask)
            else:
                dtype, keys = hidden_states(args, kwargs).dtype, adapter.key_count(layer, kwargs)
                kwargs["attention_mask"] = self.layer_mask(mask, layer, adapter.attention, dtype, keys)
        if self.layout is not self.arrival:
            args = list(args)
            for name, dim in adapter.layer_tokens.items():
                if isinstance(name, int):
                    if name < len(args):
                        args[name] = self.gathered(args[name], dim)
                elif kwargs.get(name) is not None:
                    kwargs[name] = self.gathered(kwargs[name], dim)
        return tuple(args), kwargs

    def state_mask(self, mask: Tensor | None) -> Tensor | None:
        """Return the mask of a layer that carries a state: bool or int `[B, W]`, which of the call's tokens enter it
        (None = all). mask: the same for the arrival layout."""
        if self.layout is self.arrival:
            return mask
        valid = self.layout.valid
        if mask is None:
            return valid
        mask = mask.gather(1, self.rows().to(mask.device))
        return mask if valid is None else mask.masked_fill(~valid.to(mask.device), 0)

    def layer_mask(self, mask: Any, layer: int, attention: str, dtype: torch.dtype, keys: int | None = None) -> Any:
        """Return the attention mask of a layer. mask: what the decoder made for the arrival layout. keys: see
        `columns_of`."""
        if self.blocks is not None and layer in self.blocks.layers:
            return None  # it knows itself who attends to whom
        if self.layout is self.arrival and self.reduction is None:
            return mask  # the decoder made it for exactly these tokens
        if mask is None and not self.ragged:
            return None
        columns = self.columns_of(layer, keys)
        key = ("mask", self.group, id(mask), columns.shape[1])
        if key not in self.memo:
            view = None
            if self.decode is not None and layer >= self.decode.layer:
                whole = columns.shape[1] == self._columns_of_group(layer).shape[1]
                columns, view = self.decode.arrange(columns, whole)
            if mask is None:
                made = masks.causal_mask(columns >= 0, self.layout.width, attention, dtype)
            else:
                made = masks.gather_mask(mask, self.rows(), self.arrival_columns(columns))
            self.memo[key] = (mask, made, view)
        if self.decode is not None:
            self.decode.view = self.memo[key][2]
        return self.memo[key][1]
