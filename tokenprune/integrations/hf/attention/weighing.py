# SPDX-License-Identifier: Apache-2.0
"""Add the sizes of merged groups, and distances, to the decoder's attention logits (RESTORE).

The logits of each layer get log s + log(2 - D). s is the size of the key's group, and D is the mean of
cos(distance * frequency) over the rotary frequencies. Observers of the layers return a mask that includes these terms.
Keys in the cache get only log s, which is stored on the cache object.
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

_CACHE_ATTRIBUTE = "_tokenprune_weights"  # log sizes of the first W cached tokens, `[B, W]`
_MAX_DECAY = 2.0


@dataclass
class Terms:
    """Terms that are added to the attention logits of a call.

    Attributes:
        first: Log sizes in the first layer, where all groups of an image have their mean size, float32 `[B, W]`.
        later: Log sizes in the other layers, float32 `[B, W]`.
        rows: Rows with dropped tokens, bool `[B, 1, 1, 1]`.
        distance: log(2 - D), float32 `[B or 1, 1, W, W]`. Set in the first layer.
    """

    first: Tensor
    later: Tensor
    rows: Tensor
    distance: Tensor | None = None


class Weighing(Part):
    """Adds `Terms` to the attention of all decoder layers, for a step that merges at the decoder's entry.

    Raises:
        UnsupportedSetupError: If the attention implementation does not accept a bias, or layers have a sliding window.
    """

    def __init__(self, adapter: Adapter, step: Step) -> None:
        super().__init__()
        self.adapter, self.step, self.name = adapter, step, step.method.name
        self._calls: PerCall[Terms] = PerCall()
        # Keyed by the id of the original mask. The mask is stored too, because ids are unique only among live objects.
        self._masks: PerCall[dict[Any, tuple[Any, Tensor | None]]] = PerCall()
        if (attention := adapter.attention) not in ("sdpa", "eager"):
            self._refuse(f"attention {attention!r}", 'Load the model with attn_implementation="sdpa"')
        if find_sliding_layers(adapter.text_config):
            self._refuse("layers with a sliding window")
        layers = (layer for layer in range(len(adapter.decoder.layers)) if layer not in adapter.stateful)
        self.observers = [
            Observer(adapter.get_attention(layer), partial(self._get_mask, layer == 0)) for layer in layers
        ]

    def _refuse(self, setup: str, alternative: str = "") -> None:
        options = f"{alternative}, or pass" if alternative else "Pass"
        raise UnsupportedSetupError(f"{self.name}: calibrate=True does not support {setup}. {options} calibrate=False.")

    def _attach(self) -> None:
        for observer in self.observers:
            self.attach_part(observer)

    # -- once per forward

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> None:
        if call.has_images and call.cached.capacity is not None:
            self._refuse("a static cache", "Use a dynamic cache")
        if call.has_images and reruns_layers(self.adapter.decoder):
            self._refuse("gradient checkpointing", "Call model.gradient_checkpointing_disable()")

    def after_cut(self, call: Call, layer: int, hidden: Any) -> None:
        """Store the log sizes of the kept tokens after the cut at the decoder's entry, for the call and its cache."""
        state = call.state
        if layer or state.kept is None:
            return
        device, layout, segments = hidden.device, state.layout, state.segments
        sizes = state.memories[self.step.owner][SIZES].to(device)
        mean_sizes = [
            num_before / num_kept
            for num_before, num_kept in zip(state.before_cut.counts, state.kept.counts, strict=True)
            if num_kept
        ]
        uniform = to_device(mean_sizes, device, torch.float32)[:, None].expand_as(sizes)
        batch, width = layout.index.shape
        slots = state.flat_indices().to(device).masked_fill(~segments.mask.to(device), batch * width).flatten()
        first, later = (
            values.new_zeros(batch * width + 1).scatter(0, slots, values.log().flatten())[:-1].view(batch, width)
            for values in (uniform.contiguous(), sizes.clamp(min=1))
        )
        counts = zip(state.before_cut.row, state.before_cut.counts, state.kept.counts, strict=True)
        cut_rows = {row for row, num_before, num_kept in counts if num_before > num_kept}
        rows = to_device([row in cut_rows for row in range(batch)], device).view(batch, 1, 1, 1)
        self._calls[call] = Terms(first, later, rows)
        if call.cached.cache is not None:
            cached = _get_cached_sizes(call, call.groups[0].columns.shape[1] - width, batch)
            log_sizes = later if cached is None else torch.cat([cached, later], 1)
            setattr(call.cached.cache, _CACHE_ATTRIBUTE, log_sizes)

    def on_layer(self, call: Call, layer: int, args: tuple, kwargs: dict[str, Any]) -> None:
        """Compute the distance term from the rotary tables of the first layer."""
        weights = self._calls.get(call)
        if layer or weights is None or call.past:
            return
        tables: Any = kwargs.get("position_embeddings")
        if not isinstance(tables, tuple):
            self._refuse(f"the position embeddings of {self.adapter.config.model_type!r}")
        cos, sin = (table.float() for table in tables)
        decay = compute_decay(cos, sin, _get_sections(self.adapter.text_config))
        weights.distance = (_MAX_DECAY - decay).clamp(min=1e-6).log().unsqueeze(1)

    # -- in each layer

    def _get_mask(self, is_first: bool, observation: Observation) -> Tensor | None:
        """Return the mask of an attention call. Layers on the same device share a mask."""
        call = self.current()
        if call is None:
            return None
        masks, key = self._masks.setdefault(call, {}), (id(observation.mask), is_first, observation.query.device)
        if (cached := masks.get(key)) is None:
            cached = masks[key] = observation.mask, self._build_mask(call, is_first, observation)
        return cached[1]

    def _build_mask(self, call: Call, is_first: bool, observation: Observation) -> Tensor | None:
        """Add the terms of the call and of the cache to an attention mask. Return None without terms."""
        weights, (batch, _, queries, _) = self._calls.get(call), observation.query.shape
        keys = observation.key.shape[2]
        new = None if weights is None else weights.first if is_first else weights.later
        width = 0 if new is None else new.shape[1]
        parts = [part for part in (_get_cached_sizes(call, keys - width, batch), new) if part is not None]
        if not parts:
            return None
        bias = torch.cat([part.to(observation.query.device) for part in parts], 1)
        bias = torch.nn.functional.pad(bias, (keys - bias.shape[1], 0))[:, None, None]
        if weights is not None and weights.distance is not None:
            bias = bias + weights.distance.to(bias.device)
            bias = bias * weights.rows.to(bias.device)
        return _add_bias(observation, bias.expand(-1, -1, queries, -1), self.adapter.attention)


