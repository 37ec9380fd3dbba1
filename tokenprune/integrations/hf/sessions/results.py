# SPDX-License-Identifier: Apache-2.0
"""Results of a session: statistics, held entries, and answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenprune.integrations.hf.sessions.memory import CELL, FRAME, INDEX, POSITION

if TYPE_CHECKING:
    from torch import Tensor

    from tokenprune.integrations.hf.sessions.stream import Stream


@dataclass(frozen=True)
class SessionStats:
    """Statistics of a session.

    Args:
        frames_seen: Number of frames of the stream.
        tokens_seen: Number of tokens of the stream.
        visual: Number of visual entries in each layer with full attention, with the tokens that wrap frames.
        text: Number of text entries in each layer with full attention.
        kv_bytes: Current bytes of keys and values.
        kv_bytes_peak: Largest number of bytes, also during a block or a question.
        kv_bytes_full: Bytes of the stream without a memory limit.
        compressions: Number of compressions.
        oldest_frame: Index of the oldest frame in the first layer, or None without frames.
        next_position: Position of the next token.
        reanchored: Number of times that positions were moved down.
        memory: Maximum of `visual`. For a memory in bytes it depends on `text`.

    Examples:
        >>> session = tokenprune.sessions.session(model, processor, memory=512)
        >>> session.see(image).stats.frames_seen
        1
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
    """Entries of one layer, in the order of the stream.

    The tensors are int64. Their `heads` dimension is 1 if all heads hold the same entries.

    Args:
        layer: Index of the layer.
        index: Index of each entry among all tokens of the stream, shape (heads, entries).
        frame: Frame of each entry, -1 for text, shape (heads, entries).
        cell: Index within the frame, -1 for text and tokens that wrap a frame, shape (heads, entries).
        position: Position ids, shape (axes, heads, entries).

    Examples:
        >>> session = tokenprune.sessions.session(model, processor, memory=512).see(image)
        >>> entries = session.held[0]
        >>> int(entries.frame.max())
        0
    """

    layer: int
    index: Tensor
    frame: Tensor
    cell: Tensor
    position: Tensor


@dataclass(frozen=True)
class Answer:
    """Answer of a session with its token ids and logits.

    Args:
        text: Text without special tokens, or None for a session without a processor.
        ids: Token ids, shape (tokens,), int64.
        logits: Logits of each token, shape (tokens, vocabulary), float32.

    Examples:
        >>> session = tokenprune.sessions.session(model, processor, memory=512).see(image)
        >>> answer = session.ask("What is this?", max_new_tokens=2, return_dict=True)
        >>> len(answer.ids) == len(answer.logits)
        True
    """

    text: str | None
    ids: Tensor
    logits: Tensor


def compute_stats(stream: Stream) -> SessionStats:
    """Return the statistics of a stream."""
    memory, progress = stream.memory, stream.progress
    frames = memory.tables[0][FRAME]
    visual_frames = frames[frames >= 0]
    sliding_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in memory.sliding if layer.is_initialized)
    full_bytes = (memory.bytes - sliding_bytes) * progress.tokens // memory.held if memory.held else 0
    return SessionStats(
        frames_seen=progress.frames,
        tokens_seen=progress.tokens,
        visual=memory.visual,
        text=stream.text,
        kv_bytes=memory.bytes,
        kv_bytes_peak=progress.peak,
        kv_bytes_full=full_bytes + sliding_bytes,
        compressions=progress.compressions,
        oldest_frame=int(visual_frames.min()) if len(visual_frames) else None,
        next_position=progress.next,
        reanchored=progress.reanchored,
        memory=stream.room,
    )


def list_entries(stream: Stream) -> list[HeldEntries]:
    """Return the entries of each layer with full attention."""
    memory = stream.memory
    tables = [table.long() for table in memory.tables]
    return [
        HeldEntries(layer, table[INDEX], table[FRAME], table[CELL], table[POSITION:])
        for layer, table in zip(memory.full_layers, tables, strict=True)
    ]
