# SPDX-License-Identifier: Apache-2.0
"""The bounds of a session: visual tokens, or bytes of its cache, and the greatest position."""

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
    """Bounds of a stream.

    given: the memory as the caller wrote it. entries: how many of them that is in each layer with full attention; of a
    memory in bytes, text is among them. share: of the visual entries' room, what a compression leaves. horizon: the
    greatest position; fixed: why positions do not move down at it, in words, None where they do.
    """

    given: int | str
    entries: int
    share: float
    horizon: int
    fixed: str | None = None

    @property
    def reanchor(self) -> bool:
        """True if positions move down at the horizon."""
        return self.fixed is None

    def room(self, text: int) -> int:
        """Return how many visual entries may be held beside so many of text."""
        return max(0, self.entries - text) if isinstance(self.given, str) else self.entries

    def target(self, text: int) -> int:
        """Return how many visual entries a compression leaves beside so many of text."""
        return max(1, int(self.room(text) * self.share))

    def freed(self, text: int) -> int:
        """Return how many visual entries a compression takes out beside so many of text, where their positions fit."""
        room = min(self.room(text), self.horizon + 1)
        return room - max(1, int(room * self.share))

    def least(self, pinned: int) -> int:
        """Return the smallest number of entries of which a compression leaves more than a policy pins."""
        least = max(1, int(pinned / self.share))
        while max(1, int(least * self.share)) <= pinned:
            least += 1
        return least

    def check(self, text: int, pinned: int) -> None:
        """Raise BudgetError where nothing new would stay beside so many entries of text."""
        if self.room(text) < 1 or pinned >= self.target(text):
            beside = f" beside {text} tokens of text" if text and isinstance(self.given, str) else ""
            raise BudgetError(
                f"memory={self.given!r} has room for {self.room(text)} visual tokens{beside}, of which a compression "
                f"leaves {self.target(text)}, and the policy pins {pinned}: nothing new would stay. Raise memory= to "
                f"{self.least(pinned)} visual tokens at least, or have the policy pin fewer, as "
                "tokenprune.sessions.policy('window', sink=0) does"
            )

    def check_position(self, last: int) -> None:
        """Raise UnsupportedSetupError where a position is past the greatest that the model may see."""
        if last <= self.horizon:
            return
        moved = "what is held leaves no room (memory=)" if self.reanchor else f"nothing moves down ({self.fixed})"
        raise UnsupportedSetupError(
            f"the stream would reach position {last}, the model's last one is {self.horizon} (horizon=), and {moved}: "
            "begin anew with reset(), see fewer or smaller frames, or raise horizon= if the model was trained for it"
        )


def entries_of(memory: int | str, adapter: Adapter, of: dtype) -> int:
    """Return how many entries each layer with full attention holds in a memory, a number of them or bytes as in
    "64MiB"; raises BudgetError for any other, and for bytes in which there is no room for one.

    of: the dtype of keys and values. Layers with a sliding window take what a full window does, whatever is seen.
    """
    if matches_type(memory, Annotated[int, Ge(1)]):
        return int(memory)
    match = _BYTES.fullmatch(memory.strip()) if isinstance(memory, str) else None
    if match is None:
        raise BudgetError(
            f"memory={memory!r} must be a number of visual tokens, {describe_type(Annotated[int, Ge(1)])}, or bytes as "
            "in '64MiB' or '2GiB'"
        )
    most = int(float(match[1]) * 1024 ** ("KMGT".index(match[2].upper()) + 1))
    shape, layers = DecoderShape.from_config(adapter.text_config), DynamicCache(config=adapter.text_config).layers
    windows = [layer.sliding_window - 1 if layer.is_sliding else 0 for layer in layers]
    one = shape.kv_bytes([int(not layer.is_sliding) for layer in layers], of.itemsize)
    beside = shape.kv_bytes(windows, of.itemsize)
    if most < beside + one:
        sliding = f", and its layers with sliding windows {beside}" if beside else ""
        raise BudgetError(f"memory={memory!r} is {most} bytes: one token takes {one} of this model's cache{sliding}")
    return (most - beside) // one
