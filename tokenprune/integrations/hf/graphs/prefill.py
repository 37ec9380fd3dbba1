# SPDX-License-Identifier: Apache-2.0
"""Prefill a decoder by replaying CUDA graphs of groups of its layers.

Attention is causal, so padding on the right does not change the tokens before it. The input of a group is padded to a
bucket of lengths, the graph is replayed, and the output is sliced back. If the layers get a mask, it is padded too.
Everything outside of the layers, including cuts, runs as without graphs. The first layer of a group runs the graph of
the group, and the other layers return their input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.part import Part
from tokenprune.integrations.hf.graphs.modules import KnownModules
from tokenprune.integrations.hf.graphs.replay import Buckets, NotGraphedError
from tokenprune.integrations.hf.graphs.settings import Graphs
from tokenprune.integrations.hf.graphs.walk import Groups, Walk
from tokenprune.integrations.shared.attachable import get_thread_states
from tokenprune.statistics import GraphCounts, Stats

# Decoder arguments without an effect between the layers.
_COMMON = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "use_cache", "cache_position", "return_dict",
           "mm_encoder_outputs", "logits_to_keep", *compat.CACHE_NAMES}  # fmt: skip


class GraphedPrefill(Part):
    """Replays graphs of decoder layers for the first tokens of a prompt.

    Args:
        adapter: Adapter of the model.
        graphs: Limits of the graphs.
        eager_layers: Indices of layers that run without graphs, because a method observes or cuts tokens there.
        why_not: Reason why no layer can use graphs. Empty if graphs are possible.
    """

    def __init__(self, adapter: Adapter, graphs: Graphs, eager_layers: Collection[int] = (), why_not: str = "") -> None:
        super().__init__()
        self.adapter, self.decoder, self.eager_layers = adapter, adapter.decoder, frozenset(eager_layers)
        self.why_not = why_not or _check_family(adapter)
        self.buckets = Buckets(graphs)
        self.counts: Counter[str] = Counter()  # prefills by the reason for not using graphs; "" if graphs were used
        self.known: KnownModules | None = None
        self.groups: dict[Hashable, Groups] = {}
        self.line = f"graphs={graphs!r}"

    @staticmethod
    def current() -> None:
        """Return None, because a model without an engine never has an active call."""

    def _attach(self) -> None:
        self.wrap(self.decoder, "forward", partial(_wrap, self._prefill))
        for index, layer in enumerate(self.decoder.layers):
            self.wrap(layer, "forward", partial(_wrap, partial(self._layer, index)))
        self.on_detach(self.buckets.clear)

    def add_stats(self, stats: Stats) -> None:
        misses = {reason: count for reason, count in self.counts.items() if reason}
        stats.graphs = GraphCounts(self.counts[""], misses, self.buckets.captured, self.buckets.bytes)

    def warm_up(self, lengths: Sequence[int], batch: int) -> None:
        """Capture the graphs of text prompts with `lengths` tokens and `batch` rows."""
        model, token_id = self.adapter.model, min(set(range(3, 99)) - set(self.adapter.placeholders.values()))
        for length in (lengths[0], *lengths):  # the first prompt only records the groups of layers
            ids = torch.full((batch, length), token_id, device=model.device)
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)

    def _prefill(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _is_decoding_step(kwargs):
            return forward(*args, **kwargs)
        try:
            walk = self._start_walk(args, kwargs)
        except NotGraphedError as error:
            self._count(str(error))
            return forward(*args, **kwargs)
        states = get_thread_states()
        states[self] = walk
        try:
            output = forward(*args, **self._without_mask(kwargs))
        finally:
            del states[self]
        walk.end()
        self._count(walk.why_not)
        return output

    def _layer(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        walk: Walk | None = None if torch.compiler.is_compiling() else get_thread_states().get(self)
        return forward(*args, **kwargs) if walk is None else walk.layer(index, forward, args, kwargs)

    def _start_walk(self, args: tuple, kwargs: dict[str, Any]) -> Walk:
        """Return the walk of a call through the layers, or raise NotGraphedError."""
        if self.why_not or args:
            raise NotGraphedError(self.why_not or "the decoder was called with positional arguments")
        if torch.is_grad_enabled() or self.decoder.training:
            raise NotGraphedError("gradients are on or the model trains: call model.eval() and use torch.no_grad()")
        outputs = ("output_hidden_states", "output_attentions")
        if any(kwargs.get(name, getattr(self.decoder.config, name, False)) for name in outputs):
            raise NotGraphedError("hidden states or attention weights of layers are requested")
        with self.buckets.lock:
            if self.known is None or not self.known.unchanged():
                self.buckets.clear()
                self.groups.clear()
                self.known = KnownModules(self.decoder)
        call, eager_layers = self.current(), self.eager_layers | self.known.eager_layers
        if call is not None:
            eager_layers |= call.maskless | call.starts
        other_arguments = frozenset(
            name for name in kwargs.keys() - _COMMON if not (kwargs[name] is None or kwargs[name] is False)
        )
        has_extras = call is not None and call.state.extras is not None
        key = (eager_layers, other_arguments, has_extras)
        groups = self.groups.setdefault(key, Groups(self.adapter, eager_layers))
        return Walk(groups, self.buckets)

    def _without_mask(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Remove a mask that hides no token: the decoder would synchronise with the device to find out."""
        call, mask = self.current(), kwargs.get("attention_mask")
        if call is None or not isinstance(mask, Tensor) or mask.ndim != 2 or compat.get_cache(kwargs) is None:
            return kwargs
        if not call.active or not call.has_images or call.past:  # the cache of an earlier call may contain padding
            return kwargs
        has_padding = call.state.layout.valid is not None or not bool(call.prompt.is_real.all())
        return kwargs if has_padding else kwargs | {"attention_mask": None}

    def _count(self, why_not: str) -> None:
        with self.buckets.lock:
            self.counts[why_not] += 1
        call = self.current()
        if why_not and call is not None and call.has_images:
            call.notes.append(f"prefill without graphs: {why_not}")


def graphed_prefill(
    adapter: Adapter, graphs: Any, eager_layers: Collection[int] = (), why_not: str = ""
) -> list[GraphedPrefill]:
    """Return the part for a `graphs=` argument, or an empty list for False. Raises OptionError."""
    settings = Graphs.from_argument(graphs)
    return [] if settings is None else [GraphedPrefill(adapter, settings, eager_layers, why_not)]


def _wrap(function: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    wrapped = partial(function, forward)
    wrapped.__wrapped__ = forward  # type: ignore[attr-defined]  # transformers inspects the signature
    return wrapped


def _is_decoding_step(kwargs: dict[str, Any]) -> bool:
    tokens = next((kwargs[name] for name in ("inputs_embeds", "input_ids") if kwargs.get(name) is not None), None)
    return tokens is not None and tokens.shape[1] == 1 and compat.get_cache(kwargs) is not None


def _check_family(adapter: Adapter) -> str:
    """Return the reason why the decoder of a family cannot use graphs, or an empty string."""
    if adapter.stateful:
        return "layers carry a state from token to token"
    if adapter.shares_keys:
        return "layers attend to the keys of other layers"
    return ""
