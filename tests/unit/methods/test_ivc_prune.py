# SPDX-License-Identifier: Apache-2.0
"""ivc_prune against naive loops written from its description."""

from __future__ import annotations

import tokenprune
from several_cuts import COUNTS, SHARES, best, rows, view, wanted
from tests.unit.methods.naive.ivc_prune import naive_choice


def test_selection_matches_loop() -> None:
    method = tokenprune.method("ivc_prune")
    for seed, counts in enumerate(COUNTS):
        for share in SHARES:
            keep = wanted(counts, share)
            tokens = view(counts, keep, method.needs, seed=seed)
            cos, sin = (one.mean(-1) for one in tokens.rotation)
            want = []
            for row, (n, k) in enumerate(zip(counts, keep, strict=True)):
                text = tokens.text.value_heads[row, tokens.text.mask[row]]
                want.append(
                    naive_choice(cos[row, :n].tolist(), sin[row, :n].tolist(), tokens.value_heads[row, :n], text, k)
                )
            assert rows(method.select(tokens).keep) == want


def test_first_two_text_tokens_do_not_rate() -> None:
    """5b: swapping the first two text tokens changes nothing; swapping one with a rating token does."""
    method = tokenprune.method("ivc_prune", coordinates=0.0)

    def kept(order: list[int]) -> list[int]:
        tokens = view([40], [10], method.needs, seed=3)
        tokens.text.value_heads[0] = 3 * tokens.text.value_heads[0, order]
        return rows(method.select(tokens).keep)[0]

    assert kept([0, 1, 2, 3, 4]) == kept([1, 0, 2, 3, 4]) != kept([2, 1, 0, 3, 4])


def test_short_text_still_rates() -> None:
    tokens = view([40], [10], ("value_heads", "rotation"), seed=3)
    tokens.text.mask[0, 2:] = False
    want = naive_choice(*([0.0] * 40,) * 2, tokens.value_heads[0], tokens.text.value_heads[0, :2], 10, coordinates=0)
    assert rows(tokenprune.method("ivc_prune", coordinates=0).select(tokens).keep) == [want]


def test_coordinates_depend_on_positions_only() -> None:
    one = view([40], [10], ("value_heads", "rotation"), seed=1)
    other = view([40], [10], ("value_heads", "rotation"), seed=2, rotation=one.rotation)
    method = tokenprune.method("ivc_prune")
    both = set(rows(method.select(one).keep)[0]) & set(rows(method.select(other).keep)[0])
    cos, sin = (x.mean(-1)[0].tolist() for x in one.rotation)
    assert {*best(cos, 2), *best(sin, 2)} <= both
