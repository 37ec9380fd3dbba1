# SPDX-License-Identifier: Apache-2.0
"""vispruner against a loop written from its description; numbers are those of the description's invariants."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenprune
from tokenprune import OptionError
from tokenprune.view.tokens import VisualTokens
from tower_tokens import LAYOUTS, best, budgets, kept_of, parts, tiles_of, tower_tokens


def naive(tokens: VisualTokens, image: int, important: float = 0.5, features: str = "tower") -> list[int]:
    tiles, others = tiles_of(tokens, image)
    score = tokens.encoder_attention(-1)[image].float().mean(0).tolist()
    x = (tokens.encoder_features if features == "tower" else tokens.hidden)[image].double()
    x = x / x.norm(dim=-1, keepdim=True)
    alike = (x @ x.T).tolist()
    kept = []
    for tile, number in zip(tiles, parts([len(t) for t in tiles], tokens.keep[image]), strict=True):
        line = sorted(tile, key=lambda i: (-score[i], i))
        few = int(number * important)
        kept, line, goal = kept + line[:few], line[few:], number - few
        while goal and len(line) > goal:
            odd, even = line[0::2], line[1::2]
            drop = min(8, len(odd), len(line) - goal)
            odd.sort(key=lambda i: -max((alike[i][j] for j in even), default=-2))  # a stable sort
            line = odd[drop:] + even
        kept += line if goal else []
    return sorted(kept + others[: tokens.keep[image] - len(kept)])


def exact(layout: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    """Features of length 1 whose cosines are multiples of 1/32: many are equal, and none is rounded."""
    longest = max(sum(h * w for h, w in tiles) + newlines for tiles, newlines in layout)
    g = torch.Generator().manual_seed(seed)
    names = ("encoder_features", "hidden")
    return {name: torch.randn(len(layout), longest, 64, generator=g).sign() / 8 for name in names}


def chosen(tokens: VisualTokens, **options: Any) -> list[list[int]]:
    return kept_of(tokenprune.method("vispruner", **options).select(tokens).keep)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one", "tiles", "thin"])
@pytest.mark.parametrize("ties", [False, True])
def test_equals_the_loop(layout: Any, ties: bool) -> None:
    """1, 2, 3, 7: exactly the budget, on lines of odd and even length, each tile by itself; ties to the earlier."""
    for number, keep in enumerate(budgets(layout)):
        tokens = tower_tokens(layout, keep, seed=number, ties=ties, **(exact(layout, number) if ties else {}))
        for important in (0.5, 0.75, 0.0):
            for features in ("tower", "projected"):
                want = [naive(tokens, image, important, features) for image in range(len(keep))]
                assert chosen(tokens, important=important, features=features) == want


@pytest.mark.parametrize("count", [2, 9, 17, 24])
def test_every_budget(count: int) -> None:
    """3, 8: also where the authors' code fails; all important is fastervlm."""
    for keep in range(1, count + 1):
        tokens = tower_tokens([([(1, count)], 0)], [keep])
        assert chosen(tokens) == [naive(tokens, 0)] and len(chosen(tokens)[0]) == keep
        fastervlm = kept_of(tokenprune.method("fastervlm").select(tokens).keep)
        assert chosen(tokens, important=1.0) == fastervlm


@pytest.mark.parametrize(("grid", "keep"), [((24, 24), 64), ((24, 24), 127)])
def test_papers_sizes_in_bfloat16(grid: tuple[int, int], keep: int) -> None:
    layout = [([grid], 0)]
    features = {name: x.bfloat16() for name, x in exact(layout).items()}
    tokens = tower_tokens(layout, [keep], dtype=torch.bfloat16, **features)
    assert chosen(tokens) == [naive(tokens, 0)]


def test_long_lines_are_worked_on_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = [([(6, 5), (4, 7)], 1), ([(5, 5)], 0)]
    whole = chosen(tower_tokens(layout, [20, 9]))
    monkeypatch.setattr("tokenprune.ops.clusters._AT_ONCE", 1)
    assert chosen(tower_tokens(layout, [20, 9])) == whole


def test_what_does_not_change_the_choice() -> None:
    """5, 6: the length and the turn of features, the scale of attention; the features of the important ones."""
    layout = [([(6, 6)], 0)]
    tokens = tower_tokens(layout, [12])
    x, attention, want = tokens.encoder_features, tokens.encoder_attention(-1), chosen(tokens)
    turn = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(1)))[0]
    first = best(list(range(36)), attention[0].mean(0).tolist(), 6)
    for given in (
        {"encoder_features": x * 2.0 ** torch.randint(-3, 4, (1, 36, 1))},
        {"encoder_features": x @ turn},
        {"encoder_features": x.index_fill(1, torch.tensor(first), 7.0)},
        {"encoder_attention": {-1: attention / 8}},
    ):
        assert chosen(tower_tokens(layout, [12], **given)) == want


def test_a_duplicate_goes_first() -> None:
    """4: it stands at an odd place of the line, and what it copies at an even one."""
    scores = torch.linspace(1, 0, 16)[None, None]
    x = torch.eye(16)[None].clone()
    x[0, 6] = x[0, 3]
    tokens = tower_tokens([([(4, 4)], 0)], [15], encoder_attention={-1: scores}, encoder_features=x)
    assert chosen(tokens, important=0.0) == [[i for i in range(16) if i != 6]]
    x[0, 0] = 0  # nothing to point at is like nothing
    tokens = tower_tokens([([(4, 4)], 0)], [14], encoder_attention={-1: scores}, encoder_features=x)
    assert len(chosen(tokens, important=0.0)[0]) == 14


@pytest.mark.parametrize("options", [{"important": 1.5}, {"features": "clip"}], ids=str)
def test_options(options: dict) -> None:
    with pytest.raises(OptionError, match="vispruner"):
        tokenprune.method("vispruner", **options)
