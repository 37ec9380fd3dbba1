# SPDX-License-Identifier: Apache-2.0
"""The oracle for decoders with recurrent layers, where masks cannot remove a token from the state.

Each row runs through the unpatched decoder separately, without padding and with its own cache, and each cut removes
tokens. The oracle covers drops and merges at any layer, for models that need no mask for one row (sdpa, no window).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from oracle import merge_sources
from tokenprune.integrations.hf import compat
from zoo import Family


@contextmanager
def only_kept(family: Family, model: PreTrainedModel, cuts: Sequence[Any], length: int) -> Iterator[PreTrainedModel]:
    """Within this context, the unpatched `model` computes its output after `cuts` of a prompt of `length` tokens."""
    decoder = model.get_submodule(family.decoder)
    rows = _Rows(decoder, decoder.forward, cuts)
    handles = [
        layer.register_forward_pre_hook(partial(rows.enter_layer, index), with_kwargs=True)
        for index, layer in enumerate(decoder.layers)
    ]
    decoder.forward = rows.forward
    try:
        yield model
    finally:
        del decoder.forward
        for handle in handles:
            handle.remove()


@dataclass
class _Rows:
    decoder: Any
    original: Any
    cuts: Sequence[Any]
    caches: list[DynamicCache] = field(default_factory=list)
    row: int | None = None  # index of the row that runs through the layers, while it prefills
    held: DynamicCache | None = None  # the cache of that row in a later turn of several tokens
    entered: list[int] = field(default_factory=list)  # positions of its tokens at the decoder's entry
    stays: list[int] = field(default_factory=list)  # positions of its tokens at the current layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cache = compat.get_cache(kwargs)
        is_prefill = cache is None or not cache.get_seq_length()
        output = self.original(*args, **kwargs)  # fills the caller's cache
        embeds, positions = kwargs["inputs_embeds"], kwargs.get("position_ids")
        batch, length = embeds.shape[:2]
        if positions is None:
            positions = torch.arange(length)[None]
        positions = positions.expand(*positions.shape[:-2], batch, length)
        if is_prefill:
            self.caches = [DynamicCache(config=self.decoder.config) for _ in range(batch)]
        out = torch.zeros_like(output.last_hidden_state)
        for row, row_cache in enumerate(self.caches):
            self.row, self.held = (row, None) if is_prefill else (None, row_cache)
            self.stays = list(range(length))
            tokens = embeds[row : row + 1]
            if is_prefill:
                tokens = self._enter(tokens, kwargs.get("attention_mask"))
            changed = dict(
                inputs_embeds=tokens, position_ids=positions[..., row : row + 1, self.stays], attention_mask=None,
                use_cache=True,
            ) | {compat.CACHE: row_cache}  # fmt: skip
            result = self.original(*args, **kwargs | changed).last_hidden_state
            out[row, self.stays] = result[0]
        self.row = self.held = None
        output.last_hidden_state = out
        return output

    def _enter(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Remove padding and the tokens cut at the entry from `tokens`, shape (1, length, channels)."""
        if mask is not None:
            self._leave(tokens, mask[self.row].nonzero().flatten().tolist())
        kept, self.stays = self.stays, list(range(tokens.shape[1]))
        for cut in self.cuts:
            if cut.layer == 0:
                tokens = self._merge(tokens, cut)
                kept = cut.kept[self.row]
        tokens = self._leave(tokens, kept)
        self.entered = self.stays
        return tokens

    def _leave(self, hidden: Tensor, kept: list[int]) -> Tensor:
        indices = [index for index, position in enumerate(self.stays) if position in set(kept)]
        self.stays = [self.stays[index] for index in indices]
        return hidden[:, indices]

    def _merge(self, hidden: Tensor, cut: Any) -> Tensor:
        if cut.sources is None:
            return hidden
        index_of = {position: index for index, position in enumerate(self.stays)}
        groups = {
            index_of[target]: [index_of[source] for source in sources]
            for target, sources in cut.sources[self.row].items()
        }
        weights = (
            None
            if cut.weights is None
            else [{index_of[target]: row_weights for target, row_weights in cut.weights[self.row].items()}]
        )
        return merge_sources(hidden, [groups], weights)

    def enter_layer(self, index: int, module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        if self.row is None:
            keys = getattr(self.held and self.held.layers[index], "keys", None)
            if keys is None or args[0].shape[1] == 1:
                return None
            # The decoder built one mask for all layers, but layers hold different numbers of tokens.
            queries, past = args[0].shape[1], keys.shape[-2]
            causal = torch.ones(1, 1, queries, past + queries, dtype=torch.bool).tril(past)
            return args, kwargs | {"attention_mask": causal}
        assert kwargs.get("attention_mask") is None, "a single row without padding must not have a mask"
        hidden = args[0]
        for cut in self.cuts:
            if cut.layer == index and index:
                hidden = self._leave(self._merge(hidden, cut), cut.kept[self.row])
        indices = [entry_index for entry_index, position in enumerate(self.entered) if position in set(self.stays)]
        changed = dict(kwargs)
        if kwargs.get("position_embeddings") is not None:
            changed["position_embeddings"] = tuple(part[:, indices] for part in kwargs["position_embeddings"])
        if kwargs.get("position_ids") is not None:
            changed["position_ids"] = kwargs["position_ids"][..., indices]
        return (hidden, *args[1:]), changed
