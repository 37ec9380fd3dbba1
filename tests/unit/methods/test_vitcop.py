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


def naive_clusters(keys: list[list[float]], spots: list[tuple[float, float]], share: float) -> list[list[int]]:
    """Cluster one tile: the members of each cluster, and last the tokens that reach no center."""
    n, scale = len(keys), math.sqrt(len(keys[0])) / 4
    apart = [[math.sqrt(math.dist(one, other) ** 2 + 1e-8) * (one is not other) for other in keys] for one in keys]
    density = [round(math.fsum(math.exp(-((d / scale) ** 2)) for d in row) * 2**30) for row in apart]
    parent, delta = [], []
    for i in range(n):
        able = [
            j for j in range(n)
            if j != i and density[j] >= density[i] and math.dist(spots[i], spots[j]) <= 0.6 + 1e-9
        ]  # fmt: skip
        parent.append(min(able, key=lambda j: (apart[i][j], j)) if able else 0)
        delta.append(apart[i][parent[-1]] if able else math.inf)
    gamma = [d * rho for d, rho in zip(delta, density, strict=True)]
    centres = sorted(range(n), key=lambda i: (-gamma[i], i))[: max(1, int(share * n))]
    label = [centres.index(i) if i in centres else -1 for i in range(n)]
    for _ in range(n):
        label = [own if i in centres else label[parent[i]] for i, own in enumerate(label)]
    found = [[i for i in range(n) if label[i] == one] for one in (*range(len(centres)), -1)]
    return [one for one in found if one]


def naive_groups(clusters: list[list[int]], length: dict[int, float], wanted: int) -> list[list[int]]:
    """Steps 1 to 4 of the early cut; corrections go on until the number is right."""
    clusters = sorted(map(sorted, clusters))
    s = [math.fsum(length[i] for i in one) for one in clusters]
    up = sorted(range(len(clusters)), key=lambda c: (s[c], c))
    down = sorted(range(len(clusters)), key=lambda c: (-s[c], c))
    if len(clusters) > wanted:
        return [clusters[c] for c in up[: wanted - 1]] + [sorted(i for c in up[wanted - 1 :] for i in clusters[c])]
    n, k = sum(map(len, clusters)), len(clusters)
    q = [min(round((wanted - k) * (len(one) - 1) / max(1, n - k)), len(one) - 1) for one in clusters]
    while (diff := wanted - k - sum(q)) != 0:
        for c in up if diff > 0 else down:
            if diff > 0 and q[c] < len(clusters[c]) - 1:
                q[c], diff = q[c] + 1, diff - 1
            elif diff < 0 and q[c] > 0:
                q[c], diff = q[c] - 1, diff + 1
    groups = []
    for one, number in zip(clusters, q, strict=True):
        alone = sorted(one, key=lambda i: (length[i], i))[:number]
        groups += [[i] for i in alone] + [[i for i in one if i not in alone]]
    return groups


def naive_length(heads: Tensor) -> float:
    mean = [sum(column) / len(heads) for column in zip(*heads.double().tolist(), strict=True)]
    return math.hypot(*mean)


def spots_of(tokens: VisualTokens, row: int) -> list[tuple[float, float]]:
    at = tokens.patches
    return [
        (int(at.row[row, i]) / int(at.height[row, i]), int(at.column[row, i]) / int(at.width[row, i]))
        for i in range(tokens.counts[row])
    ]


def entered(tokens: VisualTokens, share: float) -> tuple[list[int], list[list[int]]]:
    """Kept tokens of one image, and their clusters as the early cut receives them."""
    stage = tokenprune.method("vitcop", clusters=share).stages(Budget(keep=0.2), 32)[0][0]
    kept = stage.select(tokens).keep[0].nonzero().flatten().tolist()
    told = tokens.carry["cluster"][0].tolist()
    assert all(told[i] == -1 for i in range(tokens.counts[0]) if i not in kept)
    return kept, [[i for i in kept if told[i] == one] for one in sorted({told[i] for i in kept})]


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
        kept, clusters = entered(tokens, share)
        assert kept == want, case
        spots = spots_of(tokens, 0)
        made = naive_clusters([keys[0, i].tolist() for i in want], [spots[i] for i in want], share)
        assert sorted(clusters) == sorted([want[i] for i in one] for one in made), case


