# SPDX-License-Identifier: Apache-2.0
"""Key/value caches that hold fewer tokens than the caller thinks.

`generate` slices its inputs by `cache.get_seq_length()`, positions continue from it, and masks are sized by
`get_mask_sizes()`. A reduced cache answers all of these with the *logical* length, the caller's, while each layer keeps
its own *physical* slots; `Reduction` knows which logical position sits in which slot. It lives on the cache, so that
two threads, interleaved generations, a copied and a re-used cache do not mix.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.cache.layer_storage import is_quantized, slots_handed_out
from tokenprune.integrations.shared.attachable import restore_class, swap_class

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenprune.statistics import Stats

    _Base: TypeAlias = Cache  # mixins are put in front of a cache's class
else:
    _Base = object


class Remembered(Protocol):
    """State that a part which acts while decoding keeps on a cache.

    stats: of the prefill, which its steps go on. visual: long `[B]`, the visual tokens of each row.
    """

    stats: Stats
    visual: Tensor

    @property
    def layer(self) -> int:
        """The first layer from which on it hides tokens."""

    @property
    def has_hidden(self) -> bool:
        """True if the cache holds tokens that its layers must not see."""

    def hide(self, columns: Tensor) -> Tensor:
        """Return the logical positions `[B, K]` of a layer's keys, -1 = those it must not see."""

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Follow a change of the cache's rows."""

    def crop(self, length: int) -> None:
        """Forget the tokens that were taken back."""


@dataclass
class Reduction:
    """Logical positions that the layers of a cache hold.

    length: the logical length. slots: per group of layers (first layer, long `[B, n]` of logical positions, -1 = empty
    slot); groups are ordered, each reaching to the first layer of the next. ragged: whether any slot may be empty.
    decode: what a method that acts while decoding remembers.
    """

    length: int
    slots: list[tuple[int, Tensor]]
    ragged: bool
    decode: Remembered | None = None

    def of_layer(self, layer: int) -> Tensor:
        """long `[B, n]`: the slots of the group that `layer` belongs to."""
        return next(slots for first, slots in reversed(self.slots) if first <= layer)

    def held(self, layer: int, past: int) -> Tensor:
        """long `[B, n]`: the logical positions that `layer` holds of the `past` tokens, -1 = empty slot."""
        return self.of_layer(layer)

    def map(self, change) -> None:
        self.slots = [(first, change(slots)) for first, slots in self.slots]

    def map_rows(self, change) -> None:
        self.map(change)
        if self.decode is not None:
            self.decode.map(change)


class Reduced(_Base):
    """Base of what is put in front of a cache's own class; see the module's docstring."""

    tokenprune_reduction: Any
    _tokenprune_original: type[Cache]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self.tokenprune_reduction.map_rows(lambda slots: slots.index_select(0, beam_idx.to(slots.device)))


class ReducedGrowing(Reduced):
    """Put in front of the class of a cache that grows."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokenprune_reduction.length

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int) -> tuple[int, int]:
        return self.tokenprune_reduction.length + compat.query_length(query_length), 0

    def reset(self) -> None:
        if not compat.RESET_EMPTIES:
            raise UnsupportedSetupError(
                f"transformers {compat.VERSION} leaves an emptied cache as long as it was, and its layers hold "
                "different numbers of tokens here: make a new cache instead, or take transformers 5.18 or later"
            )
        super().reset()
        restore(self)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._refuse_quantized("repeat rows of")
        super().batch_repeat_interleave(repeats)
        self.tokenprune_reduction.map_rows(lambda slots: slots.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._refuse_quantized("select rows of")
        super().batch_select_indices(indices)
        self.tokenprune_reduction.map_rows(lambda slots: slots[indices.to(slots.device)])

    def _refuse_quantized(self, wish: str) -> None:
        """Raise UnsupportedSetupError for a quantized cache, of which transformers changes the last tokens only: those
        that are not quantized yet."""
        if any(is_quantized(layer) for layer in self.layers):
            raise UnsupportedSetupError(
                f"cannot {wish} a quantized cache, of which transformers changes the last tokens only; use a dynamic "
                "cache (for drafts, several continuations and chosen rows)"
            )

    def crop(self, tokens_to_remove: int) -> None:
        reduction = self.tokenprune_reduction
        # A positive number is the (deprecated) absolute length to keep.
        removes = tokens_to_remove < 0 or (tokens_to_remove == 0 and compat.CROP_REMOVES)
        remove = -tokens_to_remove if removes else max(0, reduction.length - tokens_to_remove)
        if remove == 0:
            # Layers that record their past give up what is not needed any more; older ones record none.
            if compat.CROP_REMOVES:
                super().crop(0)
            return
        self._refuse_quantized("crop")
        length = reduction.length - remove
        for _, slots in reduction.slots:
            rest, tail = slots[:, : max(0, slots.shape[1] - remove)], slots[:, -remove:]
            whole = tail.shape[1] == remove and int(tail.min()) >= length
            if not whole or (rest.numel() and int(rest.max()) >= length):
                raise UnsupportedSetupError(
                    f"cannot crop {remove} tokens from this cache: some of them were pruned, so that rows and layers "
                    "would lose different numbers of entries; crop no further back than the end of the prompt"
                )
        super().crop(-remove)
        reduction.length = length
        reduction.map(lambda slots: slots[:, :-remove])
        if reduction.decode is not None:
            reduction.decode.crop(length)


@functools.cache
def _reduced_class(cls: type[Cache], kind: type) -> type[Cache]:
    # The name stays, so that messages and `type(cache).__name__` checks keep reading as before.
    return type(cls.__name__, (kind, cls), {"_tokenprune_original": cls, "__module__": cls.__module__})


def reduction_of(cache: Cache | None) -> Reduction | None:
    """Return the cache's `Reduction`, or None if it was never reduced."""
    return getattr(cache, "tokenprune_reduction", None)


def attach(cache: Any, reduction: Reduction, kind: type = ReducedGrowing) -> None:
    """Make `cache` report logical lengths from now on, in the way of `kind`."""
    if not isinstance(cache, Reduced):
        swap_class(cache, _reduced_class(cache.__class__, kind))
    cache.tokenprune_reduction = reduction


def restore(cache: Reduced) -> None:
    """Make `cache` an ordinary one again (after it was emptied)."""
    del cache.tokenprune_reduction
    restore_class(cache, cache._tokenprune_original, Reduced)


def cached_tokens(cache: Cache | None, layer: int) -> int | None:
    """Return how many physical slots `layer` hands out (`slots_handed_out`), or None without such a layer (yet)."""
    if cache is None or layer >= len(cache.layers):
        return None
    return slots_handed_out(cache.layers[layer])


def new_positions(start: int, count: int, batch: int, device: torch.device) -> Tensor:
    """long `[batch, count]`: logical positions of tokens that all stay."""
    return torch.arange(start, start + count, device=device).expand(batch, count)