def _get_cached_sizes(call: Call, num_cached: int, batch: int) -> Tensor | None:
    """Return the log sizes of the `num_cached` tokens in the call's cache, float32 `[B, num_cached]`, or None."""
    log_sizes: Tensor | None = getattr(call.cached.cache, _CACHE_ATTRIBUTE, None) if call.past else None
    if log_sizes is None or not num_cached:
        return None
    if len(log_sizes) != batch:  # several answers share a prompt
        log_sizes = log_sizes.repeat_interleave(batch // len(log_sizes), 0)
    return torch.nn.functional.pad(log_sizes, (0, num_cached - log_sizes.shape[1]))


def _add_bias(observation: Observation, bias: Tensor, attention: str) -> Tensor:
    """Return the mask of an attention call plus `bias` (float32 `[B, 1, Q, K]`), in the dtype of the queries."""
    mask, dtype = observation.mask, observation.query.dtype
    if mask is None and attention == "sdpa" and observation.causal and bias.shape[2] > 1:
        mask = torch.ones(bias.shape[2:], dtype=torch.bool, device=bias.device).tril(bias.shape[3] - bias.shape[2])
    if mask is None:
        return bias.to(dtype)
    if mask.dtype == torch.bool:
        return bias.to(dtype).masked_fill(~mask, torch.finfo(dtype).min)
    return (bias + mask).clamp(min=torch.finfo(dtype).min).to(dtype)


def compute_decay(cos: Tensor, sin: Tensor, sections: list[int] | None) -> Tensor:
    """Compute the mean of cos(distance * frequency) over the rotary frequencies, for all pairs of tokens.

    Args:
        cos: Rotary table, float32 `[B or 1, W, D]`, or `[3, B or 1, W, D]` for three axes.
        sin: Rotary table with the same shape.
        sections: Number of channels of each axis in one half of the table, or None for one axis.

    Returns:
        The decay D, float32 `[B or 1, W, W]`.
    """
    if cos.ndim == 4 and sections is not None:
        parts = [*sections, *sections]
        cos, sin = (
            torch.cat([part[index % 3] for index, part in enumerate(x.split(parts, dim=-1))], -1) for x in (cos, sin)
        )
    scale = (cos.square() + sin.square()).sum(-1).mean()  # the number of channels, unless the tables are scaled
    return (cos @ cos.transpose(1, 2) + sin @ sin.transpose(1, 2)) / scale


def _get_sections(config: Any) -> list[int] | None:
    for name in ("rope_parameters", "rope_scaling"):
        if (sections := (getattr(config, name, None) or {}).get("mrope_section")) is not None:
            return list(sections)
    return None
