# SPDX-License-Identifier: Apache-2.0
"""Attention of a prompt that consists of a sink, context blocks and a tail.

The block id of a token names its part: PADDING, SINK, 1 to n for context blocks, or TAIL. Each context block attends to
the sink and to itself, and the tail attends to everything, all causally. The parts of a row are contiguous and in this
order. Padding is at the ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

PADDING, SINK, TAIL = -1, 0, 2**31
_QUERIES = 1024  # queries per call: without a kernel for bottom-right causality, PyTorch builds a mask of this height


@dataclass(frozen=True)
class Parts:
    """Lengths of the parts of a row, in order.

    Args:
        before: Padding tokens before the sink.
        sink: Tokens of the sink.
        blocks: Tokens of each context block.
        tail: Tokens of the tail.
        after: Padding tokens after the tail.

    Examples:
        >>> Parts.from_ids(torch.tensor([PADDING, SINK, SINK, 1, 1, 1, 2, 2, 2, TAIL]))
        Parts(before=1, sink=2, blocks=(3, 3), tail=1, after=0)
    """

    before: int
    sink: int
    blocks: tuple[int, ...]
    tail: int
    after: int

    @staticmethod
    def from_ids(ids: Tensor) -> Parts:
        """Create the parts of a row from its block ids (long `[L]`, on the CPU)."""
        values, counts = (x.tolist() for x in torch.unique_consecutive(ids, return_counts=True))
        runs = list(zip(values, counts, strict=True))
        before = runs.pop(0)[1] if runs and runs[0][0] == PADDING else 0
        after = runs.pop()[1] if runs and runs[-1][0] == PADDING else 0
        blocks = tuple(count for value, count in runs if SINK < value < TAIL)
        return Parts(before, dict(runs).get(SINK, 0), blocks, dict(runs).get(TAIL, 0), after)

    @property
    def pairs(self) -> int:
        """Number of query-key pairs that attention computes."""
        context = sum(self.sink * size + _count_causal_pairs(size) for size in self.blocks)
        return (
            _count_causal_pairs(self.sink)
            + context
            + self.tail * (self.sink + sum(self.blocks))
            + _count_causal_pairs(self.tail)
        )


def _count_causal_pairs(count: int) -> int:
    return count * (count + 1) // 2


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, parts: Parts, scale: float, dropout: float = 0.0
) -> Tensor:
    """Compute attention for rows with the same parts.

    Neighboring blocks of equal size form a batch, each with a copy of the sink. No mask is larger than `_QUERIES` by
    the number of keys.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, Hkv, L, D]`.
        value: `[B, Hkv, L, Dv]`.
        parts: Parts of every row.
        scale: Factor of the logits.
        dropout: Dropout probability of the attention weights.

    Returns:
        `[B, H, L, Dv]`, zeros at padding.
    """
    width = value.shape[-1]
    pieces = [query.new_zeros(*query.shape[:2], parts.before, width)]
    start = parts.before
    sink = slice(start, start + parts.sink)
    pieces += _compute_causal_attention(query[:, :, sink], key[:, :, sink], value[:, :, sink], scale, dropout)
    start += parts.sink
    for size, run in groupby(parts.blocks):
        count = len(list(run))
        block_slice = slice(start, start + count * size)
        queries, keys, values = (_split(x[:, :, block_slice], count) for x in (query, key, value))
        keys, values = (
            torch.cat([x[:, :, sink].repeat_interleave(count, 0), blocks], 2)
            for x, blocks in ((key, keys), (value, values))
        )
        output = torch.cat(_compute_causal_attention(queries, keys, values, scale, dropout), 2)
        pieces.append(output.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3))
        start += count * size
    tail, valid_slice = slice(start, start + parts.tail), slice(parts.before, start + parts.tail)
    pieces += _compute_causal_attention(
        query[:, :, tail], key[:, :, valid_slice], value[:, :, valid_slice], scale, dropout
    )
    pieces.append(query.new_zeros(*query.shape[:2], parts.after, width))
    return torch.cat(pieces, 2)


def _split(x: Tensor, count: int) -> Tensor:
    """Reshape `[B, H, count * N, D]` to `[B * count, H, N, D]`."""
    return x.unflatten(2, (count, -1)).transpose(1, 2).flatten(0, 1)


def _compute_causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> list[Tensor]:
    """Compute causal attention of the last tokens of a sequence, at most `_QUERIES` queries per call."""
    count, before = query.shape[2], key.shape[2] - query.shape[2]
    outputs = []
    for start in range(0, count, _QUERIES):
        end = min(count, start + _QUERIES)
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, start:end],
                key[:, :, : before + end],
                value[:, :, : before + end],
                # is_causal=True would align the causal mask at the top left.
                attn_mask=causal_lower_right(end - start, before + end),
                dropout_p=dropout,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return outputs
