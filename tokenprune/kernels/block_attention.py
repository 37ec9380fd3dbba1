# SPDX-License-Identifier: Apache-2.0
"""Attention of a prompt that is a sink, context blocks and a tail: each block attends to the sink and to itself.

A token's block id says which part it belongs to: PADDING, SINK, 1 to n for the context blocks, or TAIL, which attends
to everything. The parts of a row stand in this order, without gaps; padding is at its ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

PADDING, SINK, TAIL = -1, 0, 2**31
_QUERIES = 1024  # of one call: where no kernel knows bottom-right causality, a mask of this many rows is made


@dataclass(frozen=True)
class Parts:
    """Lengths of the parts of a row, in order; before, after: padding."""

    before: int
    sink: int
    blocks: tuple[int, ...]
    tail: int
    after: int

    @staticmethod
    def from_ids(ids: Tensor) -> Parts:
        """Read the parts of a row from its block ids (long `[L]`, on the CPU)."""
        values, counts = (x.tolist() for x in torch.unique_consecutive(ids, return_counts=True))
        runs = list(zip(values, counts, strict=True))
        before = runs.pop(0)[1] if runs and runs[0][0] == PADDING else 0
        after = runs.pop()[1] if runs and runs[-1][0] == PADDING else 0
        blocks = tuple(count for value, count in runs if SINK < value < TAIL)
        return Parts(before, dict(runs).get(SINK, 0), blocks, dict(runs).get(TAIL, 0), after)

    @property
    def pairs(self) -> int:
        """Pairs of query and key whose score is needed."""
        context = sum(self.sink * size + _causal(size) for size in self.blocks)
        return _causal(self.sink) + context + self.tail * (self.sink + sum(self.blocks)) + _causal(self.tail)


def _causal(count: int) -> int:
    return count * (count + 1) // 2


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, parts: Parts, scale: float, dropout: float = 0.0
) -> Tensor:
    """Return the output of rows that have the same parts, `[B, H, L, Dv]`, zeros at padding.

    query: `[B, H, L, D]`; key: `[B, Hkv, L, D]`; value: `[B, Hkv, L, Dv]`. Neighbouring blocks of one size are a batch,
    each with a copy of the sink; no mask is larger than a number of queries by all keys.
    """
    width = value.shape[-1]
    pieces = [query.new_zeros(*query.shape[:2], parts.before, width)]
    start = parts.before
    sink = slice(start, start + parts.sink)
    pieces += _causal_attention(query[:, :, sink], key[:, :, sink], value[:, :, sink], scale, dropout)
    start += parts.sink
    for size, run in groupby(parts.blocks):
        count = len(list(run))
        own = slice(start, start + count * size)
        queries, keys, values = (_split(x[:, :, own], count) for x in (query, key, value))
        keys, values = (
            torch.cat([x[:, :, sink].repeat_interleave(count, 0), blocks], 2)
            for x, blocks in ((key, keys), (value, values))
        )
        output = torch.cat(_causal_attention(queries, keys, values, scale, dropout), 2)
        pieces.append(output.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3))
        start += count * size
    tail, whole = slice(start, start + parts.tail), slice(parts.before, start + parts.tail)
    pieces += _causal_attention(query[:, :, tail], key[:, :, whole], value[:, :, whole], scale, dropout)
    pieces.append(query.new_zeros(*query.shape[:2], parts.after, width))
    return torch.cat(pieces, 2)


def _split(x: Tensor, count: int) -> Tensor:
    """`[B, H, count * N, D]` -> `[B * count, H, N, D]`."""
    return x.unflatten(2, (count, -1)).transpose(1, 2).flatten(0, 1)


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> list[Tensor]:
    """Causal attention of the last tokens of a sequence, in pieces of `_QUERIES` of them."""
    count, before = query.shape[2], key.shape[2] - query.shape[2]
    outputs = []
    for start in range(0, count, _QUERIES):
        end = min(count, start + _QUERIES)
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, start:end],
                key[:, :, : before + end],
                value[:, :, : before + end],
                # Flash attention aligns this bias by itself; a plain is_causal would align it at the top left.
                attn_mask=causal_lower_right(end - start, before + end),
                dropout_p=dropout,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return outputs
