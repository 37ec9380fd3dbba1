# SPDX-License-Identifier: Apache-2.0
"""Attention masks of the kept tokens, built by the decoder's own mask functions.

transformers defines each kind of mask by a function of query and key positions in the full sequence, and evaluates it
for all pairs. Here the functions are evaluated only for the positions of kept tokens.
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
_ATTENTION = ("sdpa", "eager")  # flash attention takes 2-D masks, and flex attention builds block masks


@dataclass(frozen=True)
class MaskFunction:
    """The mask function of one kind of layer.

    Attributes:
        sees: Function of (row, head, query, key) indices in the full sequence that returns whether the query sees the
            key.
        window: Length of the sliding window, or None.
        is_real: False at padding, shape (batch, length), bool, or None without padding.
        length: Length of the full sequence.
        write: Function of transformers that writes a mask in the form that layers take.
        form: Converts a boolean mask to that form, if `sees` accepts tensors of indices. None if it takes single
            indices.
    """

    sees: Callable[..., Tensor]
    window: int | None
    is_real: Tensor | None
    length: int
    write: Callable[..., Tensor | None]
    form: Callable[[Tensor], Tensor] | None

    def build_mask(self, queries: Tensor, keys: Tensor, is_uncut: bool, has_no_padding: bool = False) -> Tensor | None:
        """Build the mask of some queries and keys.

        Args:
            queries: Indices in the full sequence, shape (batch, queries), int64, -1 for empty slots.
            keys: Indices, shape (batch, keys), int64, -1 for empty slots, which no query sees.
            is_uncut: Whether the keys are the queries, and none is empty or padding.
            has_no_padding: Whether no key is padding.

        Returns:
            The mask, shape (batch, 1, queries, keys), bool (True: visible) or additive float. None if the attention
            function is causal without a mask.
        """
        queries, is_real, causal = queries.to(keys.device), None, self.sees is causal_mask_function
        padding = None if is_uncut or has_no_padding else self.is_real
        if not is_uncut:
            is_real = keys >= 0
            if padding is not None or not causal:  # a causal function accepts -1
                keys = keys.clamp(min=0)
            if padding is not None:
                is_real &= padding.to(keys.device).gather(1, keys)
        # `is_real` is not read in this case, because the host would wait for the device.
        plain = is_uncut and (self.window is None or self.length < self.window)
        if self.form is not None and not plain:
            row: Any = None if causal else torch.arange(len(keys), device=keys.device)[:, None, None, None]
            visible = self.sees(row, row if row is None else row[:1], queries[:, None, :, None], keys[:, None, None, :])
            visible = visible if is_real is None else visible & is_real[:, None, None, :]
            return self.form(visible.expand(len(keys), 1, queries.shape[1], keys.shape[1]))

        def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return self.sees(row, head, queries[row, query], keys[row, key])

        return self.write(
            batch_size=len(keys),
            q_length=queries.shape[1],
            kv_length=keys.shape[1],
            q_offset=0,
            kv_offset=0,
            mask_function=sees,
            attention_mask=is_real,
            plain=plain,
            device=keys.device,
        )


@dataclass(frozen=True)
class MaskFunctions:
    """The mask functions of a decoder.

    Attributes:
        make: Builds the decoder's masks for a config.
        config: Config of the decoder.
        length: Length of the full sequence, including the tokens in the cache.
        no_padding_after_cut: Whether no padding remains after a cut.
    """

    make: Callable[[Any], Any]
    config: Any
    length: int
    no_padding_after_cut: bool

    @cached_property
    def attention(self) -> str | None:
        """Name of the attention implementation, or None if it takes no masks of query-key pairs."""
        name = self.config._attn_implementation
        return name if name in _ATTENTION else None

    @cached_property
    def kinds(self) -> list[str] | None:
        """Kind of each layer, or None if there is a single kind."""
        return getattr(self.config, "layer_types", None)

    @cached_property
    def built(self) -> Any:
        """The result of `make`, with a `MaskFunction` instead of each mask."""
        AttentionMaskInterface.register(_NAME, _make_mask_function)
        noted = copy.copy(self.config)
        noted._attn_implementation_internal = _NAME
        noted.tokenprune_original = self.config, self.length
        return self.make(noted)

    def select_for_layer(self, layer: int, mask: Any) -> Any:
        """Return the `MaskFunction` of `layer`, or `mask`, its argument, if the decoder changed the default mask."""
        if self.attention is None:
            return mask
        function = self.built
        if isinstance(function, dict):
            function = None if self.kinds is None else function.get(self.kinds[layer])
        is_pair_mask = isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1] == 1
        is_default = is_pair_mask and (mask.dtype == torch.bool) == (self.attention == "sdpa")
        return function if is_default and isinstance(function, MaskFunction) else mask


def _make_mask_function(
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
    """Return a `MaskFunction` instead of a mask.

    `AttentionMaskInterface` of transformers calls this function, so its parameters are given by transformers.
    """
    original, length = config.tokenprune_original
    eager = original._attn_implementation == "eager"

    def form(mask: Tensor) -> Tensor:
        return to_additive(mask, dtype) if eager else mask

    def write(plain: bool, **places: Any) -> Tensor | None:
        skips = dict(
            allow_is_causal_skip=plain and allow_is_causal_skip and not eager,
            allow_is_bidirectional_skip=plain and allow_is_bidirectional_skip,
        )
        # transformers writes the mask of eager attention like this, but synchronizes to copy a zero.
        mask = compat.write_mask(config=original, dtype=dtype, **skips, **rest | places)
        return mask if mask is None else form(mask)

    is_real = None if attention_mask is None else attention_mask.to(torch.bool)
    by_tensors = not rest.get("use_vmap", True)
    return MaskFunction(mask_function, local_size, is_real, length, write, form if by_tensors else None)
