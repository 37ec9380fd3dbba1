# SPDX-License-Identifier: Apache-2.0
"""llava_scissor against naive loops, on a static background with a moving object."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from each import each
from tests.unit.methods.naive.llava_scissor import connected, naive
from tokenprune.kernels import clusters as kernels
from tokenprune.kernels.clusters import SimilarPairs, connected_components
from tokenprune.kernels.pairs import normalize
from tokenprune.methods.video import llava_scissor as scissor
from videos import compare, given, moving, select, shares_of


# Small videos, because the naive loops are slow.
@each("cut", [None, 2])
@each(("keep", "noise"), [(1, 0.15), (6, 0.15), (14, 0.15), (44, 0.15), (20, 0.01), (38, 0.01)])
def test_matches_naive_loop(keep: int, noise: float, cut: int | None) -> None:
    """With little noise, the number of components jumps, and many tokens need an exact correction."""
    video, other = moving(5, 3, 3, seed=1, cut=cut, noise=noise), moving(1, 2, 3, seed=2)
    selection = select("llava_scissor", given([video, other], [keep, 3], [(3, 3), (2, 3)]))
    for row, (part, k) in enumerate(((video, keep), (other, 3))):
        count = part.shape[0] * part.shape[1]
        got = {target: set(group) for target, group in shares_of(selection, row, count).items()}
        assert got == {target: set(group) for target, group in naive(part, None, k).items()}


@pytest.mark.parametrize("threshold", [-1.0, 0.3, 0.9, 1.0])
def test_threshold_decides_count(threshold: float) -> None:
    """At 1 no tokens are connected; below the smallest cosine all tokens are."""
    video = moving(4, 3, 3, seed=3, cut=2, noise=0.1)
    method = tokenprune.method("llava_scissor", exact=False, threshold=threshold)
    selection = method.select(given([video], [9], [(3, 3)]))
    groups = shares_of(selection, 0, 36)
    assert {target: set(group) for target, group in groups.items()} == {
        target: set(group) for target, group in naive(video, None, 0, threshold=threshold).items()
    }
    assert len(groups) == {-1.0: 1, 1.0: 36}.get(threshold, len(groups)) and selection.counts is None
    assert method.chooses_count and not tokenprune.method("llava_scissor").chooses_count


def test_batch_matches_single_videos() -> None:
    def select_single(video: Tensor, attention: Tensor, keep: int, grid: Any) -> dict[int, dict]:
        return shares_of(select("llava_scissor", given([video], [keep], [grid])), 0, video.shape[0] * video.shape[1])

    compare("llava_scissor", select_single, 0.3, None, newline=True)
    compare("llava_scissor", select_single, 0.6, 3, newline=False)


def test_static_video_becomes_one_frame() -> None:
    frame = moving(1, 3, 3, noise=0.0)
    groups = shares_of(select("llava_scissor", given([frame.repeat(4, 1, 1)], [9], [(3, 3)])), 0, 36)
    assert sorted(map(sorted, groups.values())) == [[p, p + 9, p + 18, p + 27] for p in range(9)]


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.8])
def test_components_match_search(threshold: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a table of all pairs, in chunks of rows, and for several graphs at once."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2, 40, 4, generator=g)
    want = []
    for row in x:
        label = [0] * 40
        for component in connected(row.tolist(), threshold):
            for i in component:
                label[i] = component[0]
        want.append(label)
    direction = normalize(x)
    is_similar = (direction @ direction.transpose(1, 2)).clamp(max=1) > threshold
    assert connected_components(is_similar).tolist() == want
    assert connected_components(direction[0], threshold).tolist() == want[0]
    monkeypatch.setattr(kernels, "_MAX_ELEMENTS", 100)
    assert connected_components(direction[1], threshold).tolist() == want[1]
    monkeypatch.setattr(kernels, "_MIN_COLUMNS", 5)
    assert connected_components(direction[1], threshold).tolist() == want[1]
    # The longest possible chain.
    index = torch.arange(33)
    assert not connected_components((index[:, None] - index).abs() <= 1).any()
    order = torch.randperm(33, generator=g)
    assert not connected_components((order[:, None] - order).abs() <= 1).any()
    assert connected_components(torch.ones(3, 2), 1.0).tolist() == [0, 1, 2]


@pytest.mark.parametrize("pairs", [3, 8, 32])
def test_components_of_known_pairs(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known pairs give the same components; below their threshold, or with too many pairs, all tokens are compared."""
    monkeypatch.setattr(kernels, "_PAIRS", pairs)
    monkeypatch.setattr(kernels, "_MAX_ELEMENTS", 1000)
    monkeypatch.setattr(kernels, "_MIN_COLUMNS", 20)
    g = torch.Generator().manual_seed(2)
    x = normalize(torch.randn(12, 6, generator=g).repeat(9, 1) + 0.4 * torch.randn(108, 6, generator=g))
    x[::7] = x[0]
    means = normalize(torch.cat([x[:40], x[40:54].view(7, 2, 6).mean(1), x[54:]]))
    token = torch.cat([torch.arange(40), torch.full((7,), -1), torch.arange(54, 108)])
    order = torch.randperm(len(means), generator=g)
    means, token = means[order], token[order]
    known, compared = SimilarPairs(x), []
    monkeypatch.setattr(
        kernels, "connected_components", lambda *args: compared.append(args[1]) or connected_components(*args)
    )
    tried = [-0.5, 0.0, 0.3, 0.6, 0.8, 0.9, 0.95, 0.99, 1.0]
    for threshold in tried:
        assert torch.equal(known.components(means, token, threshold), connected_components(means, threshold))
    assert compared == [t for t in tried if t < max(known.least, known._pairs[0]) or t == 1] != tried


def test_many_tokens_need_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = given([moving(6, 4, 5, seed=5, noise=0.2), moving(4, 3, 3, noise=0.3)], [30, 5], [(4, 5), (3, 3)])
    expected = select("llava_scissor", tokens)
    monkeypatch.setattr("tokenprune.kernels.farthest.TABLE", 0)
    monkeypatch.setattr(scissor, "_ROWS", 4)
    monkeypatch.setattr(kernels, "_PAIRS", 2)
    actual = select("llava_scissor", tokens)
    assert torch.equal(actual.keep, expected.keep) and torch.equal(actual.assign, expected.assign)


def test_repeated_merges_match_loop() -> None:
    g = torch.Generator().manual_seed(7)
    mean, size = torch.randn(40, 5, generator=g, dtype=torch.double), torch.randint(1, 4, (40,), generator=g)
    representatives = scissor._Representatives(mean.float(), size, torch.arange(40), torch.zeros(40))
    got = scissor.merge_to_count(representatives, 4)
    groups = {i: [i] for i in range(40)}
    while len(groups) > 4:
        heads, x = [*groups], torch.stack([mean[token] for token in groups])
        similarity = (x / x.norm(dim=1, keepdim=True)) @ (x / x.norm(dim=1, keepdim=True)).T
        pair_index = int(similarity.fill_diagonal_(-2).argmax())
        first, second = sorted((heads[pair_index // len(heads)], heads[pair_index % len(heads)]))
        mean[first] = (mean[first] * size[first] + mean[second] * size[second]) / (size[first] + size[second])
        size[first] += size[second]
        groups[first] += groups.pop(second)
    assert [(got.group == index).nonzero().flatten().tolist() for index in range(4)] == [
        sorted(groups[token]) for token in groups
    ]
    assert torch.allclose(got.mean.double(), torch.stack([mean[token] for token in groups]), atol=1e-4)
