# SPDX-License-Identifier: Apache-2.0
"""Base classes of observables that read decoder attention or the vision tower.

Shapes use S segments of up to N visual tokens, M text tokens, H heads, D features, and B rows of W slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch

from tokenprune.kernels.host_random import uniform
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.observable import Backend, Input, Observable, ObservedAt

if TYPE_CHECKING:
    from torch import Tensor

    from tokenprune.models.families import Family
    from tokenprune.selection.segments import ObservedAttention, Segments, Sizes, TextView
    from tokenprune.selection.source import TokenSource

_MAX_ELEMENTS = 2**24  # size of a chunk of the attention map


class AttentionToTokens(Observable):
    """Base class of the attention to each token in a decoder layer, by head.

    Examples:
        >>> class FirstRow(AttentionToTokens):
        ...     where = ObservedAt.LAYER_BEFORE
        ...     def read_columns(self, source):
        ...         first = torch.zeros(len(source.hidden), 1, dtype=torch.long)
        ...         return source.attention_before.rows(first)[:, :, 0, -source.width :]
    """

    axes = "SHN"
    needs_full_prompt = True

    def read_columns(self, source: TokenSource) -> Tensor:
        """Return the attention to each slot at the cut, shape (B, H, W), float32."""
        raise NotImplementedError(f"{type(self).__name__} does not implement read_columns()")

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        columns = self.read_columns(source)
        if segments.row != list(range(len(columns))):
            columns = columns[segments.row_index.squeeze(1)]
        slots = source.find_slots(segments.position, segments)
        return columns.gather(2, slots[:, None, :].expand(-1, columns.shape[1], -1))

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return uniform(sizes.segments, sizes.heads, sizes.tokens, generator=generator)


def add_up(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum of an iterable of tensors without holding more than one of them."""
    return reduce(torch.add, parts)


