# SPDX-License-Identifier: Apache-2.0
"""Limits of a session: visual tokens or bytes of its cache, and the largest position."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge
from torch import dtype
from transformers import DynamicCache

from tokenprune.errors import BudgetError, UnsupportedSetupError
from tokenprune.integrations.hf.families import Adapter
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.selection.options import describe_type, matches_type

_BYTES = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?([KMGT])iB", re.IGNORECASE)


@dataclass(frozen=True)
class Limits:
    """Limits of a stream.

    Attributes:
        memory: The `memory=` argument: a number of visual tokens, or bytes as a string.
        entries: Number of entries in each layer with full attention. It includes text if `memory` is in bytes.
        share: Share of the visual entries that a compression keeps.
        horizon: Largest position.
        fixed: Reason why positions do not move down at the horizon, or None if they do.
    """

    memory: int | str
    entries: int
    share: float
    horizon: int
    fixed: str | None = None

    @property
    def reanchor(self) -> bool:
        """True if positions move down at the horizon."""
        return self.fixed is None

    def room(self, text: int) -> int:
        """Return the maximum number of visual entries next to `text` text entries."""
        return max(0, self.entries - text) if isinstance(self.memory, str) else self.entries

    def target(self, text: int) -> int:
        """Return the number of visual entries after a compression, next to `text` text entries."""
        return max(1, int(self.room(text) * self.share))

    def count_freed(self, text: int) -> int:
        """Return the number of visual entries that a compression drops, next to `text` text entries."""
        room = min(self.room(text), self.horizon + 1)
        return room - max(1, int(room * self.share))

    def get_min_entries(self, pinned: int) -> int:
        """Return the smallest memory for which a compression keeps more entries than a policy pins."""
        entries = max(1, int(pinned / self.share))
        while max(1, int(entries * self.share)) <= pinned:
            entries += 1
        return entries

    def check(self, text: int, pinned: int) -> None:
        """Raise BudgetError if a compression would drop every new visual entry."""
        if self.room(text) < 1 or pinned >= self.target(text):
            beside = f" beside {text} text tokens" if text and isinstance(self.memory, str) else ""
            raise BudgetError(
                f"memory={self.memory!r} has room for {self.room(text)} visual tokens{beside}; a compression keeps "
                f"{self.target(text)}, and the policy pins {pinned}, so that no new token would be kept. Raise memory= "
                f"to {self.get_min_entries(pinned)} visual tokens, or use policy('window', sink=0)."
            )

    def check_position(self, last: int) -> None:
        """Raise UnsupportedSetupError if position `last` is beyond the horizon."""
        if last <= self.horizon:
            return
        reason = (
            "the memory leaves no room (memory=)" if self.reanchor else f"positions cannot move down ({self.fixed})"
        )
        raise UnsupportedSetupError(
            f"The stream would reach position {last}, the last position is {self.horizon} (horizon=), and {reason}. "
            "Call reset(), or pass fewer or smaller frames."
        )


def count_entries(memory: int | str, adapter: Adapter, cache_dtype: dtype) -> int:
    """Return the number of entries of each layer with full attention for a `memory=` argument.

    Layers with a sliding window are counted with a full window.

    Args:
        memory: Number of visual tokens, or bytes such as "64MiB".
        adapter: Adapter of the model.
        cache_dtype: Dtype of keys and values.

    Raises:
        BudgetError: If `memory` is not valid, or has no room for one entry.
    """
    if matches_type(memory, Annotated[int, Ge(1)]):
        return int(memory)
    match = _BYTES.fullmatch(memory.strip()) if isinstance(memory, str) else None
    if match is None:
        raise BudgetError(
            f"memory={memory!r} must be a number of visual tokens, {describe_type(Annotated[int, Ge(1)])}, or bytes as "
            "in '64MiB' or '2GiB'"
        )
    num_bytes = int(float(match[1]) * 1024 ** ("KMGT".index(match[2].upper()) + 1))
    shape, layers = DecoderShape.from_config(adapter.text_config), DynamicCache(config=adapter.text_config).layers
    windows = [layer.sliding_window - 1 if layer.is_sliding else 0 for layer in layers]
    entry_bytes = shape.kv_bytes([int(not layer.is_sliding) for layer in layers], cache_dtype.itemsize)
    window_bytes = shape.kv_bytes(windows, cache_dtype.itemsize)
    if num_bytes < window_bytes + entry_bytes:
        sliding = f", and its sliding windows take {window_bytes}" if window_bytes else ""
        raise BudgetError(
            f"memory={memory!r} is {num_bytes} bytes: one token takes {entry_bytes} of this model's cache{sliding}"
        )
    return (num_bytes - window_bytes) // entry_bytes
