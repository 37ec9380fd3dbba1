# SPDX-License-Identifier: Apache-2.0
"""Run a decoder by replaying CUDA graphs of groups of its layers.

Prefill: attention is causal, so padding on the right does not change the tokens before it. The input of a group is
padded to a bucket of lengths, the graph is replayed, and the output is sliced back. If the layers get a mask, it is
padded too. Decoding steps: see `steps`. Everything outside of the layers, including cuts, runs as without graphs. The
first layer of a group runs the graph of the group, and the other layers return their input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.cache.static_cache import is_static
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.part import Part
from tokenprune.integrations.hf.graphs.buckets import Buckets
from tokenprune.integrations.hf.graphs.capture import NotGraphedError
from tokenprune.integrations.hf.graphs.modules import KnownModules
from tokenprune.integrations.hf.graphs.settings import Graphs
from tokenprune.integrations.hf.graphs.step_walk import StepWalk
from tokenprune.integrations.hf.graphs.walk import Groups, Walk
from tokenprune.integrations.shared.attachable import get_thread_states
from tokenprune.statistics import GraphCounts, Stats

# Decoder arguments without an effect between the layers.
_COMMON = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "use_cache", "cache_position", "return_dict",
           "mm_encoder_outputs", "logits_to_keep", *compat.CACHE_NAMES}  # fmt: skip


class GraphedDecoder(Part):
    """Replays graphs of decoder layers for the first tokens of a prompt, and for decoding steps.

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
        # Prefills and steps by the reason for not using graphs, which is "" if graphs were used.
        self.prefills: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.known: KnownModules | None = None
        self.groups: dict[Hashable, Groups] = {}
        self.line = f"graphs={graphs!r}"

    @staticmethod
    def current() -> None:
        """Return None, because a model without an engine never has an active call."""

    def _attach(self) -> None:
        self.wrap(self.decoder, "forward", partial(_wrap, self._run))
        for index, layer in enumerate(self.decoder.layers):
            self.wrap(layer, "forward", partial(_wrap, partial(self._layer, index)))
        self.on_detach(self.buckets.clear)

    def add_stats(self, stats: Stats) -> None:
        misses, step_misses = (
            {reason: count for reason, count in counts.items() if reason} for counts in (self.prefills, self.steps)
        )
        stats.graphs = GraphCounts(
            self.prefills[""], misses, self.buckets.captured, self.buckets.bytes, self.steps[""], step_misses
        )

    def warm_up(self, lengths: Sequence[int], batch: int) -> None:
        """Capture the graphs of text prompts with `lengths` tokens and `batch` rows."""
        model, token_id = self.adapter.model, min(set(range(3, 99)) - set(self.adapter.placeholders.values()))
        num_tokens = 3 if self.buckets.graphs.decode else 1  # the prefill, and two steps
        # The first prompt and the first step only record the groups of layers.
        repeated = [length for length in lengths for _ in range(self.buckets.graphs.min_uses)]
        for length in (lengths[0], *repeated):
            ids = torch.full((batch, length), token_id, device=model.device)
            model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens,
                min_new_tokens=num_tokens, do_sample=False,
            )  # fmt: skip

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        is_step = (num_cached := _count_cached(kwargs)) is not None
        if is_step and not (num_cached and self.buckets.graphs.decode):
            return forward(*args, **kwargs)
        try:
            walk = self._start_walk(args, kwargs, is_step)
        except NotGraphedError as error:
            self._count(str(error), is_step)
            return forward(*args, **kwargs)
        states = get_thread_states()
        states[self] = walk
        try:
            output = forward(*args, **(kwargs if is_step else self._remove_trivial_mask(kwargs)))
        finally:
            del states[self]
        walk.end()
        self._count(walk.why_not, is_step)
        return output

    def _layer(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        walk: Walk | None = None if torch.compiler.is_compiling() else get_thread_states().get(self)
        return forward(*args, **kwargs) if walk is None else walk.run_layer(index, forward, args, kwargs)

    def _start_walk(self, args: tuple, kwargs: dict[str, Any], is_step: bool) -> Walk:
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
        call, eager_layers = self.current(), self.known.eager_layers
        starts: frozenset[int] = frozenset()
        if not is_step:
            eager_layers |= self.eager_layers
        elif call is not None and call.cached.reduction is not None:
            # In a step, methods act before layers or replace modules, so layers after a cut only begin a group.
            starts = call.starts | (frozenset() if call.cached.decode is None else {call.cached.decode.layer})
        if call is not None:
            eager_layers |= call.maskless | (frozenset() if is_step else call.starts)
        other_arguments = frozenset(
            name for name in kwargs.keys() - _COMMON if not (kwargs[name] is None or kwargs[name] is False)
        )
        has_extras = call is not None and call.state.extras is not None
        key = (is_step, eager_layers, starts, other_arguments, has_extras)
        if (groups := self.groups.get(key)) is None:
            groups = self.groups.setdefault(key, Groups(self.adapter, eager_layers, starts))
        return (StepWalk if is_step else Walk)(groups, self.buckets)

    def _remove_trivial_mask(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Remove a mask that hides no token: the decoder would synchronise with the device to find out."""
        call, mask = self.current(), kwargs.get("attention_mask")
        if call is None or not isinstance(mask, Tensor) or mask.ndim != 2 or compat.get_cache(kwargs) is None:
            return kwargs
        if not call.active or not call.has_images or call.past:  # the cache of an earlier call may contain padding
            return kwargs
        has_padding = call.state.layout.valid is not None or not bool(call.prompt.is_real.all())
        return kwargs if has_padding else kwargs | {"attention_mask": None}

    def _count(self, why_not: str, is_step: bool) -> None:
        with self.buckets.lock:
            (self.steps if is_step else self.prefills)[why_not] += 1
        call = self.current()
        if why_not and not is_step and call is not None and call.has_images:
            call.notes.append(f"prefill without graphs: {why_not}")


def build_graphed_decoder(
    adapter: Adapter, graphs: Any, eager_layers: Collection[int] = (), why_not: str = ""
) -> list[GraphedDecoder]:
    """Return the part for a `graphs=` argument, or an empty list for False. Raises OptionError."""
    settings = Graphs.from_argument(graphs)
    return [] if settings is None else [GraphedDecoder(adapter, settings, eager_layers, why_not)]


def _wrap(function: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    wrapped = partial(function, forward)
    wrapped.__wrapped__ = forward  # type: ignore[attr-defined]  # transformers inspects the signature
    return wrapped


def _count_cached(kwargs: dict[str, Any]) -> int | None:
    """Return the number of tokens in the cache of a call with one token per row, else None.

    A static cache counts as empty: its length is on the device, and transformers compiles its steps.
    """
    tokens = next((kwargs[name] for name in ("inputs_embeds", "input_ids") if kwargs.get(name) is not None), None)
    cache = compat.get_cache(kwargs)
    if tokens is None or tokens.shape[1] != 1 or cache is None:
        return None
    return 0 if is_static(cache) else int(cache.get_seq_length())


def _check_family(adapter: Adapter) -> str:
    """Return the reason why the decoder of a family cannot use graphs, or an empty string."""
    if adapter.stateful:
        return "layers carry a state from token to token"
    if adapter.shares_keys:
        return "layers attend to the keys of other layers"
    return ""
