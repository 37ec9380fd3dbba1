# SPDX-License-Identifier: Apache-2.0
"""Bipartite soft matching and ToMe's schedules, against a naive loop written from the paper."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from each import each
from tokenprune import Budget, BudgetError, OptionError
from tokenprune.kernels.merging import Merge, bipartite_match, max_merges
from tokenprune.methods.encoder.tome import ToMe
from tokenprune.selection.sites.encoder import Tower

SHAPES = [(1, 2, 0), (2, 7, 0), (2, 8, 0), (3, 7, 1), (2, 16, 1), (1, 17, 2), (2, 12, 5), (1, 3, 1)]
CASES = [(b, n, p, r) for b, n, p in SHAPES for r in sorted({1, 2, n // 3, n, 0})]


def naive(metric: Tensor, r: int, protected: int) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Return the members of each output token of one image, and (source, target) pairs by decreasing similarity."""
    n = len(metric)
    r = min(r, max(0, n - protected) // 2)
    pairs = []
    for a in range(0, n, 2):
        best, similarity = None, -math.inf
        for b in range(1, n, 2):
            cosine = float(metric[a] @ metric[b] / (metric[a].norm() * metric[b].norm()))
            if a >= protected and b >= protected and cosine > similarity:
                best, similarity = b, cosine
        pairs.append((similarity, a, best))
    pairs.sort(key=lambda pair: -pair[0])  # stable: ties keep their index order
    merged = [(a, b) for _, a, b in pairs[:r]]
    rest = [a for _, a, _ in pairs[r:]]
    if protected:
        rest = sorted(rest)
    order = list(range(protected)) + [a for a in rest if a >= protected] + [b for b in range(1, n, 2) if b >= protected]
    if r == 0:
        order = list(range(n))
    return [[token] + [a for a, b in merged if b == token] for token in order], merged


def draw_keys(b: int, n: int, seed: int = 0, width: int = 6) -> Tensor:
    return torch.randn(b, n, width, generator=torch.Generator().manual_seed(seed))


@each(("b", "n", "protected", "r"), CASES)
def test_matches_naive_loop(b: int, n: int, protected: int, r: int) -> None:
    keys, x = draw_keys(b, n), draw_keys(b, n, seed=1)
    size = torch.randint(1, 5, (b, n), generator=torch.Generator().manual_seed(2)).float()
    merge = bipartite_match(keys, r, protected)
    if min(r, max_merges(n, protected)) == 0:
        assert merge is None
        return
    assert merge.keep.shape == (b, n - min(r, (n - protected) // 2))
    got, sizes, assign = merge.mean(x, size), merge.sum(size), merge.assign
    for row in range(b):
        groups, merged = naive(keys[row], r, protected)
        for index, group in enumerate(groups):
            weight = size[row, group]
            want = (x[row, group] * weight[:, None]).sum(0) / weight.sum()
            torch.testing.assert_close(got[row, index], want)
            assert sizes[row, index] == weight.sum()
            assert (assign[row, group] == index).all()
        assert merge.source[row].tolist() == [a for a, _ in merged]
    # The weighted sum is preserved, and protected tokens are bit-equal at the same indices.
    torch.testing.assert_close((got * sizes[..., None]).sum(1), (x * size[..., None]).sum(1))
    assert torch.equal(got[:, :protected], x[:, :protected])
    assert torch.equal(assign[:, :protected], torch.arange(protected).expand(b, -1))


def test_unmerge_restores_members() -> None:
    x, size = draw_keys(2, 11, seed=1), torch.ones(2, 11)
    merge = bipartite_match(draw_keys(2, 11), 3)
    back = merge.unmerge(merge.mean(x, size))
    for row in range(2):
        touched = set()
        for source, target in zip(merge.source[row].tolist(), merge.target[row].tolist(), strict=True):
            partner = int(merge.keep[row, target])
            assert torch.equal(back[row, source], back[row, partner])
            touched |= {source, partner}
        others = [token for token in range(11) if token not in touched]
        assert others and torch.equal(back[row, others], x[row, others])


def test_duplicates_merge_first_and_ties_use_lower_index() -> None:
    keys = draw_keys(1, 12)
    keys[0, 6] = keys[0, 9]
    keys[0, 4] = keys[0, 5]
    merge = bipartite_match(keys, 2, 1)
    assert merge.source.tolist() == [[4, 6]]
    assert merge.keep.gather(1, merge.target).tolist() == [[5, 9]]
    same = bipartite_match(torch.ones(1, 9, 4), 3)
    assert same.source.tolist() == [[0, 2, 4]]
    assert same.keep.gather(1, same.target).tolist() == [[1, 1, 1]]


def test_equal_pairs_merge_in_index_order() -> None:
    """All pairs are duplicates, but rounding makes their cosines differ slightly from 1."""
    keys = draw_keys(2, 200, width=72).repeat_interleave(2, dim=1)
    merge = bipartite_match(keys, 150)
    assert merge.source.tolist() == [list(range(0, 300, 2))] * 2
    assert torch.equal(merge.keep.gather(1, merge.target), merge.source + 1)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_zero_keys_are_similar_to_nothing(bad: float) -> None:
    keys = draw_keys(1, 8)
    keys[0, [2, 5]] = bad
    merge = bipartite_match(keys, 2)
    assert isinstance(merge, Merge)
    assert merge.mean(draw_keys(1, 8), torch.ones(1, 8)).isfinite().all()
    assert torch.equal(merge.assign.sort(1).values.unique(), torch.arange(6))
    if bad:
        assert 2 not in merge.source


def test_half_precision_keys_and_features() -> None:
    keys = draw_keys(2, 10)
    merge = bipartite_match(keys.bfloat16(), 3, 1)
    assert torch.equal(merge.assign, bipartite_match(keys.bfloat16().float(), 3, 1).assign)
    assert merge.mean(keys.bfloat16(), torch.ones(2, 10)).dtype == torch.bfloat16


# -- schedules


def schedule(
    r: object = None, keep: float | int = 0.25, count: int = 577, blocks: int = 24, read: int = 23
) -> list[int]:
    return ToMe(r=r).schedule(Budget.from_number(keep), Tower(count, 1, blocks, read))


def test_r_as_int_list_and_slope() -> None:
    assert schedule(16) == [16] * 23 + [0]
    # DyMU's table 2: 94, 209 and 393 tokens, including the class token.
    assert [577 - sum(schedule(r)) for r in (21, 16, 8)] == [94, 209, 393]
    assert schedule([5, 0, 7], blocks=5, read=5) == [5, 0, 7, 0, 0]
    down = schedule((8, -1), blocks=24, read=24)
    assert (down[0], down[-1]) == (16, 0)
    assert abs(sum(down) - 8 * 24) <= 24
    assert down == sorted(down, reverse=True)
    up = schedule((8, 1), read=24)
    assert (up[0], up[-1]) == (0, 16)
    assert schedule((8, 0)) == schedule(8)
    # No block merges more than half of its input tokens.
    assert schedule(100, count=37, blocks=3, read=3) == [18, 9, 4]


@each("keep", [0.9, 0.5, 0.25, 0.11, 0.04, 1, 64, 577])
def test_keep_uses_smallest_constant_r(keep: float | int) -> None:
    plan = schedule(keep=keep)
    num_kept = Budget.from_number(keep).resolve([576], layer=0, shape=None, text_tokens=0)[0]
    assert 577 - sum(plan) == num_kept + 1
    assert len(plan) == 24 and plan[-1] == 0
    assert plan == sorted(plan, reverse=True)
    # One merge less per block leaves too many tokens.
    assert plan[0] == 0 or sum(schedule(plan[0] - 1)) < sum(plan)


def test_unreachable_keep_is_rejected() -> None:
    with pytest.raises(BudgetError, match="at most half"):
        schedule(keep=0.1, count=37, blocks=3, read=2)
    assert sum(schedule(keep=0.25, count=37, blocks=3, read=2)) == 27


def test_r_list_longer_than_tower_is_rejected() -> None:
    with pytest.raises(OptionError, match="the tower has 2 blocks"):
        schedule([1, 1, 1], blocks=2, read=2)
