# SPDX-License-Identifier: Apache-2.0
"""Weigh the language model's attention by how many visual tokens each stands for, and by distance (RESTORE).

The logits of each layer get log s + log(2 - D): s is the size of the key's group, D the mean over the rotary
frequencies of cos(distance * frequency). The observers of the layers return a mask that has it; no forward is replaced.
What a cache holds has log s alone, which stays on the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.attention_observer import Observer
from tokenprune.integrations.hf.compat import reruns_layers
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.call import Call
from tokenprune.integrations.hf.forward.layer_inputs import DecoderInputs
from tokenprune.integrations.hf.forward.part import Part, PerCall
from tokenprune.integrations.hf.forward.plan import Step
from tokenprune.integrations.hf.sequence.masks import find_sliding_layers
from tokenprune.kernels.observation import Observation
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.method import SIZES

_ON_CACHE = "_tokenprune_weights"  # the logarithm of sizes, `[B, W]`, of the first W tokens that it holds
_MOST = 2.0


@dataclass
class Terms:
    """Terms that are added to the attention logits of a call.

    first, later: float32 `[B, W]`, logarithms of sizes, in the first layer and in the others. rows: bool
    `[B, 1, 1, 1]`, which lost tokens. distance: float32 `[B or 1, 1, W, W]`, log(2 - D), once it is known.
    """

    first: Tensor
    later: Tensor
    rows: Tensor
    distance: Tensor | None = None


class Weighing(Part):
    """Stands at the attention of the decoder's layers, for a step that merges at the decoder's entry.

    Raises UnsupportedSetupError for attention that takes no bias, and for layers with a sliding window.
    """

    def __init__(self, adapter: Adapter, step: Step) -> None:
        super().__init__()
        self.adapter, self.step, self.name = adapter, step, step.method.name
        self._calls: PerCall[Terms] = PerCall()
        # By what a mask was made of, which is kept beside it: an id is only unique while its object lives.
        self._masks: PerCall[dict[Any, tuple[Any, Tensor | None]]] = PerCall()
        if (attention := adapter.attention) not in ("sdpa", "eager"):
            self._refuse(f'attention {attention!r}: load the model with attn_implementation="sdpa"')
        if find_sliding_layers(adapter.text_config):
            self._refuse("a sliding window in some layers")
        layers = (layer for layer in range(len(adapter.decoder.layers)) if layer not in adapter.stateful)
        self.observers = [Observer(adapter.get_attention(layer), partial(self._mask, layer == 0)) for layer in layers]

    def _refuse(self, what: str) -> None:
        raise UnsupportedSetupError(f"{self.name} cannot weigh attention with {what}; or pass calibrate=False")

    def _attach(self) -> None:
        for observer in self.observers:
            self.attach_part(observer)

    # -- once a forward

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> None:
        if call.has_images and call.cached.capacity is not None:
            self._refuse("a static cache: use a dynamic one")
        if call.has_images and reruns_layers(self.adapter.decoder):
            self._refuse("gradient checkpointing, which runs layers again")

    def after_cut(self, call: Call, layer: int, hidden: Any) -> None:
        """Note the weights of the tokens that are left at the decoder's entry, for this call and on its cache."""
        state = call.state
        if layer or state.kept is None:
            return
        device, layout, segments = hidden.device, state.layout, state.segments
        sizes = state.memories[self.step.owner][SIZES].to(device)
        shares = [
            before / left for before, left in zip(state.before_cut.counts, state.kept.counts, strict=True) if left
        ]
        even = to_device(shares, device, torch.float32)[:, None].expand_as(sizes)
        batch, width = layout.index.shape
        places = state.flat_indices().to(device).masked_fill(~segments.mask.to(device), batch * width).flatten()
        first, later = (
            values.new_zeros(batch * width + 1).scatter(0, places, values.log().flatten())[:-1].view(batch, width)
            for values in (even.contiguous(), sizes.clamp(min=1))
        )
        dropped = zip(state.before_cut.row, state.before_cut.counts, state.kept.counts, strict=True)
        lost = {row for row, before_cut, kept in dropped if before_cut > kept}
        rows = to_device([row in lost for row in range(batch)], device).view(batch, 1, 1, 1)
        self._calls[call] = Terms(first, later, rows)
        if call.cached.cache is not None:
            before = _on_cache(call, call.groups[0].columns.shape[1] - width, batch)
            setattr(call.cached.cache, _ON_CACHE, later if before is None else torch.cat([before, later], 1))

    def on_layer(self, call: Call, layer: int, args: tuple, kwargs: dict[str, Any]) -> None:
        """Take distances from the rotary tables of the first layer."""
        weights = self._calls.get(call)
        if layer or weights is None or call.past:
            return
        tables: Any = kwargs.get("position_embeddings")
        if not isinstance(tables, tuple):
            self._refuse(f"the positions of {self.adapter.config.model_type!r}, whose layers get no rotary tables")
        cos, sin = (table.float() for table in tables)
        near = compute_decay(cos, sin, _sections(self.adapter.text_config))
        weights.distance = (_MOST - near).clamp(min=1e-6).log().unsqueeze(1)

    # -- in each layer

    def _mask(self, first: bool, seen: Observation) -> Tensor | None:
        call = self.current()
        if call is None:
            return None
        made, of = self._masks.setdefault(call, {}), (id(seen.mask), first, seen.query.device)
        if (known := made.get(of)) is None:  # layers of a device share a mask
            known = made[of] = seen.mask, self._made(call, first, seen)
        return known[1]

    def _made(self, call: Call, first: bool, seen: Observation) -> Tensor | None:
        """Return the mask of an attention call with all that is added to its logits; None where nothing is."""
        weights, (batch, _, queries, _), keys = self._calls.get(call), seen.query.shape, seen.key.shape[2]
        own = None if weights is None else weights.first if first else weights.later
        width = 0 if own is None else own.shape[1]
        before = _on_cache(call, keys - width, batch)
        parts = [one for one in (before, own) if one is not None]
        if not parts:
            return None
        bias = torch.cat([one.to(seen.query.device) for one in parts], 1)
        bias = torch.nn.functional.pad(bias, (keys - bias.shape[1], 0))[:, None, None]
        if weights is not None and weights.distance is not None:
            bias = bias + weights.distance.to(bias.device)
            bias = bias * weights.rows.to(bias.device)
        return _with(seen, bias.expand(-1, -1, queries, -1), self.adapter.attention)


