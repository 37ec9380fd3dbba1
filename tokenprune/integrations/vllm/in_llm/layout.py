# SPDX-License-Identifier: Apache-2.0
"""Layout of a step's tokens in the layers after the cut: integers and block tables, without a model."""

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

    Attributes:
        indices: Indices of the tokens in the prompt, ascending.
        keep: Number of tokens after the cut.
        ordinal: Index of this piece in its prompt.
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
    """Return the number of visual tokens after the cut, out of `count`.

    Args:
        block: Block size if an item loses complete blocks, or None to keep exactly the budget. At least one block is
            kept, so the dropped blocks are within the item, wherever it begins.
    """
    if setting.method is None:
        return count
    budget = count_requested(setting, count)
    if block is None:
        return budget
    return count - block * max(0, min((count - budget) // block, count // block - 1))


def get_plans(features: Sequence[Any]) -> list[tuple[Plan, int, str]]:
    """Return (plan, offset, modality) of each multimodal item of a prompt.

    Args:
        features: vLLM's features of the items.

    Raises:
        PlaceholderMismatchError: If a plan does not fit the placeholders of its item.
    """
    plans = [(Plan.from_feature(feature), feature.mm_position.offset, feature.modality) for feature in features]
    for (plan, *_), feature in zip(plans, features, strict=True):
        if plan.length != feature.mm_position.length:
            raise PlaceholderMismatchError(
                f"The plan of an item ({feature.modality}) has {plan.length} tokens, and its placeholders "
                f"{feature.mm_position.length}."
            )
    return plans


def split_pieces(plans: Sequence[tuple[Plan, int, str]], block: int | None) -> list[VisualPiece]:
    """Return the pieces of a prompt.

    Args:
        plans: (plan, offset, modality) of each multimodal item, in order.
        block: See `count_kept`.
    """
    pieces: list[VisualPiece] = []
    for item, (plan, offset, modality) in enumerate(plans):
        indices = [offset + index for embed, span in plan.stretches if embed for index in span]
        for count in plan.counts:
            keep = count_kept(plan.setting, count, block)
            pieces.append(VisualPiece(tuple(indices[:count]), keep, item, len(pieces), modality))
            indices = indices[count:]
    return pieces


@dataclass(frozen=True)
class CutBlocks:
    """The blocks of the KV cache that the layers after the cut hold for a request.

    Attributes:
        gaps: Columns of the request's unpruned block table without a block.
        drops: (end, number of dropped tokens) of each piece, if tokens are packed. The table is then shorter.
        items: Number of multimodal items of the request so far. A session of vLLM may add items.
    """

    gaps: frozenset[int] = frozenset()
    drops: tuple[tuple[int, int], ...] = ()
    items: int = 0

    @staticmethod
    def from_pieces(pieces: Sequence[VisualPiece], block: int | None, items: int) -> CutBlocks:
        """Return the blocks for pieces; see `count_kept` for `block`."""
        if block is None:
            return CutBlocks(drops=tuple((piece.end, piece.drop) for piece in pieces if piece.drop), items=items)
        return CutBlocks(
            frozenset(column for piece in pieces for column in _find_dropped_columns(piece, block)), items=items
        )

    def count_columns(self, tokens: int, block: int) -> int:
        """Return the number of columns of the table for `tokens` tokens of the prompt and answer."""
        return -(-(tokens - sum(count for end, count in self.drops if end <= tokens)) // block)

    def count_blocks(self, columns: Collection[int]) -> int:
        """Count the columns that hold a block."""
        return sum(column not in self.gaps for column in columns)


@dataclass(frozen=True)
class RequestStep:
    """The tokens of one request in a step: tokens `computed` to `end` of its prompt and answer.

    Attributes:
        computed: Number of tokens computed before.
        end: End of the step's tokens.
        prompt: Number of tokens of the prompt, if known.
    """

    computed: int
    end: int
    pieces: Sequence[VisualPiece]
    prompt: int | None = None

    @cached_property
    def cut_pieces(self) -> list[VisualPiece]:
        """The pieces that lose tokens in this step. Raises TokenPruneError if the step has only a part of a piece."""
        pieces = [piece for piece in self.pieces if piece.drop and piece.end > self.computed and piece.start < self.end]
        for piece in pieces:
            if piece.start < self.computed or piece.end > self.end:
                raise TokenPruneError(
                    f"Visual tokens {piece.start} to {piece.end} of a prompt were split over steps (tokens "
                    f"{self.computed} to {self.end}). Report this with the server's configuration."
                )
        return pieces

    @cached_property
    def past_pieces(self) -> list[VisualPiece]:
        """The pieces that lost tokens before this step."""
        return [piece for piece in self.pieces if piece.drop and piece.end <= self.computed]

    @property
    def num_before(self) -> int:
        """Number of tokens of this request in the layers after the cut, before this step."""
        return self.computed - sum(piece.drop for piece in self.past_pieces)

    @property
    def num_queries(self) -> int:
        """Number of the step's tokens that pass the layers after the cut."""
        return self.end - self.computed - sum(piece.drop for piece in self.cut_pieces)


@dataclass(frozen=True)
class StepLayout:
    """A step after the cut, with R requests and T tokens. All arrays are numpy arrays on the host.

    Attributes:
        lengths: Number of tokens of each request after the cut, including this step, shape (R,), int64.
        starts: Index of each request's first token, shape (R + 1,), int32.
        columns: Column in the unpruned block table for each column of the table after the cut, shape (R, W), int64.
        row: Request of each token, shape (T,), int64.
        column: Column after the cut of each token's block, shape (T,), int64.
        offset: Offset of each token in its block, shape (T,), int64.
    """

    lengths: np.ndarray
    starts: np.ndarray
    columns: np.ndarray
    row: np.ndarray
    column: np.ndarray
    offset: np.ndarray


def lay_out(steps: Sequence[RequestStep], width: int, block_size: int, aligned: bool) -> StepLayout:
    """Lay out a step after the cut.

    Args:
        steps: The tokens of each request in the step.
        width: Number of columns of the unpruned block table.
        block_size: Block size of the KV cache.
        aligned: Whether items lose complete blocks, which are removed from the table. If not, tokens are packed.
    """
    before = np.array([step.num_before for step in steps], dtype=np.int64)
    queries = np.array([step.num_queries for step in steps], dtype=np.int64)
    columns = np.tile(np.arange(width, dtype=np.int64), (len(steps), 1))
    if aligned:
        for request, step in enumerate(steps):
            for first, blocks in _find_dropped_blocks(itertools.chain(step.past_pieces, step.cut_pieces), block_size):
                columns[request, first:] += blocks
    ends = queries.cumsum()
    row = np.repeat(np.arange(len(steps)), queries)
    slot = np.arange(int(queries.sum())) - np.repeat(ends - queries, queries) + before[row]
    return StepLayout(
        before + queries,
        np.concatenate([[0], ends]).astype(np.int32),
        columns.clip(max=width - 1),
        row,
        slot // block_size,
        slot % block_size,
    )


def _find_dropped_blocks(pieces: itertools.chain[VisualPiece], block_size: int) -> list[tuple[int, int]]:
    """Return (first, count) of the blocks that each piece loses, relative to the table after the previous pieces."""
    blocks, shift = [], 0
    for piece in pieces:
        columns = _find_dropped_columns(piece, block_size)
        blocks.append((columns.start - shift, len(columns)))
        shift += len(columns)
    return blocks


def _find_dropped_columns(piece: VisualPiece, block_size: int) -> range:
    """Return the columns of the unpruned block table whose blocks a piece loses. They are within the piece."""
    first = piece.start // block_size + 1
    return range(first, first + piece.drop // block_size)
