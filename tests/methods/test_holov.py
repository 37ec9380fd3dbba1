# SPDX-License-Identifier: Apache-2.0
"""holov against a loop written from its description; numbers are those of the description's invariants."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import torch

import tokenprune
from tokenprune import OptionError
from tokenprune.view.tokens import VisualTokens
from tower_tokens import LAYOUTS, best, budgets, kept_of, tower_tokens


def strips(places: list[int], number: int) -> list[list[int]]:
    size, longer = divmod(len(places), number)
    ends = [i * size + min(i, longer) for i in range(number + 1)]
    return [places[a:b] for a, b in pairwise(ends)]


def quotas(weights: list[Fraction], sizes: list[int], total: int) -> list[int]:
    """In proportion; what a strip has no room for goes to the others, what does not divide to the heaviest ones."""
    full: set[int] = set()
    while True:
        rest = [i for i in range(len(sizes)) if i not in full]
        mass, left = sum(weights[i] for i in rest), total - sum(sizes[i] for i in full)
        exact = {i: weights[i] / mass * left if mass else Fraction(left, len(rest)) for i in rest}
        above = {i for i in rest if exact[i] > sizes[i]}
        if not above:
            break
        full |= above
    got = [sizes[i] if i in full else int(exact[i]) for i in range(len(sizes))]
    for i in sorted((i for i in rest if got[i] < sizes[i]), key=lambda i: (-weights[i], i))[: total - sum(got)]:
        got[i] += 1
    return got


def holistic(features: torch.Tensor, scores: list[float]) -> list[float]:
    """Step 2 and 3 of the description, of one strip, with a weight of 1."""
    unit = features.double() / features.double().norm(dim=-1, keepdim=True)
    number = len(scores)
    alike = (unit @ unit.T).tolist()
    spread = []
    for i in range(number):
        row = [0.0 if i == j else alike[i][j] for j in range(number)]
        mean = sum(row) / max(number - 1, 1)
        spread.append(sum((x - mean) ** 2 for x in row) / max(number - 1, 1))
    level = sum(abs(1e3 * s) for s in scores) / number / (sum(spread) / number + 1e-6)
    return [1e3 * s + v * level for s, v in zip(scores, spread, strict=True)]


def naive(tokens: VisualTokens, image: int, crops: int | None = None, rank: str = "attention") -> list[int]:
    count, keep = tokens.counts[image], tokens.keep[image]
    score = tokens.encoder_attention(-1)[image].float().mean(0).tolist()
    tile = tokens.patches.tile[image, :count].tolist()
    patches, others = [i for i in range(count) if tile[i] >= 0], [i for i in range(count) if tile[i] < 0]
    cut = strips(patches, min(len(patches), count, crops or max(1, 16 * count // (9 * keep))))
    weights = [sum(Fraction(score[i]) for i in strip) / len(strip) for strip in cut]
    kept = []
    for strip, number in zip(cut, quotas(weights, [len(s) for s in cut], min(keep, len(patches))), strict=True):
        value = dict(zip(strip, (score[i] for i in strip), strict=True))
        if rank == "holistic":
            value = dict(zip(strip, holistic(tokens.hidden[image, strip], [score[i] for i in strip]), strict=True))
        kept += best(strip, value, number)
    return sorted(kept + others[: keep - len(kept)])


def chosen(tokens: VisualTokens, **options: Any) -> list[list[int]]:
    return kept_of(tokenprune.method("holov", **options).select(tokens).keep)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one", "tiles", "thin"])
@pytest.mark.parametrize("ties", [False, True])
def test_equals_the_loop(layout: Any, ties: bool) -> None:
    """1, 2, 3: exactly the budget, the parts of the strips, and the best of each; 5: one strip, and one a patch."""
    for number, keep in enumerate(budgets(layout)):
        tokens = tower_tokens(layout, keep, seed=number, ties=ties)
        for crops in (None, 1, 3, 999):
            assert chosen(tokens, crops=crops) == [naive(tokens, image, crops) for image in range(len(keep))]
        if not ties:
            want = [naive(tokens, image, 3, "holistic") for image in range(len(keep))]
            assert chosen(tokens, crops=3, rank="holistic") == want


@pytest.mark.parametrize(("grid", "keep", "number"), [((24, 24), 64, 16), ((24, 24), 192, 5), ((48, 60), 320, 16)])
def test_papers_sizes_in_bfloat16(grid: tuple[int, int], keep: int, number: int) -> None:
    tokens = tower_tokens([([grid], 0)], [keep], dtype=torch.bfloat16)
    assert chosen(tokens) == [naive(tokens, 0)] == chosen(tokens, crops=number)


def test_features_count_for_the_holistic_rank_alone() -> None:
    """4, 8: neither do a scale of the attention, and the order of heads."""
    layout = [([(8, 8)], 0)]
    tokens = tower_tokens(layout, [16])
    attention = tokens.encoder_attention(-1)
    for given in ({"hidden": torch.zeros(1, 64, 2)}, {"encoder_attention": {-1: attention.flip(1) * 64}}):
        assert chosen(tower_tokens(layout, [16], **given)) == chosen(tokens)
    other = tower_tokens(layout, [16], hidden=torch.randn(1, 64, 16))
    assert chosen(other, rank="holistic") != chosen(tokens, rank="holistic")
    parts = [[sum(i // 16 == c for i in got[0]) for c in range(4)] for got in (
        chosen(other, rank="holistic", crops=4), chosen(tokens, crops=4)
    )]  # fmt: skip
    assert parts[0] == parts[1]


def test_all_in_one_strip_and_everywhere_alike() -> None:
    """6, 7: a strip that is full leaves the rest to others; where nothing differs, parts differ by one at most."""
    scores = torch.full((1, 1, 64), 1e-6)
    scores[..., 16:32] = 1
    (got,) = chosen(tower_tokens([([(8, 8)], 0)], [40], encoder_attention={-1: scores}), crops=4)
    assert set(range(16, 32)) <= set(got) and len(got) == 40
    assert [sum(i // 16 == c for i in got) for c in range(4)] == [8, 16, 8, 8]
    for value in (0.25, 0.0, torch.nan):
        even = {-1: torch.full((1, 1, 64), value)}
        (got,) = chosen(tower_tokens([([(8, 8)], 0)], [30], encoder_attention=even), crops=4)
        assert [sum(i // 16 == c for i in got) for c in range(4)] == [8, 8, 7, 7]


@pytest.mark.parametrize("options", [{"crops": 0}, {"rank": "variance"}], ids=str)
def test_options(options: dict) -> None:
    with pytest.raises(OptionError, match="holov"):
        tokenprune.method("holov", **options)
