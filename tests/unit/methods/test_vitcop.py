# SPDX-License-Identifier: Apache-2.0
"""vitcop against naive loops written from its description."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor

import tokenprune
from merging_models import blocks_of, tower_of
from module_calls import record_outputs
from several_cuts import Arrived, check_in_model, counts_of
from tokenprune import Budget
from tokenprune.methods.pre_llm.vitcop import find_cluster_centers
from tokenprune.selection.tokens import VisualTokens
from tokenprune.testing import visual_tokens
from tower_tokens import LAYOUTS, budgets, tower_tokens
from zoo import FAMILIES


def naive_clusters(keys: list[list[float]], coordinates: list[tuple[float, float]], share: float) -> list[list[int]]:
    """Return the members of each cluster of one tile. The last cluster has the tokens that reach no center."""
    n, scale = len(keys), math.sqrt(len(keys[0])) / 4
    distances = [[math.sqrt(math.dist(a, b) ** 2 + 1e-8) * (a is not b) for b in keys] for a in keys]
    density = [round(math.fsum(math.exp(-((d / scale) ** 2)) for d in row) * 2**30) for row in distances]
    parent, delta = [], []
    for i in range(n):
        candidates = [
            j for j in range(n)
            if j != i and density[j] >= density[i] and math.dist(coordinates[i], coordinates[j]) <= 0.6 + 1e-9
        ]  # fmt: skip
        parent.append(min(candidates, key=lambda j: (distances[i][j], j)) if candidates else 0)
        delta.append(distances[i][parent[-1]] if candidates else math.inf)
    gamma = [d * rho for d, rho in zip(delta, density, strict=True)]
    centres = sorted(range(n), key=lambda i: (-gamma[i], i))[: max(1, int(share * n))]
    label = [centres.index(i) if i in centres else -1 for i in range(n)]
    for _ in range(n):
        label = [current if i in centres else label[parent[i]] for i, current in enumerate(label)]
    clusters = [[i for i in range(n) if label[i] == index] for index in (*range(len(centres)), -1)]
    return [cluster for cluster in clusters if cluster]


def naive_groups(clusters: list[list[int]], length: dict[int, float], num_groups: int) -> list[list[int]]:
    """Return the groups of the early cut (steps 1 to 4), corrected until their number is exact."""
    clusters = sorted(map(sorted, clusters))
    s = [math.fsum(length[i] for i in cluster) for cluster in clusters]
    ascending = sorted(range(len(clusters)), key=lambda c: (s[c], c))
    descending = sorted(range(len(clusters)), key=lambda c: (-s[c], c))
    if len(clusters) > num_groups:
        return [clusters[c] for c in ascending[: num_groups - 1]] + [
            sorted(i for c in ascending[num_groups - 1 :] for i in clusters[c])
        ]
    n, k = sum(map(len, clusters)), len(clusters)
    q = [min(round((num_groups - k) * (len(cluster) - 1) / max(1, n - k)), len(cluster) - 1) for cluster in clusters]
    while (diff := num_groups - k - sum(q)) != 0:
        for c in ascending if diff > 0 else descending:
            if diff > 0 and q[c] < len(clusters[c]) - 1:
                q[c], diff = q[c] + 1, diff - 1
            elif diff < 0 and q[c] > 0:
                q[c], diff = q[c] - 1, diff + 1
    groups = []
    for cluster, quota in zip(clusters, q, strict=True):
        singles = sorted(cluster, key=lambda i: (length[i], i))[:quota]
        groups += [[i] for i in singles] + [[i for i in cluster if i not in singles]]
    return groups


def naive_length(heads: Tensor) -> float:
    mean = [sum(column) / len(heads) for column in zip(*heads.double().tolist(), strict=True)]
    return math.hypot(*mean)


def list_coordinates(tokens: VisualTokens, row: int) -> list[tuple[float, float]]:
    p = tokens.patches
    return [
        (int(p.row[row, i]) / int(p.height[row, i]), int(p.column[row, i]) / int(p.width[row, i]))
        for i in range(tokens.counts[row])
    ]


def select_first(tokens: VisualTokens, share: float) -> tuple[list[int], list[list[int]]]:
    """Return the kept tokens of one image, and the clusters that the early cut receives."""
    stage = tokenprune.method("vitcop", clusters=share).stages(Budget(keep=0.2), 32)[0][0]
    kept = stage.select(tokens).keep[0].nonzero().flatten().tolist()
    cluster_ids = tokens.carry["cluster"][0].tolist()
    assert all(cluster_ids[i] == -1 for i in range(tokens.counts[0]) if i not in kept)
    return kept, [[i for i in kept if cluster_ids[i] == cluster] for cluster in sorted({cluster_ids[i] for i in kept})]


def test_first_stage_equals_naive_loop_in_200_cases() -> None:
    draw = random.Random(0)
    for case in range(200):
        grid = draw.randint(1, 6), draw.randint(2, 7)
        keep, share = draw.randint(1, grid[0] * grid[1]), draw.choice([0.05, 0.18, 0.4, 1.0])
        g = torch.Generator().manual_seed(case)
        keys = torch.randn(1, grid[0] * grid[1], 16, generator=g) * draw.choice([0.1, 0.5, 1.0])
        if draw.random() < 0.4:
            keys = keys[:, torch.randint(max(2, grid[1]), keys.shape[1:2], generator=g)]
        tokens = tower_tokens([([grid], 0)], [keep], seed=case, ties=case % 3 == 0, encoder_keys={-1: keys})
        scores = tokens.encoder_attention(-1)[0].double().sum(0).tolist()
        want = sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:keep])
        kept, clusters = select_first(tokens, share)
        assert kept == want, case
        coordinates = list_coordinates(tokens, 0)
        expected = naive_clusters([keys[0, i].tolist() for i in want], [coordinates[i] for i in want], share)
        assert sorted(clusters) == sorted([want[i] for i in cluster] for cluster in expected), case


def test_early_cut_equals_naive_loop_in_200_cases() -> None:
    draw, method = random.Random(0), tokenprune.method("vitcop").stages(Budget(keep=0.2), 32)[1][0]
    for case in range(200):
        n = draw.randint(2, 40)
        num_kept, label = draw.randint(1, n - 1), [draw.randint(-1, draw.randint(0, 12)) for _ in range(n)]
        keys = torch.randn(1, n, 3, 5, generator=torch.Generator().manual_seed(case))
        keys = (keys * 2).round() if draw.random() < 0.4 else keys
        length = {i: naive_length(keys[0, i]) for i in range(n)}
        carry = {"cluster": torch.tensor([label])}
        got = method.select(visual_tokens(torch.randn(1, n, 4), keep=[num_kept], key_heads=keys, carry=carry))
        groups = naive_groups(
            [[i for i in range(n) if label[i] == cluster] for cluster in set(label)], length, num_kept
        )
        assert len(groups) == num_kept
        assert got.keep[0].nonzero().flatten().tolist() == sorted(group[len(group) // 2] for group in groups), case
        for group in groups:
            middle = group[len(group) // 2]
            assert {i for i in range(n) if got.assign[0, i] == middle} == set(group)
            weights = got.weight[0, group] / got.weight[0, group].sum()
            want = [(1 / len(group) + (i == middle)) / 2 for i in group]
            torch.testing.assert_close(weights, torch.tensor(want))


def test_rounding_surplus_is_taken_from_the_largest_sum() -> None:
    """The extra groups of three clusters are rounded to 0 each for 4 groups, and to 1 each for 5 groups.

    In the first case the smallest sum gets the missing group. In the second case the largest sum loses one.
    """
    method = tokenprune.method("vitcop").stages(Budget(keep=0.2), 32)[1][0]
    keys = torch.tensor([1.0, 1, 5, 5, 3, 3]).view(1, 6, 1, 1)
    carry = {"cluster": torch.tensor([[0, 0, 1, 1, 2, 2]])}
    for num_kept, singles in ((4, [0]), (5, [0, 4])):
        got = method.select(visual_tokens(torch.randn(1, 6, 4), keep=[num_kept], key_heads=keys, carry=carry))
        assert [i for i in (0, 2, 4) if got.keep[0, i]] == singles


def test_tiles_and_rows_are_independent() -> None:
    for layout in LAYOUTS:
        for seed, keep in enumerate(budgets(layout)):
            tokens = tower_tokens(layout, keep, seed=seed)
            stage = tokenprune.method("vitcop").stages(Budget(keep=0.2), 32)[0][0]
            kept, cluster_ids = stage.select(tokens).keep, tokens.carry["cluster"]
            for row, image in enumerate(layout):
                count = tokens.counts[row]
                single = tower_tokens(
                    [image], [keep[row]], encoder_keys={-1: tokens.encoder_keys(-1)[row : row + 1, :count]},
                    encoder_attention={-1: tokens.encoder_attention(-1)[row : row + 1, :, :count]},
                )  # fmt: skip
                assert torch.equal(stage.select(single).keep[0], kept[row, :count])
                pairs = [
                    (int(a), int(b)) for a, b in zip(cluster_ids[row, :count], single.carry["cluster"][0], strict=True)
                ]
                assert len(set(pairs)) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
    tokens = tower_tokens([([(6, 6), (6, 6)], 0)], [60])
    kept, clusters = select_first(tokens, 0.3)
    assert len(clusters) == 18 and any(len(cluster) > 3 for cluster in clusters)
    assert all(len({i // 36 for i in cluster}) == 1 for cluster in clusters)


def test_equal_keys_and_distance_limit() -> None:
    """All densities tie, so chains may not reach a center. Distant tokens have no parent."""
    keys, mask = torch.ones(1, 6, 16), torch.ones(1, 6, dtype=torch.bool)
    tile, num_centres = torch.zeros(1, 6, dtype=torch.long), torch.tensor([2])
    row = torch.stack([torch.zeros(6), torch.arange(6) / 6], 1)[None].double()
    assert set(find_cluster_centers(keys, row, tile, mask, num_centres)[0].tolist()) <= {-1, 0, 1, 2, 3, 4, 5}
    assert find_cluster_centers(keys, row, tile, mask, torch.tensor([6]))[0].tolist() == list(range(6))
    distant = find_cluster_centers(torch.randn(1, 6, 16), row * 10, tile, mask, num_centres)
    assert distant[0].tolist() == [0, 1, 0, 0, 0, 0]  # the first tokens without a parent are centers


@torch.no_grad()
def test_clusters_and_key_lengths_in_a_model(build: Any) -> None:
    """Clusters use the keys of the tower block that the model reads. Key lengths come from the decoder's keys."""
    model = build(FAMILIES["llava"], "eager")
    with record_outputs(blocks_of(tower_of(model))[-2].self_attn.k_proj) as key_outputs:
        model(**FAMILIES["llava"].make_inputs(images=(2, 1)))
    images, clusters, groups = iter(key_outputs[0][:, 1:].tolist()), [], []

    def naive(arrived: Arrived) -> list[int]:
        if arrived.number == 0:
            image, side = next(images), math.isqrt(len(arrived.all_places))
            ids = [i - arrived.all_places[0] for i in arrived.stays]
            members = naive_clusters([image[i] for i in ids], [(i // side / side, i % side / side) for i in ids], 0.4)
            clusters.append([[arrived.stays[i] for i in cluster] for cluster in members])
            return arrived.stays
        length = {i: naive_length(arrived.keys[i]) for i in arrived.places}
        if arrived.number == 2:
            return sorted(arrived.places, key=lambda i: (length[i], i))[: arrived.keep]
        members = naive_groups(clusters[len(groups)], length, arrived.keep)
        groups.append(members)
        return [group[len(group) // 2] for group in members]

    cuts = check_in_model("vitcop", naive, build, keep=0.5, clusters=0.4)
    assert [cut.layer for cut in cuts] == [0, 1, 3] and len(groups) == 3
    merged = [sorted(members) for row in cuts[1].sources for members in row.values()]
    assert sorted(merged) == sorted(sorted(group) for groups_of_image in groups for group in groups_of_image)


def test_schedule_equals_the_authors() -> None:
    """288 of 576 tokens enter. Layer 2 keeps round((32 * 0.25 / 0.5 - 2) / 22 * 288), and layer 22 a fifth."""
    got = counts_of(tokenprune.method("vitcop"), 32, 576, 0.25)
    assert [layer for layer, _ in got] == [0, 2, 22]
    for (_, count), want in zip(got, (288, 183, 37), strict=True):
        assert abs(count - want) <= 1
