# SPDX-License-Identifier: Apache-2.0
"""prunesid against a naive loop written from its description."""

from __future__ import annotations

import pytest
import torch

import tokenprune
from greedy import alone, cosine_table, image_tokens, picked
from tests.unit.methods.naive.prunesid import naive_components, naive_quotas
from tokenprune.methods.pre_llm.prunesid import compute_quotas, project_to_components


@pytest.mark.parametrize("width", [5, 40])  # fewer and more channels than tokens
def test_components_equal_svd(width: int) -> None:
    x = torch.randn(20, width, generator=torch.Generator().manual_seed(width))
    want = naive_components(x.double(), 8)
    rank = min(20, width) - (width < 20)  # centering removes a dimension
    assert torch.allclose(project_to_components(x, 8)[:, :rank].double(), want[:, :rank], atol=1e-5)
    assert not project_to_components(x, 8)[:, rank:].any()


def test_quotas_sum_to_the_budget() -> None:
    g = torch.Generator().manual_seed(0)
    for _ in range(200):
        groups = int(torch.randint(1, 9, (1,), generator=g))
        members = torch.randint(0, 12, (groups,), generator=g).tolist()
        members[0] += 1
        remaining = [0 if not c else 1 + int(torch.randint(0, c, (1,), generator=g)) for c in members]
        keep = int(torch.randint(min(groups, sum(members)), sum(members) + 1, (1,), generator=g))
        keep = max(keep, sum(c > 0 for c in members))
        got = compute_quotas(members, remaining, keep)
        assert got == naive_quotas(members, remaining, keep)
        assert sum(got) == keep and all(min(1, c) <= q <= c for q, c in zip(got, members, strict=True))


def test_constant_images_and_copies() -> None:
    method = tokenprune.method("prunesid")
    for same in (torch.full((1, 30, 8), 0.3), torch.zeros(1, 30, 8)):
        for keep in (1, 5, 29, 30):
            assert len(picked(method, image_tokens([30], [keep], hidden=same))[0]) == keep
    # Copies of a token are in one group. One copy is kept before the groups are filled.
    copies = torch.eye(6, 16).repeat_interleave(5, 0)[None] * 4
    (got,) = picked(method, image_tokens([30], [6], hidden=copies))
    assert len({i // 5 for i in got}) >= 4


def test_threshold_above_1_removes_no_token() -> None:
    """With many tokens, form="llava" keeps the tokens with the highest attention of each group."""
    tokens = image_tokens([150], [140])
    inputs = alone(tokens, 0)
    assert 140 / 32 * float(cosine_table(inputs["x"]).mean()) > 1
    sizes = naive_components(inputs["x"], 35)
    group = sizes.argmax(1).tolist()
    (got,) = picked(tokenprune.method("prunesid", form="llava"), tokens)
    for g in set(group):
        order = sorted((i for i in range(150) if group[i] == g), key=lambda i: -inputs["a"][i])
        kept = [i for i in order if i in got]
        assert kept == order[: len(kept)]


def test_needs_follow_the_options() -> None:
    assert tokenprune.method("prunesid", form="llava").needs == {"encoder_attention"}
    assert not tokenprune.method("prunesid").needs
