# SPDX-License-Identifier: Apache-2.0
"""Masks of the tokens that remain, made as a decoder makes its own, in no more rows and columns than there are.

transformers says which key a query sees by functions of their places in the full sequence, one for each kind of layer,
and writes a mask of all pairs of places from each. Here these functions are asked about the places that are left.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.sequence.masks import to_additive

_NAME = "tokenprune_functions"
_ATTENTION = ("sdpa", "eager")  # flash attention takes masks of one axis, flex attention makes blocks of its own


@dataclass(frozen=True)
class MaskFunction:
    """Keys that the queries of one kind of layer see.

    sees: of (row, head, query, key), places in the full sequence. window: how far a query sees at most, None = all.
    real: bool `[B, length]`, which places are no padding, None = all. length: of the full sequence. write: what writes
    a mask in the form that the layers take, and the arguments of it that places do not change. form: what brings a mask
    of bool into it, where `sees` takes tensors of places; None where it takes one place at a time.
    """

    sees: Callable[..., Tensor]
    window: int | None
    real: Tensor | None
    length: int
    write: Callable[..., Tensor | None]
    form: Callable[[Tensor], Tensor] | None

    def build_mask(self, queries: Tensor, keys: Tensor, whole: bool, known_real: bool = False) -> Tensor | None:
        """Return `[B, 1, Q, K]`, bool (True = may attend) or to_additive float; None where the attention function needs
        none to be causal.

        queries: long `[B, Q]`, keys: long `[B, K]`, their places; -1 = an empty slot, hidden from all. whole: whether
        it is known that the keys are the queries, and none is empty or padding; known_real: that none is padding.
        """
        queries, real, causal = queries.to(keys.device), None, self.sees is causal_mask_function
        padding = None if whole or known_real else self.real
        if not whole:
            real = keys >= 0
            if padding is not None or not causal:  # causality alone asks nothing of an empty slot
                keys = keys.clamp(min=0)
            if padding is not None:
                real &= padding.to(keys.device).gather(1, keys)
        # Nothing is asked of `real` then: the host would have to wait for the device.
        plain = whole and (self.window is None or self.length < self.window)
        if self.form is not None and not plain:
            row: Any = None if causal else torch.arange(len(keys), device=keys.device)[:, None, None, None]
            seen = self.sees(row, row if row is None else row[:1], queries[:, None, :, None], keys[:, None, None, :])
            seen = seen if real is None else seen & real[:, None, None, :]
            return self.form(seen.expand(len(keys), 1, queries.shape[1], keys.shape[1]))

        def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return self.sees(row, head, queries[row, query], keys[row, key])

        return self.write(
            batch_size=len(keys),
            q_length=queries.shape[1],
            kv_length=keys.shape[1],
            q_offset=0,
            kv_offset=0,
            mask_function=sees,
            attention_mask=real,
            plain=plain,
            device=keys.device,
        )


@dataclass(frozen=True)
class MaskFunctions:
    """Functions that a decoder's masks are made of.

    make: returns the masks that a decoder of a config would make for a call. config: the decoder's. length: of the full
    sequence, with the tokens in the cache. no_padding_after_cut: whether it is known that a cut leaves no padding.
    """

    make: Callable[[Any], Any]
    config: Any
    length: int
    no_padding_after_cut: bool

    @cached_property
    def attention(self) -> str | None:
        """Name of the attention implementation; None where it takes no masks of pairs."""
        name = self.config._attn_implementation
        return name if name in _ATTENTION else None

    @cached_property
    def kinds(self) -> list[str] | None:
        """The kind of each layer, None where there is but one."""
        return getattr(self.config, "layer_types", None)

    @cached_property
    def built(self) -> Any:
        """The result of `make`, with a `MaskFunction` in the place of each mask of pairs."""
        AttentionMaskInterface.register(_NAME, _function)
        noted = copy.copy(self.config)
        noted._attn_implementation_internal = _NAME
        noted.tokenprune_original = self.config, self.length
        return self.make(noted)

    def select_for_layer(self, layer: int, mask: Any) -> Any:
        """Return what to make masks of for `layer`, which was handed `mask`: the function that this was made by, or
        `mask` itself where the decoder added something of its own to it, or attention takes no masks of pairs."""
        if self.attention is None:
            return mask
        found = self.built
        if isinstance(found, dict):
            found = None if self.kinds is None else found.get(self.kinds[layer])
        whole = isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1] == 1
        own = whole and (mask.dtype == torch.bool) == (self.attention == "sdpa")
        return found if own and isinstance(found, MaskFunction) else mask


def _function(
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None,
    config: Any,
    local_size: int | None = None,
    allow_is_causal_skip: bool = False,
    allow_is_bidirectional_skip: bool = False,
    batch_size: int = 0,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: int = 0,
    kv_offset: int = 0,
    device: Any = None,
    dtype: torch.dtype = torch.float32,
    **rest: Any,
) -> MaskFunction:
    """Stands where transformers writes a mask."""
    original, length = config.tokenprune_original
    eager = original._attn_implementation == "eager"

    def form(mask: Tensor) -> Tensor:
        return to_additive(mask, dtype) if eager else mask

    def write(plain: bool, **places: Any) -> Tensor | None:
        skips = dict(
            allow_is_causal_skip=plain and allow_is_causal_skip and not eager,
            allow_is_bidirectional_skip=plain and allow_is_bidirectional_skip,
        )
        # transformers makes eager attention's of this one too, but waits for the device to copy a zero.
        mask = compat.write_mask(config=original, dtype=dtype, **skips, **rest | places)
        return mask if mask is None else form(mask)

    real = None if attention_mask is None else attention_mask.to(torch.bool)
    by_tensors = not rest.get("use_vmap", True)
    return MaskFunction(mask_function, local_size, real, length, write, form if by_tensors else None)
