# SPDX-License-Identifier: Apache-2.0
"""prunesid against a naive loop written from its description."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from greedy import SIZES, alone, cosine_table, image_tokens, picked
from tokenprune import OptionError
from tokenprune.methods.pre_llm.prunesid import components, quotas


def naive_components(x: Tensor, number: int) -> Tensor:
    """By a singular value decomposition of the features by tokens."""
    a = torch.sigmoid(x).T
    a = a - a.mean(0)
    vectors = torch.linalg.svd(a, full_matrices=False)[2].T.abs()[:, :number]
    return torch.nn.functional.pad(vectors, (0, number - vectors.shape[1]))


def naive_quotas(members: list[int], left: list[int], keep: int) -> list[int]:
    low = [min(1, c) for c in members]
    up = [min(5 * math.ceil(keep / 64), c, n) for c, n in zip(members, left, strict=True)]
    while sum(up) < keep:
        up = [min(u + 1, c) for u, c in zip(up, members, strict=True)]
    rest, quota, before = keep - sum(low), list(low), 0
    for g in range(len(members)):
        now = round(sum(left[: g + 1]) / sum(left) * rest)
        quota[g] = min(low[g] + now - before, up[g])
        before = now
    for g in sorted(range(len(left)), key=lambda g: -left[g]):
        while sum(quota) < keep and quota[g] < up[g]:
            quota[g] += 1
    return quota


def naive(x: Tensor, a: Tensor, keep: int, form: str = "qwen", **_: Any) -> list[int]:
    count = len(x)
    number = min(max(int(keep / 4), 4) if form == "qwen" else max(1, int(keep / 4)), keep)
    sizes = naive_components(x, number)
    group = [max(range(number), key=lambda g: (float(sizes[i, g]), -g)) for i in range(count)]
    score = [float(sizes[i, group[i]]) if form == "qwen" else float(a[i]) for i in range(count)]
    alike = cosine_table(x)
    if form == "qwen":
        mean = sum(float(alike[i, j]) for i in range(count) for j in range(i, count)) / count**2
        threshold = max(keep / (count / 18), 1) * mean
    else:
        mean = sum(float(alike[i, j]) for i in range(count) for j in range(count) if i != j) / (count * (count - 1))
        threshold = keep / 32 * mean
    stay: list[list[int]] = []
    gone: list[list[int]] = []
    for g in range(number):
        order = sorted((i for i in range(count) if group[i] == g), key=lambda i: (-score[i], i))
        stay.append([])
        for i in order:
            if all(alike[i, j] <= threshold for j in stay[g]):
                stay[g].append(i)
        gone.append([i for i in order if i not in stay[g]])
    share = naive_quotas([len(s) + len(r) for s, r in zip(stay, gone, strict=True)], [len(s) for s in stay], keep)
    assert sum(share) == keep
    return [i for g in range(number) for i in (stay[g] + gone[g])[: share[g]]]


@pytest.mark.parametrize("form", ["qwen", "llava"])
def test_equals_the_naive_loop(form: str) -> None:
    method = tokenprune.method("prunesid", form=form)
    for counts, keep, dtype in [*SIZES, ([300, 17], [48, 3], torch.float32), ([20, 9], [20, 1], torch.float32)]:
        tokens = image_tokens(counts, keep, dtype)
        got = picked(method, tokens)
        assert got == [sorted(naive(**alone(tokens, row), keep=number, form=form)) for row, number in enumerate(keep)]


@pytest.mark.parametrize("width", [5, 40])  # fewer features than tokens, and more
def test_components(width: int) -> None:
    x = torch.randn(20, width, generator=torch.Generator().manual_seed(width))
    want = naive_components(x.double(), 8)
    rank = min(20, width) - (width < 20)  # less the mean over few features
    assert torch.allclose(components(x, 8)[:, :rank].double(), want[:, :rank], atol=1e-5)
    assert not components(x, 8)[:, rank:].any()


def test_quotas() -> None:
    g = torch.Generator().manual_seed(0)
    for _ in range(200):
        groups = int(torch.randint(1, 9, (1,), generator=g))
        members = torch.randint(0, 12, (groups,), generator=g).tolist()
        members[0] += 1
        left = [0 if not c else 1 + int(torch.randint(0, c, (1,), generator=g)) for c in members]
        keep = int(torch.randint(min(groups, sum(members)), sum(members) + 1, (1,), generator=g))
        keep = max(keep, sum(c > 0 for c in members))
        got = quotas(members, left, keep)
        assert got == naive_quotas(members, left, keep)
        assert sum(got) == keep and all(min(1, c) <= q <= c for q, c in zip(got, members, strict=True))


def test_the_same_twice_and_images_of_one_colour() -> None:
    method = tokenprune.method("prunesid")
    tokens = image_tokens([200, 60], [40, 20])
    assert picked(method, tokens) == picked(method, tokens)
    for same in (torch.full((1, 30, 8), 0.3), torch.zeros(1, 30, 8)):
        for keep in (1, 5, 29, 30):
            assert len(picked(method, image_tokens([30], [keep], hidden=same))[0]) == keep
    # Copies of a token are in one group, of which one stays before the groups are filled up.
    copies = torch.eye(6, 16).repeat_interleave(5, 0)[None] * 4
    (got,) = picked(method, image_tokens([30], [6], hidden=copies))
    assert len({i // 5 for i in got}) >= 4


def test_a_threshold_above_1_removes_nothing() -> None:
    """The LLaVA form at many tokens: the best of each group by attention."""
    tokens = image_tokens([150], [140])
    seen = alone(tokens, 0)
    assert 140 / 32 * float(cosine_table(seen["x"]).mean()) > 1
    sizes = naive_components(seen["x"], 35)
    group = sizes.argmax(1).tolist()
    (got,) = picked(tokenprune.method("prunesid", form="llava"), tokens)
    for g in set(group):
        order = sorted((i for i in range(150) if group[i] == g), key=lambda i: -seen["a"][i])
        here = [i for i in order if i in got]
        assert here == order[: len(here)]


def test_options() -> None:
    assert tokenprune.method("prunesid", form="llava").needs == {"encoder_attention"}
    assert not tokenprune.method("prunesid").needs
    with pytest.raises(OptionError, match="form"):
        tokenprune.method("prunesid", form="clip")
