# SPDX-License-Identifier: Apache-2.0
"""Key-value caches with dropped tokens.

`generate` slices its inputs by `cache.get_seq_length()`, continues positions from it, and sizes masks by
`get_mask_sizes()`. A reduced cache reports the *logical* length of the caller, while each layer holds fewer *physical*
slots. A `Reduction` on the cache maps slots to logical positions, so threads, interleaved generations, copied and
reused caches do not mix.
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
from tokenprune.integrations.hf.cache.layer_storage import count_slots, is_quantized
from tokenprune.integrations.shared.attachable import restore_class, swap_class

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenprune.statistics import Stats

    _Base: TypeAlias = Cache  # mixins are combined with the class of a cache
else:
    _Base = object


class DecodeMemory(Protocol):
    """State on a cache of a method that drops tokens during decoding.

    Attributes:
        stats: Statistics of the prefill. Decoding steps add to them.
        visual: Number of visual tokens of each row, shape (batch,), int64.
    """

    stats: Stats
    visual: Tensor

    @property
    def layer(self) -> int:
        """Index of the first layer with hidden tokens."""

    @property
    def has_hidden(self) -> bool:
        """True if the cache holds tokens that layers must not see."""

    def hide(self, columns: Tensor) -> Tensor:
        """Replace the logical positions of hidden keys by -1. columns: Shape (batch, keys)."""

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change of the cache's rows to all tensors."""

    def crop(self, length: int) -> None:
        """Forget tokens from the logical position `length` on."""


@dataclass
class Reduction:
    """Logical positions of the slots of a cache.

    Attributes:
        length: Logical length.
        slots: For each group of layers, in order, its first layer and the logical positions of its slots, shape (batch,
            slots), int64, -1 for empty slots.
        ragged: Whether a slot may be empty.
        decode: State of a method that drops tokens during decoding, or None.
    """

    length: int
    slots: list[tuple[int, Tensor]]
    ragged: bool
    decode: DecodeMemory | None = None

    def get_slots(self, layer: int) -> Tensor:
        """Return the logical positions of the slots of `layer`, shape (batch, slots), int64."""
        return next(slots for first, slots in reversed(self.slots) if first <= layer)

    def get_past_slots(self, layer: int, past: int) -> Tensor:
        """Return the logical positions of the slots of `layer` that hold the `past` tokens."""
        return self.get_slots(layer)

    def map(self, change) -> None:
        self.slots = [(first, change(slots)) for first, slots in self.slots]

    def map_rows(self, change) -> None:
        self.map(change)
        if self.decode is not None:
            self.decode.map(change)


class Reduced(_Base):
    """Base class of the mixins of reduced caches. See the module docstring."""

    tokenprune_reduction: Any
    _tokenprune_original: type[Cache]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self.tokenprune_reduction.map_rows(lambda slots: slots.index_select(0, beam_idx.to(slots.device)))


class ReducedGrowing(Reduced):
    """Mixin for caches that grow."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokenprune_reduction.length

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int) -> tuple[int, int]:
        return self.tokenprune_reduction.length + compat.get_query_length(query_length), 0

    def reset(self) -> None:
        if not compat.RESET_EMPTIES:
            raise UnsupportedSetupError(
                f"reset() of a pruned cache is not supported in transformers {compat.VERSION}. Create a new cache, or "
                "use transformers 5.18 or later."
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

    def _refuse_quantized(self, action: str) -> None:
        """Raise UnsupportedSetupError for a quantized cache, of which transformers changes only the last tokens."""
        if any(is_quantized(layer) for layer in self.layers):
            raise UnsupportedSetupError(
                f"Cannot {action} a quantized cache, because transformers changes only its last tokens. Use a dynamic "
                "cache."
            )

    def crop(self, tokens_to_remove: int) -> None:
        reduction = self.tokenprune_reduction
        # A positive argument is the (deprecated) absolute length to keep.
        is_count = tokens_to_remove < 0 or (tokens_to_remove == 0 and compat.CROP_TAKES_REMOVED_COUNT)
        num_removed = -tokens_to_remove if is_count else max(0, reduction.length - tokens_to_remove)
        if num_removed == 0:
            # crop(0) frees recorded past of sliding layers. Older versions record none.
            if compat.CROP_TAKES_REMOVED_COUNT:
                super().crop(0)
            return
        self._refuse_quantized("crop")
        length = reduction.length - num_removed
        for _, slots in reduction.slots:
            rest, tail = slots[:, : max(0, slots.shape[1] - num_removed)], slots[:, -num_removed:]
            has_all = tail.shape[1] == num_removed and int(tail.min()) >= length
            if not has_all or (rest.numel() and int(rest.max()) >= length):
                raise UnsupportedSetupError(
                    f"Cannot crop {num_removed} tokens from this cache, because some of them were pruned. Crop only "
                    "tokens after the prompt."
                )
        super().crop(-num_removed)
        reduction.length = length
        reduction.map(lambda slots: slots[:, :-num_removed])
        if reduction.decode is not None:
            reduction.decode.crop(length)


@functools.cache
def _make_reduced_class(cls: type[Cache], kind: type) -> type[Cache]:
    # The name is kept for messages and for checks of `type(cache).__name__`.
    return type(cls.__name__, (kind, cls), {"_tokenprune_original": cls, "__module__": cls.__module__})


def get_reduction(cache: Cache | None) -> Reduction | None:
    """Return the `Reduction` of a cache, or None."""
    return getattr(cache, "tokenprune_reduction", None)


def attach(cache: Any, reduction: Reduction, kind: type = ReducedGrowing) -> None:
    """Make `cache` report logical lengths. kind: The mixin."""
    if not isinstance(cache, Reduced):
        swap_class(cache, _make_reduced_class(cache.__class__, kind))
    cache.tokenprune_reduction = reduction


def restore(cache: Reduced) -> None:
    """Give `cache` its original class, after it was emptied."""
    del cache.tokenprune_reduction
    restore_class(cache, cache._tokenprune_original, Reduced)


def count_cached_slots(cache: Cache | None, layer: int) -> int | None:
    """Return `count_slots` of `layer`, or None if the cache has no such layer yet."""
    if cache is None or layer >= len(cache.layers):
        return None
    return count_slots(cache.layers[layer])


def build_positions(start: int, count: int, batch: int, device: torch.device) -> Tensor:
    """Return consecutive logical positions, shape (batch, count), int64."""
    return torch.arange(start, start + count, device=device).expand(batch, count)