def _on_cache(call: Call, held: int, batch: int) -> Tensor | None:
    """Return the weights of the `held` tokens that a call found in its cache, float32 `[B, held]`; None without any."""
    weights: Tensor | None = getattr(call.cached.cache, _ON_CACHE, None) if call.past else None
    if weights is None or not held:
        return None
    if len(weights) != batch:  # answers that share a prompt
        weights = weights.repeat_interleave(batch // len(weights), 0)
    return torch.nn.functional.pad(weights, (0, held - weights.shape[1]))


def _with(seen: Observation, bias: Tensor, attention: str) -> Tensor:
    """Return the mask of an attention call with `bias`, float32 `[B, 1, Q, K]`, in the type of its queries."""
    mask, dtype = seen.mask, seen.query.dtype
    if mask is None and attention == "sdpa" and seen.causal and bias.shape[2] > 1:
        mask = torch.ones(bias.shape[2:], dtype=torch.bool, device=bias.device).tril(bias.shape[3] - bias.shape[2])
    if mask is None:
        return bias.to(dtype)
    if mask.dtype == torch.bool:
        return bias.to(dtype).masked_fill(~mask, torch.finfo(dtype).min)
    return (bias + mask).clamp(min=torch.finfo(dtype).min).to(dtype)


def compute_decay(cos: Tensor, sin: Tensor, sections: list[int] | None) -> Tensor:
    """Return float32 `[B or 1, W, W]`, the mean over the rotary frequencies of the cosine of distance times frequency.

    cos, sin: float32 `[B or 1, W, D]`, or `[3, B or 1, W, D]` of three axes, of which each takes the channels of its
    `sections`, twice over.
    """
    if cos.ndim == 4 and sections is not None:
        parts = [*sections, *sections]
        cos, sin = (
            torch.cat([part[number % 3] for number, part in enumerate(x.split(parts, dim=-1))], -1) for x in (cos, sin)
        )
    scale = (cos.square() + sin.square()).sum(-1).mean()  # 1 for each channel, but where tables are scaled
    return (cos @ cos.transpose(1, 2) + sin @ sin.transpose(1, 2)) / scale


def _sections(config: Any) -> list[int] | None:
    for name in ("rope_parameters", "rope_scaling"):
        if (found := (getattr(config, name, None) or {}).get("mrope_section")) is not None:
            return list(found)
    return None
