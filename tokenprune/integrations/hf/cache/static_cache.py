# SPDX-License-Identifier: Apache-2.0
"""Static caches that hold fewer tokens than the caller thinks.

The slots of a static layer are all there from its first token on. Each group of layers has a table, long `[B, P]`: the
logical position of each slot, of the tokens that it holds and of those to come, which causality hides until they are
there. So nothing has to be counted while decoding, and a compiled step finds a constant.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticLayer

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.cache.reduced_cache import Reduction
from tokenprune.integrations.hf.sequence import masks
from tokenprune.integrations.shared.attachable import give_back_class, swap_class

if TYPE_CHECKING:
    _Base: TypeAlias = Cache  # the mixin is put in front of a cache's class
else:
    _Base = object


class KeySpan(NamedTuple):
    """Columns of a group that are the keys that a layer attends to: from `start` to before `stop`, and empty slots
    behind them up to `slots` in all."""

    start: int | None
    stop: int | None
    slots: int

    def of(self, columns: Tensor) -> Tensor:
        """long `[B, slots]`: the logical positions of a layer's keys, -1 = empty. columns: those of its group."""
        found = columns[:, self.start : self.stop]
        missing = self.slots - found.shape[1]
        return found if not missing else torch.nn.functional.pad(found, (0, missing), value=-1)


@dataclass
class StaticReduction(Reduction):
    """Logical positions that the layers of a static cache hold; `slots` are the groups' tables.

    capacity: how many tokens the cache was made for. full: the slots that layers were made for which hold fewer.
    in_turn: whether a call is under way that may remove tokens; else a step only needs the masks of what is there.
    """

    capacity: int = 0
    full: dict[int, int] = field(default_factory=dict)
    in_turn: bool = True

    def removed(self, layer: int) -> int:
        """Return how many tokens of the past `layer` does not hold."""
        return self.capacity - self.of_layer(layer).shape[1]

    def held(self, layer: int, past: int) -> Tensor:
        return self.of_layer(layer)[:, : past - self.removed(layer)]


class ReducedStaticMixin(_Base):
    """Put in front of a static cache's own class: it tells the caller's lengths, as tensors where its own are."""

    tokenprune_reduction: StaticReduction
    _tokenprune_original: type[Cache]

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return super().get_seq_length(layer_idx) + self.tokenprune_reduction.removed(layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.tokenprune_reduction.capacity, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.tokenprune_reduction.capacity

    def reset(self) -> None:
        super().reset()
        for layer, slots in self.tokenprune_reduction.full.items():
            give_back_slots(self.layers[layer], slots)
        del self.tokenprune_reduction
        give_back_class(self, self._tokenprune_original, ReducedStaticMixin)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self.tokenprune_reduction.map_rows(lambda slots: slots.index_select(0, beam_idx.to(slots.device)))


@functools.cache
def _reduced_class(cls: type[Cache]) -> type[Cache]:
    return type(cls.__name__, (ReducedStaticMixin, cls), {"_tokenprune_original": cls, "__module__": cls.__module__})


def attach(cache: Any, reduction: StaticReduction) -> None:
    """Make `cache` report logical lengths from now on."""
    if not isinstance(cache, ReducedStaticMixin):
        swap_class(cache, _reduced_class(cache.__class__))
    cache.tokenprune_reduction = reduction


def is_static(cache: Any) -> bool:
    """Return whether a cache has slots for a number of tokens that is fixed."""
    return any(map(_has_slots, map(type, getattr(cache, "layers", ()))))


@functools.cache
def _has_slots(kind: type) -> bool:
    return issubclass(kind, StaticLayer)  # abstract: an instance is looked up in Python each time


def check_static(cache: Cache, past: int) -> None:
    """Raise UnsupportedSetupError where tokens cannot be left out of a static cache that holds `past` tokens."""
    sliding: list[Any] = [layer for layer in cache.layers if getattr(layer, "is_sliding", False)]
    if sliding and len(sliding) == len(cache.layers):
        raise UnsupportedSetupError(
            "cannot prune with a static cache all of whose layers are sliding: it does not know for how many tokens it "
            "was made; leave out cache_implementation, or use a dynamic cache"
        )
    filled = past and any(past >= layer.max_cache_len for layer in sliding)
    if filled and not isinstance(cache, ReducedStaticMixin):
        raise UnsupportedSetupError(
            "cannot prune the images of a later turn on a static cache whose sliding layers are full already; put "
            "images into the first turn, or use a dynamic cache"
        )


# -- the slots of a layer


def take_fewer_slots(layer: Any, slots: int) -> int | None:
    """Let a static layer that is not laid out yet have at most `slots`; return how many it was to have, None where
    nothing changed."""
    if layer.is_initialized or layer.max_cache_len <= slots:
        return None
    full, layer.max_cache_len = layer.max_cache_len, slots
    return full


def give_back_slots(layer: Any, slots: int) -> None:
    """Let a layer, which was just emptied, be laid out anew with `slots`."""
    layer.max_cache_len, layer.is_initialized = slots, False
    layer.keys = layer.values = None


def span_of(layer: Any, held: int, width: int) -> KeySpan:
    """Return which columns of its group a static layer attends to, when `width` tokens come to the `held` that its
    group has (a sliding layer threw the oldest of them away)."""
    slots = layer.max_cache_len
    if not layer.is_sliding:
        return KeySpan(0, slots, slots)
    if held >= slots:
        return KeySpan(held + 1 - slots, held + width, slots - 1 + width)
    if held + width > slots:
        return KeySpan(0, held + width, held + width)
    return KeySpan(0, slots, slots)


def filled_span(layer: Any, held: int, width: int) -> KeySpan:
    """Return `span_of` without the slots of tokens to come."""
    start = span_of(layer, held, width).start or 0
    return KeySpan(start, held + width, held + width - start)


def held_keys(keys: Tensor, held: int) -> Tensor:
    """Return those of a static layer's keys `[B, H, slots, D]` that are tokens. held: by its group."""
    return keys[:, :, : min(held, keys.shape[2])]


# -- a step of decoding: nothing in it asks for more than the cache, so that it can be compiled


def begin_turn(arguments: dict[str, Any]) -> bool:
    """Return whether a model that is called with `arguments` only goes on with a reduced static cache. If it does more
    with one, that is noted until `end_turn`."""
    cache = arguments.get("past_key_values")
    if not isinstance(cache, ReducedStaticMixin):
        return False
    # By name first: torch.compile would guard the shapes of all that is looked at.
    images = [name for name in arguments if name.startswith(("pixel_values", "mm_encoder_outputs"))]
    if all(arguments[name] is None for name in images):
        return True
    cache.tokenprune_reduction.in_turn = True
    return False


def end_turn(cache: Any) -> None:
    """Take the note of `begin_turn` back."""
    if isinstance(cache, ReducedStaticMixin):
        cache.tokenprune_reduction.in_turn = False


def step_mask(layer: int, arguments: dict[str, Any], width: int) -> Tensor:
    """Return the mask of a layer that is called with `arguments` for `width` tokens that all stay. Among these is one
    `[B or 1, 1 or H, width, capacity]`, as the model made it for the caller's lengths."""
    cache = arguments["past_key_values"]
    reduction, of_layer = cache.tokenprune_reduction, cache.layers[layer]
    held = of_layer.cumulative_length_int if of_layer.is_sliding else 0  # else all slots are seen
    columns = span_of(of_layer, held, width).of(reduction.of_layer(layer))
    return masks.gather_mask(arguments["attention_mask"], None, columns)