class AttentionFromText(Observable):
    """Base class of the attention that the text after an image pays in a decoder layer, by head."""

    axes = "SHMN"
    needs_full_prompt = True

    def get_attention(self, source: TokenSource) -> ObservedAttention:
        """Return the observed attention of the layer."""
        raise NotImplementedError(f"{type(self).__name__} does not implement get_attention()")

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        position, mask = source.find_text_after(segments)
        attention = self._compute_text_attention(source, segments, position, segments.position)
        return attention.mul_((mask[:, None, :, None] & segments.mask[:, None, None, :]).float())

    def compute_text(self, source: TokenSource, text: TextView) -> Tensor:
        """Return the attention from text to text, shape (S, H, M, M), float32. Padding is 0."""
        attention = self._compute_text_attention(source, text.segments, text.position, text.position)
        return attention.mul_((text.mask[:, None, :, None] & text.mask[:, None, None, :]).float())

    def sum_rows(self, source: TokenSource, text: TextView, weights: Tensor) -> Tensor:
        """Return the weighted sum of the text rows, shape (S, H, N), float32.

        Args:
            source: Source of the engine.
            text: Text after each segment.
            weights: Weight of each text token, shape (S, M) or (S, H, M).
        """
        weights = weights.float().masked_fill(~(text.mask if weights.ndim == 2 else text.mask[:, None]), 0)
        weights = weights.unsqueeze(1) if weights.ndim == 2 else weights
        parts = self._text_rows(source, text.segments, text.position, text.segments.position)
        total = add_up((rows * weights[..., part, None]).sum(2) for rows, part in parts)
        return total.masked_fill(~text.segments.mask[:, None], 0) if text.segments.has_padding else total

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return uniform(sizes.segments, sizes.heads, sizes.text, sizes.tokens, generator=generator)

    def text_example(self, sizes: Sizes, generator: torch.Generator) -> Any:
        return uniform(sizes.segments, sizes.heads, sizes.text, sizes.text, generator=generator)

    def _compute_text_attention(self, source: TokenSource, segments: Segments, position: Tensor, to: Tensor) -> Tensor:
        """Return the attention from the text at `position` (S, M) to the tokens at `to` (S, K), shape (S, H, M, K)."""
        return torch.cat([rows for rows, _ in self._text_rows(source, segments, position, to)], dim=2)

    def _text_rows(
        self, source: TokenSource, segments: Segments, position: Tensor, to: Tensor
    ) -> Iterator[tuple[Tensor, slice]]:
        """Yield the attention from text tokens in chunks, to bound the memory.

        The images of a row share its text. Each text row is computed once, and each image gathers its columns from it.
        If one chunk holds all rows, `source.text_rows` caches it for other observables.

        Args:
            source: Source of the engine.
            segments: Segments of the visual tokens.
            position: Positions of the text tokens, shape (S, M). See `TokenSource.find_text_after`.
            to: Positions of the tokens that receive the attention, shape (S, K).

        Yields:
            Attention of shape (S, H, R, K), and the slice of the R text tokens.
        """
        attention, device = self.get_attention(source), position.device
        batch, heads = attention.query.shape[:2]
        width, max_segments = source.width, max(segments.ordinal) + 1
        text_slots, columns = source.find_slots(position, segments), source.find_slots(to, segments)
        one_per_row = segments.row == list(range(batch))
        if not one_per_row:
            row, ordinal = to_device(segments.row, device), to_device(segments.ordinal, device)
            first = to_device([index for index, ordinal in enumerate(segments.ordinal) if ordinal == 0], device)
            per_row = text_slots.new_zeros(batch, text_slots.shape[1])
            text_slots = per_row.index_copy(0, row[first], text_slots[first])
            per_segment = columns.new_zeros(batch, max_segments, columns.shape[1])
            columns = per_segment.index_put((row, ordinal), columns).flatten(1)
        step = max(1, _MAX_ELEMENTS // max(1, batch * heads * max(width, columns.shape[1])))
        for start in range(0, text_slots.shape[1], step):
            part = slice(start, start + step)
            rows = source.text_rows.get(self.name)
            if rows is None:
                rows = attention.rows(text_slots if step >= text_slots.shape[1] else text_slots[:, part])
                rows = rows[..., -width:] if rows.shape[-1] > width else rows
                if step >= text_slots.shape[1]:
                    source.text_rows[self.name] = rows
            if len(columns) == 1:
                gathered = rows.index_select(3, columns[0])
            else:
                gathered = rows.gather(3, columns[:, None, None].expand(*rows.shape[:3], -1))
            yield gathered if one_per_row else gathered.unflatten(3, (max_segments, -1))[row, :, :, ordinal], part

    def _rows(self, source: TokenSource, segments: Segments, position: Tensor) -> Iterator[tuple[Tensor, slice]]:
        """Yield the attention of the tokens at `position` to all slots, (S, H, R, W), and the slice of the R tokens."""
        attention = self.get_attention(source)
        slots, device = source.find_slots(position, segments), position.device
        batch, heads, width = attention.query.shape[0], attention.query.shape[1], attention.key.shape[2]
        max_segments = max(segments.ordinal) + 1  # the segments of a row are computed side by side
        row, ordinal = to_device(segments.row, device), to_device(segments.ordinal, device)
        step = max(1, _MAX_ELEMENTS // max(1, batch * heads * max_segments * width))
        for start in range(0, slots.shape[1], step):
            part = slice(start, start + step)
            chunk = slots[:, part]
            if segments.row == list(range(batch)):
                yield attention.rows(chunk)[..., -source.width :], part
                continue
            index = chunk.new_zeros(batch, max_segments, chunk.shape[1]).index_put((row, ordinal), chunk)
            rows = attention.rows(index.flatten(1)).unflatten(2, (max_segments, -1))
            yield rows[row, :, ordinal][..., -source.width :], part


class TowerBlock(Observable):
    """Base class of observables that read the attention of a vision tower block for each patch.

    A token made of several patches gets their mean, in float32. Tokens without a patch (newlines, a class token) get 0.

    Examples:
        >>> class KeyNorm(TowerBlock):
        ...     def compute_per_patch(self, attention, protected):
        ...         return attention.key[:, :, protected:].norm(dim=-1)
    """

    where = ObservedAt.TOWER_BLOCK
    backends = frozenset({Backend.HF, Backend.VLLM})
    by_layer = True

    def compute_per_patch(self, attention: ObservedAttention, protected: int) -> Tensor:
        """Return the value of each patch, shape (rows, H, patches) or (rows, H, patches, Dh).

        Args:
            attention: Queries and keys of the block.
            protected: Number of class tokens before the patches of each row. The result excludes them.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement compute_per_patch()")

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        """Return the value of each visual token, shape (S, N, C), float32."""
        return source.read_tower((self.name, *layer), segments)


class TowerOutput(Observable):
    """Base class of observables that read the output of the vision tower, as the projector receives it."""

    where = ObservedAt.TOWER

    def compute_from_features(self, features: Tensor, protected: int) -> Tensor:
        """Return the value of each patch, shape (rows, patches, C).

        Args:
            features: Output of the tower, shape (rows, tokens, Dv).
            protected: Number of class tokens before the patches of each row. The result excludes them.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement compute_from_features()")

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        """Return the value of each visual token, shape (S, N, C), float32.

        A token made of several patches gets their mean. Tokens without a patch get 0.
        """
        return source.read_tower((self.name,), segments)


class TowerInput(Observable):
    """Base class of observables that read the pixel colors of each token.

    They support towers that pack the patches of all images, and need the processor of the model to undo its
    normalization.
    """

    where = ObservedAt.TOWER

    def find_obstacle(self, row: Family) -> str | None:
        is_packed = row.tower_rows == "all images" and row.patches == "runs"
        return None if is_packed else "pixels that are packed token by token"

    from_input = Input.PIXELS

    def compute_from_colors(self, colors: Tensor) -> Tensor:
        """Return the value of each token, shape (tokens, C), float32.

        Args:
            colors: Colors in [0, 1], shape (tokens, patches, channels, P), float32.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement compute_from_colors()")

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        """Return the value of each visual token, shape (S, N, C), float32. Padding is 0."""
        return source.read_tower((self.name,), segments)


class TowerScores(TowerBlock):
    """Base class of scores of patches by head, shape (S, H, N)."""

    axes = "SHN"

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        return super().compute_visual(source, segments, *layer).transpose(1, 2)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return uniform(sizes.segments, sizes.heads, sizes.tokens, generator=generator)
