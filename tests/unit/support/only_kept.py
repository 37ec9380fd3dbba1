# SPDX-License-Identifier: Apache-2.0
"""The oracle for decoders with layers that carry a state: no mask can take a token out of one.

Each row runs through the unpatched decoder alone, without padding, in a cache of its own, and at each cut its tokens
really leave. It takes drops and merges at any layer, of models that need no mask for one row (sdpa, no window).
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

from oracle import merged
from tokenprune.integrations.hf import compat
from zoo import Family


@contextmanager
def only_kept(family: Family, model: PreTrainedModel, cuts: Sequence[Any], length: int) -> Iterator[PreTrainedModel]:
    """Within, the unpatched `model` computes what it would after `cuts` of a prompt of `length` tokens."""
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
    row: int | None = None  # the row that runs through the layers, in its prompt
    held: DynamicCache | None = None  # its cache, in a later turn of several tokens
    entered: list[int] = field(default_factory=list)  # positions of its tokens at the decoder's entry
    stays: list[int] = field(default_factory=list)  # and at the current layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cache = compat.get_cache(kwargs)
        prompt = cache is None or not cache.get_seq_length()
        whole = self.original(*args, **kwargs)  # for the caller's cache
        embeds, positions = kwargs["inputs_embeds"], kwargs.get("position_ids")
        batch, length = embeds.shape[:2]
        if positions is None:
            positions = torch.arange(length)[None]
        positions = positions.expand(*positions.shape[:-2], batch, length)
        if prompt:
            self.caches = [DynamicCache(config=self.decoder.config) for _ in range(batch)]
        out = torch.zeros_like(whole.last_hidden_state)
        for row, held in enumerate(self.caches):
            self.row, self.held = (row, None) if prompt else (None, held)
            self.stays = list(range(length))
            tokens = embeds[row : row + 1]
            if prompt:
                tokens = self._enter(tokens, kwargs.get("attention_mask"))
            changed = dict(
                inputs_embeds=tokens, position_ids=positions[..., row : row + 1, self.stays], attention_mask=None,
                use_cache=True,
            ) | {compat.CACHE: held}  # fmt: skip
            result = self.original(*args, **kwargs | changed).last_hidden_state
            out[row, self.stays] = result[0]
        self.row = self.held = None
        whole.last_hidden_state = out
        return whole

    def _enter(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Take padding and what is cut at the entry out of `tokens`, `[1, L, D]`."""
        if mask is not None:
            self._leave(tokens, mask[self.row].nonzero().flatten().tolist())
        real, self.stays = self.stays, list(range(tokens.shape[1]))
        for cut in self.cuts:
            if cut.layer == 0:
                tokens = self._merge(tokens, cut)
                real = cut.kept[self.row]
        tokens = self._leave(tokens, real)
        self.entered = self.stays
        return tokens

    def _leave(self, hidden: Tensor, kept: list[int]) -> Tensor:
        left = [number for number, place in enumerate(self.stays) if place in set(kept)]
        self.stays = [self.stays[number] for number in left]
        return hidden[:, left]

    def _merge(self, hidden: Tensor, cut: Any) -> Tensor:
        if cut.sources is None:
            return hidden
        number = {place: index for index, place in enumerate(self.stays)}
        groups = {number[to]: [number[one] for one in many] for to, many in cut.sources[self.row].items()}
        weights = None if cut.weights is None else [{number[to]: of for to, of in cut.weights[self.row].items()}]
        return merged(hidden, [groups], weights)

    def enter_layer(self, index: int, module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        if self.row is None:
            keys = getattr(self.held and self.held.layers[index], "keys", None)
            if keys is None or args[0].shape[1] == 1:
                return None
            # Layers hold different numbers of tokens; the decoder made one mask for all of them.
            queries, past = args[0].shape[1], keys.shape[-2]
            causal = torch.ones(1, 1, queries, past + queries, dtype=torch.bool).tril(past)
            return args, kwargs | {"attention_mask": causal}
        assert kwargs.get("attention_mask") is None, "one row without padding needs no mask here"
        hidden = args[0]
        for cut in self.cuts:
            if cut.layer == index and index:
                hidden = self._leave(self._merge(hidden, cut), cut.kept[self.row])
        places = [number for number, place in enumerate(self.entered) if place in set(self.stays)]
        changed = dict(kwargs)
        if kwargs.get("position_embeddings") is not None:
            changed["position_embeddings"] = tuple(part[:, places] for part in kwargs["position_embeddings"])
        if kwargs.get("position_ids") is not None:
            changed["position_ids"] = kwargs["position_ids"][..., places]
        return (hidden, *args[1:]), changed