def test_early_cut_equals_naive_loop_in_200_cases() -> None:
    draw, method = random.Random(0), tokenprune.method("vitcop").stages(Budget(keep=0.2), 32)[1][0]
    for case in range(200):
        n = draw.randint(2, 40)
        wanted, label = draw.randint(1, n - 1), [draw.randint(-1, draw.randint(0, 12)) for _ in range(n)]
        keys = torch.randn(1, n, 3, 5, generator=torch.Generator().manual_seed(case))
        keys = (keys * 2).round() if draw.random() < 0.4 else keys
        length = {i: naive_length(keys[0, i]) for i in range(n)}
        carry = {"cluster": torch.tensor([label])}
        got = method.select(visual_tokens(torch.randn(1, n, 4), keep=[wanted], key_heads=keys, carry=carry))
        groups = naive_groups([[i for i in range(n) if label[i] == one] for one in set(label)], length, wanted)
        assert len(groups) == wanted
        assert got.keep[0].nonzero().flatten().tolist() == sorted(one[len(one) // 2] for one in groups), case
        for one in groups:
            middle = one[len(one) // 2]
            assert {i for i in range(n) if got.assign[0, i] == middle} == set(one)
            weights = got.weight[0, one] / got.weight[0, one].sum()
            want = [(1 / len(one) + (i == middle)) / 2 for i in one]
            torch.testing.assert_close(weights, torch.tensor(want))


def test_too_many_by_rounding_go_from_the_largest_sums() -> None:
    """Three clusters of two and two tokens free of 3: half a token each is rounded to none; of 5 tokens free of 6, one
    each, and the cluster of the largest sum gives one away."""
    method = tokenprune.method("vitcop").stages(Budget(keep=0.2), 32)[1][0]
    keys = torch.tensor([1.0, 1, 5, 5, 3, 3]).view(1, 6, 1, 1)
    carry = {"cluster": torch.tensor([[0, 0, 1, 1, 2, 2]])}
    for wanted, alone in ((4, [0]), (5, [0, 4])):
        got = method.select(visual_tokens(torch.randn(1, 6, 4), keep=[wanted], key_heads=keys, carry=carry))
        assert [i for i in (0, 2, 4) if got.keep[0, i]] == alone


def test_tiles_and_rows_are_independent() -> None:
    for layout in LAYOUTS:
        for number, keep in enumerate(budgets(layout)):
            tokens = tower_tokens(layout, keep, seed=number)
            stage = tokenprune.method("vitcop").stages(Budget(keep=0.2), 32)[0][0]
            kept, told = stage.select(tokens).keep, tokens.carry["cluster"]
            for row, one in enumerate(layout):
                count = tokens.counts[row]
                alone = tower_tokens(
                    [one], [keep[row]], encoder_keys={-1: tokens.encoder_keys(-1)[row : row + 1, :count]},
                    encoder_attention={-1: tokens.encoder_attention(-1)[row : row + 1, :, :count]},
                )  # fmt: skip
                assert torch.equal(stage.select(alone).keep[0], kept[row, :count])
                own = [(int(a), int(b)) for a, b in zip(told[row, :count], alone.carry["cluster"][0], strict=True)]
                assert len(set(own)) == len({a for a, _ in own}) == len({b for _, b in own})
    tokens = tower_tokens([([(6, 6), (6, 6)], 0)], [60])
    kept, clusters = entered(tokens, 0.3)
    assert len(clusters) == 18 and any(len(one) > 3 for one in clusters)
    assert all(len({i // 36 for i in one}) == 1 for one in clusters)


def test_equal_keys_and_distance_limit() -> None:
    """All densities tie, so chains may end at no center. Tokens too far apart have no parent."""
    one, mask = torch.ones(1, 6, 16), torch.ones(1, 6, dtype=torch.bool)
    tile, number = torch.zeros(1, 6, dtype=torch.long), torch.tensor([2])
    row = torch.stack([torch.zeros(6), torch.arange(6) / 6], 1)[None].double()
    assert set(find_cluster_centers(one, row, tile, mask, number)[0].tolist()) <= {-1, 0, 1, 2, 3, 4, 5}
    assert find_cluster_centers(one, row, tile, mask, torch.tensor([6]))[0].tolist() == list(range(6))
    apart = find_cluster_centers(torch.randn(1, 6, 16), row * 10, tile, mask, number)
    assert apart[0].tolist() == [0, 1, 0, 0, 0, 0]  # the first tokens without a parent are centers


@torch.no_grad()
def test_clusters_and_key_lengths_in_a_model(build: Any) -> None:
    """Clusters use the key projection of the block that the model reads, and key lengths are those in the cache."""
    model = build(FAMILIES["llava"], "eager")
    with record_outputs(blocks_of(tower_of(model))[-2].self_attn.k_proj) as seen:
        model(**FAMILIES["llava"].make_inputs(images=(2, 1)))
    images, clusters, groups = iter(seen[0][:, 1:].tolist()), [], []

    def naive(seen: Arrived) -> list[int]:
        if seen.number == 0:
            image, side = next(images), math.isqrt(len(seen.all_places))
            ids = [i - seen.all_places[0] for i in seen.stays]
            made = naive_clusters([image[i] for i in ids], [(i // side / side, i % side / side) for i in ids], 0.4)
            clusters.append([[seen.stays[i] for i in one] for one in made])
            return seen.stays
        length = {i: naive_length(seen.keys[i]) for i in seen.places}
        if seen.number == 2:
            return sorted(seen.places, key=lambda i: (length[i], i))[: seen.keep]
        made = naive_groups(clusters[len(groups)], length, seen.keep)
        groups.append(made)
        return [group[len(group) // 2] for group in made]

    cuts = check_in_model("vitcop", naive, build, keep=0.5, clusters=0.4)
    assert [cut.layer for cut in cuts] == [0, 1, 3] and len(groups) == 3
    merged = [sorted(members) for row in cuts[1].sources for members in row.values()]
    assert sorted(merged) == sorted(sorted(one) for made in groups for one in made)


def test_schedule_equals_the_authors() -> None:
    """288 of 576 tokens enter; round((32 * 0.25 / 0.5 - 2) / 22 * 288) after layer 2, and a fifth after 22."""
    got = counts_of(tokenprune.method("vitcop"), 32, 576, 0.25)
    assert [layer for layer, _ in got] == [0, 2, 22]
    for (_, number), want in zip(got, (288, 183, 37), strict=True):
        assert abs(number - want) <= 1
