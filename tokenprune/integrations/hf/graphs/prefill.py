# SPDX-License-Identifier: Apache-2.0
"""Prefill a decoder by replaying graphs of groups of its layers.

A token attends to none on its right, so that padding there changes nothing: what enters a group is padded to a bucket
of lengths, its graph is replayed, and what leaves is cut back. A mask, where layers are handed one, is padded too.
Everything before, between and after the layers, cuts too, runs as it does without graphs: the first layer of a group
runs all of them, and the others hand on what they get.
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

# Arguments of a decoder that put nothing between its layers.
_COMMON = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "use_cache", "cache_position", "return_dict",
           "mm_encoder_outputs", "logits_to_keep", *compat.CACHE_NAMES}  # fmt: skip


class GraphedPrefill(Part):
    """Replays layers of the decoder of `adapter` for the first tokens of a prompt.

    alone: layers at which something is read or cut, which run as they are. why_not: in words, why none is graphed.
    """

    def __init__(self, adapter: Adapter, graphs: Graphs, alone: Collection[int] = (), why_not: str = "") -> None:
        super().__init__()
        self.adapter, self.decoder, self.alone = adapter, adapter.decoder, frozenset(alone)
        self.why_not = why_not or _why_not(adapter)
        self.buckets = Buckets(graphs)
        self.counts: Counter[str] = Counter()  # of prefills, by why they were not graphed: "" for those that were
        self.known: KnownModules | None = None
        self.groups: dict[Hashable, Groups] = {}
        self.line = f"graphs={graphs!r}"

    @staticmethod
    def current() -> None:
        """Return None: without an engine a model is in no call."""

    def _attach(self) -> None:
        self.wrap(self.decoder, "forward", partial(_wrapped, self._prefill))
        for index, layer in enumerate(self.decoder.layers):
            self.wrap(layer, "forward", partial(_wrapped, partial(self._layer, index)))
        self.on_detach(self.buckets.clear)

    def add_stats(self, stats: Stats) -> None:
        misses = {reason: count for reason, count in self.counts.items() if reason}
        stats.graphs = GraphCounts(self.counts[""], misses, self.buckets.captured, self.buckets.bytes)

    def warm_up(self, lengths: Sequence[int], batch: int) -> None:
        """Capture the graphs of prompts of `lengths` tokens, by prompts of text."""
        model, word = self.adapter.model, min(set(range(3, 99)) - set(self.adapter.placeholders.values()))
        for length in (lengths[0], *lengths):  # the first prompt shows which layers follow each other
            ids = torch.full((batch, length), word, device=model.device)
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)

    # -- one call

    def _prefill(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _is_step(kwargs):
            return forward(*args, **kwargs)
        try:
            walk = self._walk(args, kwargs)
        except NotGraphedError as error:
            self._count(str(error))
            return forward(*args, **kwargs)
        found = get_thread_states()
        found[self] = walk
        try:
            output = forward(*args, **self._without_mask(kwargs))
        finally:
            del found[self]
        walk.end()
        self._count(walk.why_not)
        return output

    def _layer(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        walk: Walk | None = None if torch.compiler.is_compiling() else get_thread_states().get(self)
        return forward(*args, **kwargs) if walk is None else walk.layer(index, forward, args, kwargs)

    def _walk(self, args: tuple, kwargs: dict[str, Any]) -> Walk:
        """Return the walk of a call through the layers; raise NotGraphedError where it cannot be graphed."""
        if self.why_not or args:
            raise NotGraphedError(self.why_not or "the decoder is called by place, not by name")
        if torch.is_grad_enabled() or self.decoder.training:
            raise NotGraphedError("gradients are on, or the model trains: call it under torch.no_grad(), after eval()")
        asked = ("output_hidden_states", "output_attentions")
        if any(kwargs.get(name, getattr(self.decoder.config, name, False)) for name in asked):
            raise NotGraphedError("hidden states or attention of layers are asked for")
        with self.buckets.lock:
            if self.known is None or not self.known.unchanged():
                self.buckets.clear()
                self.groups.clear()
                self.known = KnownModules(self.decoder)
        call, alone = self.current(), self.alone | self.known.alone
        if call is not None:
            alone |= call.maskless | call.starts
        more = frozenset(
            name for name in kwargs.keys() - _COMMON if not (kwargs[name] is None or kwargs[name] is False)
        )
        taken = call is not None and call.state.extras is not None
        groups = self.groups.setdefault((alone, more, taken), Groups(self.adapter, alone))
        return Walk(groups, self.buckets)

    def _without_mask(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments without a mask that is known to hide nothing: the decoder would ask the device."""
        call, mask = self.current(), kwargs.get("attention_mask")
        if call is None or not isinstance(mask, Tensor) or mask.ndim != 2 or compat.get_cache(kwargs) is None:
            return kwargs
        if not call.active or not call.has_images or call.past:  # what an earlier call cached may hold padding
            return kwargs
        hides = call.state.layout.valid is not None or not bool(call.prompt.is_real.all())
        return kwargs if hides else kwargs | {"attention_mask": None}

    def _count(self, why_not: str) -> None:
        with self.buckets.lock:
            self.counts[why_not] += 1
        call = self.current()
        if why_not and call is not None and call.has_images:
            call.notes.append(f"prefill was not graphed: {why_not}")


def graphed_prefill(
    adapter: Adapter, graphs: Any, alone: Collection[int] = (), why_not: str = ""
) -> list[GraphedPrefill]:
    """Return the part that `graphs=` asks for, none for False. Raises OptionError for what is no setting."""
    setting = Graphs.of(graphs)
    return [] if setting is None else [GraphedPrefill(adapter, setting, alone, why_not)]


def _wrapped(function: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    wrapped = partial(function, forward)
    wrapped.__wrapped__ = forward  # type: ignore[attr-defined]  # others read its signature
    return wrapped


def _is_step(kwargs: dict[str, Any]) -> bool:
    """Return whether a call is a step of an answer, which is no miss."""
    tokens = next((kwargs[name] for name in ("inputs_embeds", "input_ids") if kwargs.get(name) is not None), None)
    return tokens is not None and tokens.shape[1] == 1 and compat.get_cache(kwargs) is not None


def _why_not(adapter: Adapter) -> str:
    """Return in words why no layer of this decoder can be graphed; "" where they can."""
    if adapter.stateful:
        return "layers carry a state from token to token"
    if adapter.shares_keys:
        return "layers attend to the keys of others"
    return ""
