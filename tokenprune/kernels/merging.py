# SPDX-License-Identifier: Apache-2.0
"""Bipartite soft matching of tokens. A merge is computed once and applied to features, sizes and attention.

Source:
    Bolya et al., "Token Merging: Your ViT But Faster" (arXiv 2210.09461), section 3 and appendix D.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.join import join
from tokenprune.kernels.match import best_match
from tokenprune.kernels.pairing import as_sources, pairing
from tokenprune.kernels.transfer import to_device

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Merge:
    """A merge of B rows of n tokens into m tokens. In each row, r source tokens join target tokens.

    Rows may keep different numbers of tokens. Then `num_kept` and `num_merged` hold the numbers per row, and the
    remaining entries of `keep`, `source` and `target` are arbitrary padding. Padding of the output follows its tokens
    and has size 0.

    Args:
        keep: Kept tokens in the order of the output, long `[B, m]`.
        source: Tokens that join others, long `[B, r]`.
        target: Output index of the token that each source joins, long `[B, r]`.
        num_tokens: Number of input tokens n.
        num_kept: Number of kept tokens per row, if rows differ.
        num_merged: Number of sources per row, long `[B]`, if rows differ.
        is_drop: Tokens that are neither kept nor sources are dropped. Otherwise, every token is kept or a source.

    Examples:
        >>> x = torch.tensor([[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.0, 2.0]]])
        >>> merge = bipartite_match(x, r=1)
        >>> merge.mean(x, torch.ones(1, 4)).shape
        torch.Size([1, 3, 2])
    """

    keep: Tensor
    source: Tensor
    target: Tensor
    num_tokens: int
    num_kept: list[int] | None = None
    num_merged: Tensor | None = None
    is_drop: bool = False

    @staticmethod
    def from_kept(is_kept: Tensor, num_kept: list[int]) -> Merge:
        """Create a merge that drops all tokens outside of `is_kept` and keeps the order of the others.

        Args:
            is_kept: Kept tokens, bool `[B, n]`.
            num_kept: Number of kept tokens per row.
        """
        keep = (~is_kept).to(torch.uint8).argsort(dim=1, stable=True)[:, : max(num_kept)]
        no_sources = keep[:, :0]
        return Merge(keep, no_sources, no_sources, is_kept.shape[1], num_kept, is_drop=True)

    @cached_property
    def assign(self) -> Tensor:
        """Output index of each token, long `[B, n]`; -1 if it is dropped, arbitrary at padding."""
        rows, width = self.keep.shape
        output_index = torch.arange(width, device=self.keep.device).expand_as(self.keep)
        if self.is_drop:
            masked_index = output_index if self._padding is None else output_index.masked_fill(self._padding, -1)
            return self.keep.new_full((rows, self.num_tokens), -1).scatter(1, self.keep, masked_index)
        source, target = self._moves
        # The extra last entry receives padding. Boolean indexing would synchronize with the device.
        index = self.keep.new_zeros(rows * self.num_tokens + 1).index_copy_(0, self._flat_keep, output_index.flatten())
        if self.num_merged is not None:
            source = source.masked_fill(target == rows * width, rows * self.num_tokens)
        return index.index_copy_(0, source, self.target.flatten())[:-1].view(rows, self.num_tokens)

    def sum(self, x: Tensor) -> Tensor:
        """Sum values over the members of each output token, `[B, n]` -> `[B, m]`. Padding is 0."""
        source, target = self._moves
        kept_values = x.gather(1, self.keep)
        if self._padding is not None:
            kept_values = kept_values.masked_fill(self._padding, 0)
        total = kept_values.flatten()
        if self.num_merged is not None:
            total = torch.cat([total, total.new_zeros(1)])
        return total.index_add(0, target, x.flatten()[source])[: kept_values.numel()].view_as(kept_values)

    def mean(self, x: Tensor, size: Tensor | None) -> Tensor:
        """Average tokens over the members of each output token in float32, `[B, n, D]` -> `[B, m, D]`.

        Args:
            x: Tokens, `[B, n, D]`.
            size: Weight of each token, `[B, n]`. None if the merge only drops tokens. Tokens without sources are
                copied.
        """
        if size is None:
            return x.flatten(0, 1)[self._flat_keep].view(*self.keep.shape, -1)
        weight, (source, target) = size.flatten(), self._moves
        mean = join(x.flatten(0, 1), self._flat_keep, weight[self._flat_keep], source, target, weight[source])
        return mean.view(*self.keep.shape, -1)

    def unmerge(self, x: Tensor) -> Tensor:
        """Copy each output token to its members, `[B, m, D]` -> `[B, n, D]`."""
        return x.gather(1, self.assign.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

    @cached_property
    def _flat_keep(self) -> Tensor:
        """`keep` as indices into flattened rows."""
        return _flatten_index(self.keep, self.num_tokens)

    @cached_property
    def _moves(self) -> tuple[Tensor, Tensor]:
        """`source` and `target` as indices into flattened rows. Padding has the target `B * m`."""
        source, target = _flatten_index(self.source, self.num_tokens), _flatten_index(self.target, self.keep.shape[1])
        if self.num_merged is None:
            return source, target
        valid = (torch.arange(self.source.shape[1], device=source.device) < self.num_merged[:, None]).flatten()
        return source, torch.where(valid, target, self.keep.numel())

    @cached_property
    def _padding(self) -> Tensor | None:
        """Padding of the output, bool `[B, m]`. None without padding."""
        width = self.keep.shape[1]
        if self.num_kept is None or min(self.num_kept) == width:
            return None
        device = self.keep.device
        return torch.arange(width, device=device) >= to_device(self.num_kept, device)[:, None]


def _flatten_index(index: Tensor, count: int) -> Tensor:
    """Convert indices into rows of `count` tokens to indices into flattened rows, `[B, k]` -> `[B * k]`."""
    if len(index) > 1:
        index = index.add(torch.arange(len(index), device=index.device)[:, None], alpha=count)
    return index.flatten()


def max_merges(count: int, protected: int = 0) -> int:
    """Return the maximum number of `count` tokens that one bipartite step can merge."""
    return max(0, (count - protected) // 2)


def best_partners(metric: Tensor, protected: int = 0, counts: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Find the most similar token at an odd index (set B) for each token at an even index (set A).

    Cosines are computed in float32. Ties go to the lower index. A zero or non-finite vector is less similar than all
    others.

    Args:
        metric: `[B, n, D]`.
        protected: Number of leading tokens (class, registers) that are neither sources nor targets.
        counts: Number of valid tokens per row; the others are padding. None if all are valid.

    Returns:
        Similarities in steps of `TIE`, float32 `[B, ceil(n/2)]`, -inf for tokens that cannot be sources; and indices of
        partners in set B, long.
    """
    valid = None if counts is None else to_device(counts, metric.device)
    allowed = None
    if valid is not None or protected > 1:  # a single protected token is in A and does not restrict B
        index = 2 * torch.arange(metric.shape[1] // 2, device=metric.device).expand(len(metric), -1) + 1
        allowed = index >= protected
        if valid is not None:
            allowed = allowed & (index < valid[:, None])
    return as_sources(*best_match(metric[:, ::2], metric[:, 1::2], allowed), protected, valid)


def bipartite_match(metric: Tensor, r: int, protected: int = 0) -> Merge | None:
    """Merge the `r` most similar pairs of a token at an even index (set A) and a token at an odd index (set B).

    The output holds the protected tokens, the rest of A, then B. This order mixes tokens, so that the next step
    compares others. The rest of A is in order of index if there are protected tokens, and in order of similarity
    otherwise.

    Args:
        metric: `[B, n, D]`.
        r: Number of pairs, limited to half of the unprotected tokens.
        protected: Number of leading tokens that are neither sources nor targets.

    Returns:
        The merge, or None if it would merge no token.
    """
    count = metric.shape[1]
    r = min(r, max_merges(count, protected))
    if r <= 0:
        return None
    best, partner = best_partners(metric, protected)
    rows = len(metric)
    keep, source, target = pairing(best, partner, [r] * rows, [count] * rows, protected, protected > 0)
    return Merge(keep, source, target, count)


def threshold_match(
    metric: Tensor,
    counts: list[int] | None,
    *,
    threshold: float,
    protected: int = 0,
    limit: int | None = None,
    floor: int = 0,
    ceiling: int | None = None,
) -> Merge | None:
    """Merge the pairs with a similarity above `threshold`, at most half of the unprotected tokens of each row.

    Args:
        metric: `[B, n, D]`.
        counts: Number of valid tokens per row. None if all are valid.
        threshold: Minimum cosine of a merged pair (exclusive).
        protected: Number of leading tokens that are neither sources nor targets.
        limit: Maximum number of merged pairs per row.
        floor: Minimum number of remaining tokens per row.
        ceiling: Maximum number of remaining tokens per row. The best pairs below the threshold merge too if needed.

    Returns:
        The merge, or None if it would merge no token.
    """
    best, partner = best_partners(metric, protected, counts)
    counts = counts or [metric.shape[1]] * len(metric)
    merged = []
    for count, above in zip(counts, (best > threshold).sum(dim=1).tolist(), strict=True):
        cap = max_merges(count, protected) if limit is None else min(limit, max_merges(count, protected))
        least = 0 if ceiling is None else count - ceiling
        merged.append(min(max(above, least), cap, max(0, count - floor)))
    return ragged_merge(best, partner, merged, protected, counts)


def ragged_merge(best: Tensor, partner: Tensor, r: list[int], protected: int, counts: list[int]) -> Merge | None:
    """Merge the `r[row]` best pairs of each row.

    The output holds the protected tokens, the rest of A, then B, each in order of index, then padding. A row without
    merges keeps its order.

    Args:
        best: Similarities from `best_partners`.
        partner: Partners from `best_partners`.
        r: Number of merged pairs per row.
        protected: Number of leading tokens that are neither sources nor targets.
        counts: Number of valid tokens per row.

    Returns:
        The merge, or None if it would merge no token.
    """
    if not any(r):
        return None
    num_kept = [count - merged for count, merged in zip(counts, r, strict=True)]
    ragged = min(r) < max(r)
    on_device = None
    if ragged or min(counts) < max(counts):
        on_device = to_device(r, best.device), to_device(counts, best.device)
    keep, source, target = pairing(best, partner, r, counts, protected, on_device=on_device)
    return Merge(keep, source, target, max(counts), num_kept, on_device[0] if on_device and ragged else None)
