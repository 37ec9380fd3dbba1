# SPDX-License-Identifier: Apache-2.0
"""vitcop against naive loops written from its description."""

from __future__ import annotations

import random
from typing import Any

import pytest

import tokenprune
from several_cuts import Arrived, best, check_in_model, naive_centres
from tokenprune import Budget, OptionError
from tokenprune.accounting import DecoderShape
from tokenprune.methods.pre_llm.vitcop import grouped


def naive_length(seen: Arrived, place: int) -> float:
    heads = [[float(x) for x in head] for head in seen.keys[place]]
    mean = [sum(column) / len(heads) for column in zip(*heads, strict=True)]
    return sum(x * x for x in mean) ** 0.5


def naive_clusters(seen: Arrived, share: float) -> list[list[int]]:
    x = seen.entered[seen.places]
    number = max(1, round(share * len(seen.places)))
    centres = sorted(naive_centres(x, number, min(5, number)))
    clusters: dict[int, list[int]] = {}
    for i in range(len(x)):
        near = i if i in centres else min(centres, key=lambda c: (float((x[i] - x[c]).norm()), c))
        clusters.setdefault(near, []).append(seen.places[i])
    return list(clusters.values())


@pytest.mark.parametrize("clusters", [0.36, 1.0])
def test_within_clusters_and_then_the_shortest(clusters: float, build: Any) -> None:
    """With as many clusters as tokens all but the best ones of these merge into one."""
    groups: list[list[int]] = []

    def naive(seen: Arrived) -> list[int]:
        if seen.number == 0:
            return seen.stays
        length = {i: naive_length(seen, i) for i in seen.places}
        if seen.number == 2:
            return sorted(seen.places, key=lambda i: (length[i], i))[: seen.keep]
        made = grouped(naive_clusters(seen, clusters), [length.get(i, 0.0) for i in range(10_000)], seen.keep)
        groups.extend(made)
        return [group[len(group) // 2] for group in made]

    cuts = check_in_model("vitcop", naive, build, keep=0.5, clusters=clusters)
    assert [cut.layer for cut in cuts] == [0, 1, 3]
    merged = [sorted(members) for row in cuts[1].sources for members in row.values()]
    assert sorted(merged) == sorted(map(sorted, groups))


def test_groups_are_as_many_as_wanted() -> None:
    draw = random.Random(0)
    for _ in range(300):
        count = draw.randint(1, 60)
        label = [draw.randint(0, draw.randint(0, 12)) for _ in range(count)]
        clusters = [[i for i in range(count) if label[i] == one] for one in sorted(set(label))]
        length = [draw.choice((1.0, 2.0, draw.random())) for _ in range(count)]
        for wanted in {1, count, draw.randint(1, count)}:
            groups = grouped(clusters, length, wanted)
            assert len(groups) == wanted
            assert sorted(i for group in groups for i in group) == list(range(count))  # each in exactly one
            total = sorted((sum(length[i] for i in one), number) for number, one in enumerate(clusters))
            if len(clusters) > wanted:
                assert groups[:-1] == [clusters[number] for _, number in total[: wanted - 1]]
            else:
                for one in clusters:
                    own = [group for group in groups if set(group) <= set(one)]
                    alone = sorted(i for group in own[:-1] for i in group)
                    assert alone == sorted(one[i] for i in best([-length[i] for i in one], len(alone)))
                    # By its size, and put right by one at most.
                    free, rest = wanted - len(clusters), count - len(clusters)
                    assert abs(len(alone) - round(free * (len(one) - 1) / max(1, rest))) <= 1


def test_the_schedule_is_the_authors() -> None:
    """288 of 576 tokens enter; round((32 * 0.25 / 0.5 - 2) / 22 * 288) behind layer 2, and a fifth of it behind 22."""
    shape = DecoderShape(32, hidden=8, intermediate=16, heads=1, kv_heads=1, head_dim=8)
    got = [
        (stage.cut_layer, *part.resolve([576], layer=stage.cut_layer, shape=shape, text_tokens=0, original=[576]))
        for stage, part in tokenprune.method("vitcop").stages(Budget(keep=0.25), 32)
    ]
    assert [layer for layer, _ in got] == [0, 2, 22]
    for (_, number), want in zip(got, (288, 183, 37), strict=True):
        assert abs(number - want) <= 1


def test_options_are_checked() -> None:
    for options in (dict(clusters=0.0), dict(clusters=2), dict(clusters="1")):
        with pytest.raises(OptionError, match="vitcop"):
            tokenprune.method("vitcop", **options)
