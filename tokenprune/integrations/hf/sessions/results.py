# SPDX-License-Identifier: Apache-2.0
"""The numbers of a session, what it holds, and an answer in full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenprune.integrations.hf.sessions.memory import CELL, FRAME, INDEX, POSITION

if TYPE_CHECKING:
    from torch import Tensor

    from tokenprune.integrations.hf.sessions.stream import Stream


@dataclass(frozen=True)
class SessionStats:
    """Numbers of a session.

    frames_seen, tokens_seen: of the whole stream. visual, text: entries that each layer with full attention holds;
    tokens that wrap frames are visual. kv_bytes: bytes of keys and values now, kv_bytes_peak: the most at once, within
    a block or a question too, kv_bytes_full: of the whole stream without a bound. compressions: how often entries left.
    oldest_frame: number of the oldest frame of which the first layer holds something, None without frames.
    next_position: of the next token. reanchored: how often positions moved down. memory: the bound of `visual`; of a
    memory in bytes, what text leaves of it.
    """

    frames_seen: int
    tokens_seen: int
    visual: int
    text: int
    kv_bytes: int
    kv_bytes_peak: int
    kv_bytes_full: int
    compressions: int
    oldest_frame: int | None
    next_position: int
    reanchored: int
    memory: int

    def __str__(self) -> str:
        return (
            f"{self.frames_seen} frames, {self.tokens_seen} tokens seen; {self.visual} of {self.memory} visual and "
            f"{self.text} text tokens held in {self.kv_bytes / 2**20:.1f} MiB (all: {self.kv_bytes_full / 2**20:.1f}), "
            f"{self.compressions} compressions"
        )


@dataclass(frozen=True)
class HeldEntries:
    """The entries that one layer holds, in the order of the stream.

    index, frame, cell: long `[H, n]`: place among all tokens seen, frame and place in it; frame is -1 for text, cell is
    -1 for text and for tokens that wrap a frame. position: long `[A, H, n]`. H is 1 where all heads hold the same.
    """

    layer: int
    index: Tensor
    frame: Tensor
    cell: Tensor
    position: Tensor


@dataclass(frozen=True)
class Answer:
    """An answer in full. text: without special tokens, None without a processor. ids: long `[m]`. logits: float32
    `[m, V]`, of each of them."""

    text: str | None
    ids: Tensor
    logits: Tensor


def stats_of(stream: Stream) -> SessionStats:
    """Return the numbers of a stream."""
    memory, progress = stream.memory, stream.progress
    frames = memory.tables[0][FRAME]
    seen = frames[frames >= 0]
    beside = sum(layer.keys.nbytes + layer.values.nbytes for layer in memory.sliding if layer.is_initialized)
    full = (memory.bytes - beside) * progress.tokens // memory.held if memory.held else 0
    return SessionStats(
        frames_seen=progress.frames,
        tokens_seen=progress.tokens,
        visual=memory.visual,
        text=stream.text,
        kv_bytes=memory.bytes,
        kv_bytes_peak=progress.peak,
        kv_bytes_full=full + beside,
        compressions=progress.compressions,
        oldest_frame=int(seen.min()) if len(seen) else None,
        next_position=progress.next,
        reanchored=progress.reanchored,
        memory=stream.room,
    )


def held_of(stream: Stream) -> list[HeldEntries]:
    """Return the entries of each layer with full attention."""
    memory = stream.memory
    tables = [table.long() for table in memory.tables]
    return [
        HeldEntries(layer, table[INDEX], table[FRAME], table[CELL], table[POSITION:])
        for layer, table in zip(memory.full, tables, strict=True)
    ]
