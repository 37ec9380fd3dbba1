# SPDX-License-Identifier: Apache-2.0
"""Layout of a step's tokens in the layers after the cut: integers and block tables, no model."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tokenprune.errors import PlaceholderMismatchError, TokenPruneError
from tokenprune.integrations.vllm.settings.items import count_requested
from tokenprune.integrations.vllm.settings.plan import Plan
from tokenprune.settings import Setting


@dataclass(frozen=True)
class VisualPiece:
    """Visual tokens of a prompt that share a budget: an image, a video, or a tile.

    places: their places in the prompt, ascending. keep: how many of them go on after the cut. item: number of the
    multimodal item. ordinal: index of this piece in its prompt.
    """

    indices: tuple[int, ...]
    keep: int
    item: int
    ordinal: int
    modality: str

    @property
    def start(self) -> int:
        return self.indices[0]

    @property
    def end(self) -> int:
        return self.indices[-1] + 1

    @property
    def drop(self) -> int:
        return len(self.indices) - self.keep


def count_kept(setting: Setting, count: int, block: int | None) -> int:
    """Return how many of `count` visual tokens go on after the cut.

    block: size of the blocks of which an item loses whole ones, or None to keep exactly what the setting asks for. At
    least a block stays: then the blocks that go lie within the item, wherever it begins.
    """
    if setting.method is None:
        return count
    wanted = count_requested(setting, count)
    if block is None:
        return wanted
    return count - block * max(0, min((count - wanted) // block, count // block - 1))


def get_plans(features: Sequence[Any]) -> list[tuple[Plan, int, str]]:
    """Return plan, place and modality of vLLM's features of a prompt, one for each multimodal item."""
    plans = [(Plan.from_feature(one), one.mm_position.offset, one.modality) for one in features]
    for (plan, *_), feature in zip(plans, features, strict=True):
        if plan.length != feature.mm_position.length:
            raise PlaceholderMismatchError(f"the plan of an item ({feature.modality}) does not fit its place")
    return plans


def split_pieces(plans: Sequence[tuple[Plan, int, str]], block: int | None) -> list[VisualPiece]:
    """Return the pieces of a prompt. plans: of each multimodal item in order, with its place and modality."""
    pieces: list[VisualPiece] = []
    for item, (plan, offset, modality) in enumerate(plans):
        places = [offset + place for embed, one in plan.stretches if embed for place in one]
        for count in plan.counts:
            keep = count_kept(plan.setting, count, block)
            pieces.append(VisualPiece(tuple(places[:count]), keep, item, len(pieces), modality))
            places = places[count:]
    return pieces


@dataclass(frozen=True)
class CutBlocks:
    """The blocks of the KV cache that the layers after the cut hold for a request.

    gaps:  columns of the request's full block table without a block.
    drops: (end, number) of the tokens that each piece loses, where tokens are packed without gaps: the table gets
           shorter instead.
    items: number of multimodal items of the request when this was computed; a session of vLLM may add some.
    """

    gaps: frozenset[int] = frozenset()
    drops: tuple[tuple[int, int], ...] = ()
    items: int = 0

    @staticmethod
    def from_pieces(pieces: Sequence[VisualPiece], block: int | None, items: int) -> CutBlocks:
        """See `count_kept` for `block`."""
        if block is None:
            return CutBlocks(drops=tuple((piece.end, piece.drop) for piece in pieces if piece.drop), items=items)
        return CutBlocks(frozenset(column for piece in pieces for column in _columns_out(piece, block)), items=items)

    def count_columns(self, tokens: int, block: int) -> int:
        """Return how many columns the table has when `tokens` of the prompt and answer have a slot."""
        return -(-(tokens - sum(number for end, number in self.drops if end <= tokens)) // block)

    def count_blocks(self, columns: Collection[int]) -> int:
        """Return how many of these columns hold a block."""
        return sum(column not in self.gaps for column in columns)


@dataclass(frozen=True)
class RequestStep:
    """One request's share of a step: tokens `computed` to `end` of its prompt and answer. prompt: tokens of its prompt,
    where that is known."""

    computed: int
    end: int
    pieces: Sequence[VisualPiece]
    prompt: int | None = None

    @cached_property
    def cut_pieces(self) -> list[VisualPiece]:
        """The pieces that lose tokens in this step; raises TokenPruneError if one is only partly in it."""
        pieces = [piece for piece in self.pieces if piece.drop and piece.end > self.computed and piece.start < self.end]
        for piece in pieces:
            if piece.start < self.computed or piece.end > self.end:
                raise TokenPruneError(
                    f"visual tokens {piece.start} to {piece.end} of a prompt came in parts (tokens {self.computed} to "
                    f"{self.end}); report this with the server's configuration"
                )
        return pieces

    @cached_property
    def past_pieces(self) -> list[VisualPiece]:
        """The pieces that have lost tokens before this step."""
        return [piece for piece in self.pieces if piece.drop and piece.end <= self.computed]

    @property
    def num_before(self) -> int:
        """Number of tokens of this request that the layers after the cut hold before this step."""
        return self.computed - sum(piece.drop for piece in self.past_pieces)

    @property
    def num_queries(self) -> int:
        """Number of the step's tokens that go through the layers after the cut."""
        return self.end - self.computed - sum(piece.drop for piece in self.cut_pieces)


@dataclass(frozen=True)
class StepLayout:
    """A step after the cut, of R requests and T' tokens. All arrays are numpy, made without synchronising the device.

    lengths:  int64 `[R]`, tokens of each request after the cut, this step included.
    starts:   int32 `[R + 1]`, index of each request's first token.
    columns:  int64 `[R, W]`, for each column of the table after the cut, its column in the full block table.
    row, column, offset: int64 `[T']`, the request of each token, the column (after the cut) of its block, and its
    place in the block.
    """

    lengths: np.ndarray
    starts: np.ndarray
    columns: np.ndarray
    row: np.ndarray
    column: np.ndarray
    offset: np.ndarray


def lay_out(shares: Sequence[RequestStep], width: int, block_size: int, aligned: bool) -> StepLayout:
    """Lay out a step after the cut.

    width: columns of the full block table. aligned: whether items lose whole blocks, which are left out of the table;
    else tokens are packed without gaps.
    """
    before = np.array([share.num_before for share in shares], dtype=np.int64)
    queries = np.array([share.num_queries for share in shares], dtype=np.int64)
    columns = np.tile(np.arange(width, dtype=np.int64), (len(shares), 1))
    if aligned:
        for request, share in enumerate(shares):
            for first, blocks in _blocks_out(itertools.chain(share.past_pieces, share.cut_pieces), block_size):
                columns[request, first:] += blocks
    ends = queries.cumsum()
    row = np.repeat(np.arange(len(shares)), queries)
    place = np.arange(int(queries.sum())) - np.repeat(ends - queries, queries) + before[row]
    return StepLayout(
        before + queries,
        np.concatenate([[0], ends]).astype(np.int32),
        columns.clip(max=width - 1),
        row,
        place // block_size,
        place % block_size,
    )


def _blocks_out(pieces: itertools.chain[VisualPiece], block_size: int) -> list[tuple[int, int]]:
    """(first, number) of the blocks that each piece loses, counted as the table stands after those before it."""
    out, shift = [], 0
    for piece in pieces:
        columns = _columns_out(piece, block_size)
        out.append((columns.start - shift, len(columns)))
        shift += len(columns)
    return out


def _columns_out(piece: VisualPiece, block_size: int) -> range:
    """Columns of the full block table whose blocks a piece loses: all within it."""
    first = piece.start // block_size + 1
    return range(first, first + piece.drop // block_size)
