# SPDX-License-Identifier: Apache-2.0
"""feather against naive loops written from its description."""

from __future__ import annotations

from typing import Any

import pytest

import tokenprune
from several_cuts import Arrived, best, check_in_model, check_ties, rows, view
from tokenprune import OptionError, VisualTokens
from zoo import FAMILIES


def naive_even(grid: tuple[int, int] | None, count: int, keep: int, stride: int = 3) -> list[int]:
    """Every stride-th row and column, the first among them, of as small a stride as takes at most half."""
    while True:
        if grid is None:
            places = list(range(0, count, stride * stride))
        else:
            places = [r * grid[1] + c for r in range(0, grid[0], stride) for c in range(0, grid[1], stride)]
        if len(places) <= keep // 2:
            return places
        if stride > count:
            return []
        stride += 1


def test_the_grid_and_what_is_attended_to_without_positions(build: Any) -> None:
    model = build(FAMILIES["llava"], "eager")
    decoder = model.get_submodule(FAMILIES["llava"].decoder)
    heads = model.config.get_text_config().num_attention_heads
    layers = [1, 2]

    def naive(seen: Arrived) -> list[int]:
        layer = decoder.layers[layers[seen.number] - 1]
        x = layer.input_layernorm(seen.previous)
        q, k = layer.self_attn.q_proj(x[seen.last]), layer.self_attn.k_proj(x[seen.places])
        q = q.view(heads, -1)
        k = k.view(len(seen.places), -1, q.shape[1])
        score = [0.0] * len(seen.places)
        for h in range(heads):
            own = k[:, h * k.shape[1] // heads] @ q[h] / q.shape[1] ** 0.5
            for i, one in enumerate(own.softmax(0).tolist()):
                score[i] += one / heads
        even = naive_even((6, 6), 36, seen.keep) if seen.number == 0 else []
        rest = [i for i in range(len(seen.places)) if i not in even]
        return [seen.places[i] for i in even + best(score, seen.keep - len(even), rest)]

    cuts = check_in_model("feather", naive, build, keep=0.5)
    assert [cut.layer for cut in cuts] == layers


def test_ties_and_unknown_grids() -> None:
    def naive(tokens: VisualTokens, cut: int) -> list[list[int]]:
        found = []
        for row, (n, k) in enumerate(zip(tokens.counts, tokens.keep, strict=True)):
            attention = tokens.unrotated_last_row[row, :, :n].float()
            score = (attention / attention.sum(1, keepdim=True)).mean(0).tolist()
            even = naive_even(None, n, k) if cut == 0 else []
            found.append(sorted(even + best(score, k - len(even), [i for i in range(n) if i not in even])))
        return found

    check_ties(tokenprune.method("feather"), naive)
    check_ties(tokenprune.method("feather", stride=None), lambda tokens, cut: naive(tokens, 1))


@pytest.mark.parametrize("keep", [1, 20, 162, 300, 729])
def test_the_grid_of_the_paper(keep: int) -> None:
    """81 of 27 x 27, if that is not more than half."""
    tokens = view([729], [keep], ["unrotated_last_row"], grids=[(1, 27, 27)])
    method = tokenprune.method("feather")
    even = set(naive_even((27, 27), 729, keep))
    assert (len(even), 0 in even) == (81, True) or keep < 162
    (got,) = rows(method.choose(tokens, 0).keep)
    assert even <= set(got) and len(got) == keep


def test_videos_have_a_grid_a_frame() -> None:
    tokens = view([36], [20], ["unrotated_last_row"], grids=[(4, 3, 3)])
    (got,) = rows(tokenprune.method("feather", stride=2).choose(tokens, 0).keep)
    assert {9 * f for f in range(4)} <= set(got)  # a stride of 2 takes 16, of 3 four


def test_options_are_checked() -> None:
    for options in (dict(stride=0), dict(stride=1.5), dict(second=0.0), dict(second=2), dict(layers=(3,))):
        with pytest.raises(OptionError, match="feather"):
            tokenprune.method("feather", **options)
