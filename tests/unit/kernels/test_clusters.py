# SPDX-License-Identifier: Apache-2.0
"""Clusters of tokens equal naive loops, in ragged batches and in blocks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from each import each
from tests.unit.methods.naive.flashvid import far_apart
from tests.unit.methods.naive.ottvid import cover
from tokenprune.kernels import clusters as kernels
from tokenprune.kernels.clusters import (
    assign_to_centres,
    cluster_density_peaks,
    connected_components,
    facility_location,
    find_roots,
    select_farthest_weighted,
)
from tokenprune.kernels.pairs import distances
from tokenprune.kernels.take import rank_in_group
from videos import best, clusters, cos

COUNTS = [9, 5, 1]


def make_rows(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows with nonzero padding, their mask, weights and the number of clusters per row."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 9, 4, generator=g)
    mask = torch.arange(9) < torch.tensor(COUNTS)[:, None]
    x[~mask] = 8.0
    return x, mask, torch.rand(3, 9, generator=g).masked_fill(~mask, 5.0), torch.tensor([4, 2, 1])


@pytest.fixture(params=[2**24, 1])
def block_sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute all rows in one block, or each row in a block."""
    monkeypatch.setattr(kernels, "_MAX_ELEMENTS", request.param)


@pytest.mark.usefixtures("block_sizes")
def test_clusters_around_peaks() -> None:
    x, mask, _, num_clusters = make_rows()
    centres, member = cluster_density_peaks(x, mask, num_clusters, 4)
    for row, count in enumerate(COUNTS):
        want = clusters(dict(enumerate(x[row, :count].tolist())), int(num_clusters[row]))
        assert member[row].tolist() == [want[i] for i in range(count)] + [-1] * (9 - count)
        assert centres[row].nonzero().flatten().tolist() == sorted(set(want.values()))
    empty = cluster_density_peaks(x, mask, torch.zeros(3, dtype=torch.long), 1)
    assert not empty[0].any() and (empty[1] == -1).all()


def test_equally_near_centres_go_to_the_first() -> None:
    x = torch.tensor([[[0.0], [2.0], [1.0], [math.nan]]])
    centres, mask = torch.tensor([[True, True, False, False]]), torch.ones(1, 4, dtype=torch.bool)
    assert assign_to_centres(x, mask, centres, 2).tolist() == [[0, 1, 0, 0]]


def test_a_centre_has_its_own_index() -> None:
    mask, centres = torch.ones(1, 3, dtype=torch.bool), torch.tensor([[True, False, True]])
    assert assign_to_centres(torch.ones(1, 3, 2), mask, centres, 2).tolist() == [[0, 0, 2]]


def test_components_need_a_larger_cosine_than_the_threshold() -> None:
    vectors = torch.tensor([[1.0, 0.0], [0.5, 0.75**0.5]])
    assert connected_components(vectors, 0.5).tolist() == [0, 1]
    assert connected_components(vectors, 0.49).tolist() == [0, 0]


def test_distances_survive_cancellation() -> None:
    """Distances stay precise far from the origin; copies have distance 0 and identical columns."""
    g = torch.Generator().manual_seed(3)
    x = 3 + torch.randn(2, 40, 301, generator=g) * torch.logspace(-4, 1, 40)[:, None]
    x[:, 33:] = x[:, :7]
    got = distances(x, x[:, ::3])
    want = (x.double()[:, :, None] - x.double()[:, None, ::3]).square().sum(3).sqrt()
    torch.testing.assert_close(got, want.float(), rtol=1e-6, atol=0)
    assert torch.equal(got == 0, want == 0) and torch.equal(got[:, 33:], got[:, :7])


@pytest.mark.usefixtures("block_sizes")
def test_select_farthest_weighted() -> None:
    x, mask, weight, num_picks = make_rows(1)
    got = select_farthest_weighted(x, mask, weight, num_picks, 4)
    for row, count in enumerate(COUNTS):
        want = far_apart(x[row, :count].tolist(), weight[row, :count].tolist(), int(num_picks[row]))
        assert got[row].nonzero().flatten().tolist() == sorted(want)
    x[0, 3], weight[0, 2] = 0, math.nan
    assert select_farthest_weighted(x, mask, weight, num_picks, 4).sum(1).tolist() == [4, 2, 1]


@pytest.mark.usefixtures("block_sizes")
def test_facility_location() -> None:
    x, mask, weight, num_picks = make_rows(2)
    got = facility_location(x, mask, weight, num_picks, 4)
    for row, count in enumerate(COUNTS):
        points, w = x[row, :count].tolist(), weight[row, :count].tolist()
        similarity = [[cos(a, b) for b in points] for a in points]
        picks: list[int] = []
        for _ in range(int(num_picks[row])):
            gain = {j: cover(similarity, w, [*picks, j]) for j in range(count) if j not in picks}
            picks += best(gain, gain, 1)
        assert got[row].nonzero().flatten().tolist() == sorted(picks)


@each("length", [1, 2, 7, 8, 9, 33])
def test_chains_end_at_their_roots(length: int) -> None:
    line = (torch.arange(length) - 1).clamp(min=0)
    branches = torch.tensor([i // 2 for i in range(length)])
    assert not find_roots(torch.stack([line, branches]), length).any()


def test_ranks_in_groups() -> None:
    group, score = torch.tensor([[0, 1, 0, 1, 0]]), torch.tensor([[1.0, 5.0, 3.0, 5.0, 3.0]])
    assert rank_in_group(group, score).tolist() == [[2, 0, 0, 1, 1]]
