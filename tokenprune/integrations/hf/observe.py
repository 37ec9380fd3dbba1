# SPDX-License-Identifier: Apache-2.0
"""Read queries and keys inside one attention module, on any attention back end, without eager attention.

transformers looks its attention function up by name in `module.config` on every call. The observed module alone gets a
copy of its config that names our function; that calls the original with a view of the module whose config is the
original one, so outputs are bit-equal and back ends that ask for their own name (flash attention) still find it. No
other module, and no config of the model, changes.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tokenprune.errors import UnsupportedModelError

# transformers recognises flash back ends by "flash" in the name.
_NAMES = ("tokenprune_observed", "tokenprune_observed_flash")


@dataclass
class Observation:
    """What one attention call saw, after rotary embedding and cache update.

    query: `[B, H, Q, Dh]`; key: `[B, Hkv, K, Dh]`; mask: as handed to the attention function; scaling: factor before
    softmax.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None
    scaling: float
    softcap: float | None = None

    def keys(self, queries: int) -> Tensor:
        """`[B, Q, Hkv * Dh]`: keys of the last `queries` tokens, heads flattened."""
        return self.key[:, :, -queries:].transpose(1, 2).flatten(2)

    def rows(self, index: Tensor) -> Tensor:
        """float32 `[B, H, R, K]`: softmax attention of the queries at `index` (long `[B, R]`, in this call's slots)."""
        batch, heads, _, width = self.query.shape
        kv_heads, keys = self.key.shape[1:3]
        count = index.shape[1]
        query = self.query.gather(2, index[:, None, :, None].expand(batch, heads, count, width)).float()
        # Grouped heads share a key head: fold the group into the rows instead of repeating the keys.
        query = query.reshape(batch, kv_heads, heads // kv_heads * count, width)
        scores = (query @ self.key.float().transpose(2, 3)) * self.scaling
        scores = scores.view(batch, heads, count, keys)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.mask is not None and self.mask.is_floating_point():
            return (scores + self._mask_rows(index).float()).softmax(dim=-1)
        return scores.masked_fill(~self.visible(index), torch.finfo(scores.dtype).min).softmax(dim=-1)

    def visible(self, index: Tensor) -> Tensor:
        """bool `[B, 1 or H, R, K]`: which keys the queries at `index` (long `[B, R]`) may attend to."""
        if self.mask is not None and self.mask.ndim == 4:
            rows = self._mask_rows(index)
            return rows if rows.dtype == torch.bool else rows > torch.finfo(rows.dtype).min / 2
        # No mask: causal; a 2-D mask (flash): causal and padding.
        keys, queries = self.key.shape[2], self.query.shape[2]
        slots = torch.arange(keys, device=index.device)
        seen = slots <= (index + (keys - queries))[:, None, :, None]
        return seen if self.mask is None else seen & self.mask[:, None, None, -keys:].bool()

    def _mask_rows(self, index: Tensor) -> Tensor:
        """`[B, 1 or H, R, K]`: rows of a 4-D mask."""
        batch, keys = self.key.shape[0], self.key.shape[2]
        mask = self.mask[..., :keys].expand(batch, *self.mask.shape[1:3], keys)
        return mask.gather(2, index[:, None, :, None].expand(-1, mask.shape[1], -1, keys))

    def received(self, valid: Tensor, chunk: int = 128) -> Tensor:
        """float32 `[B, H, Q]`: mean attention that each of this call's tokens receives from the tokens that see it.

        valid: bool `[B, Q]`, False for padding queries. Rows are made in chunks, so that memory stays O(Q).
        """
        batch, heads, queries = self.query.shape[:3]
        total = self.query.new_zeros(batch, heads, queries, dtype=torch.float32)
        seen = torch.zeros_like(total)
        slots = torch.arange(queries, device=valid.device)
        for start in range(0, queries, chunk):
            index = slots[start : start + chunk].expand(batch, -1)
            real = valid.gather(1, index)[:, None, :, None]
            total += self.rows(index)[..., -queries:].masked_fill(~real, 0).sum(2)
            seen += (self.visible(index)[..., -queries:] & real).sum(2)
        return total / seen.clamp(min=1)


class _ModuleView:
    """The module as the original attention function must see it: everything its own, with the original config."""

    def __init__(self, module: nn.Module, config: Any) -> None:
        self.__dict__.update(_module=module, config=config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


class Observer:
    """Attached to one attention module; `record` gets every `Observation` until `detach`, and may return a mask to be
    used instead of the observed one."""

    def __init__(self, module: nn.Module, record: Callable[[Observation], Tensor | None]) -> None:
        self.module, self.record, self.config = module, record, getattr(module, "config", None)
        if not hasattr(self.config, "_attn_implementation"):
            raise UnsupportedModelError(
                f"{type(module).__name__} does not look its attention function up in a config, so attention scores "
                "cannot be read; use a method that needs none (`tokenprune methods` lists what each needs)"
            )

    def attach(self) -> None:
        for name in _NAMES:
            ALL_ATTENTION_FUNCTIONS.register(name, observed_attention)
        observed = copy.copy(self.config)
        observed._attn_implementation_internal = _NAMES["flash" in (self.config._attn_implementation or "")]
        self.module.config = observed
        self.module._tokenprune_observer = self

    def detach(self) -> None:
        self.module.config = self.config
        del self.module._tokenprune_observer

    def original(self) -> Callable:
        """The attention function that the module would use, looked up anew: it may have been changed after the
        patch."""
        for cls in type(self.module).__mro__:
            eager = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
            if eager is not None:
                break
        return ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)


def observed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The attention function of an observed module: hand queries and keys on, then do what the original does."""
    observer: Observer = module._tokenprune_observer
    scaling = kwargs.get("scaling")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    mask = observer.record(Observation(query, key, attention_mask, scaling, kwargs.get("softcap")))
    attention_mask = attention_mask if mask is None else mask
    return observer.original()(_ModuleView(module, observer.config), query, key, value, attention_mask, **kwargs)
