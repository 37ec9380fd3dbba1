# SPDX-License-Identifier: Apache-2.0
"""ivc_prune against naive loops written from its description."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from several_cuts import COUNTS, SHARES, Arrived, best, check_in_model, rows, view, wanted
from tokenprune import OptionError
from zoo import FAMILIES


def naive_choice(
    cos: list[float], sin: list[float], visual: Tensor, text: Tensor, keep: int, coordinates: float = 0.05
) -> list[int]:
    """cos, sin: means over a token's angles. visual, text: values `[n, Hkv, D]` of the image, and behind it."""
    count, heads, width = visual.shape
    everything = torch.cat([visual, text]).double()

    def likeness(row: Tensor) -> list[float]:
        total = [0.0] * count
        for h in range(heads):
            share = (everything[:, h] @ row[h].double() / width**0.5).softmax(0)
            total = [one + float(share[i]) / heads for i, one in enumerate(total)]
        return total

    each = min(round(coordinates * count), keep // 4)
    anchors = set(best(cos, each)) | set(best(sin, each))
    of_text = [likeness(row) for row in (text[2:] if len(text) > 2 else text)]  # the first two rate nothing
    from_text = [sum(row[i] for row in of_text) for i in range(count)]
    seeds = best(from_text, max(1, round(0.01 * count)))
    from_seeds = [likeness(visual[i]) for i in seeds]
    score = [from_text[i] + sum(row[i] for row in from_seeds) for i in range(count)]
    rank = {i: (0 if i in anchors else 1 if i in seeds else 2, -score[i], i) for i in range(count)}
    return sorted(sorted(range(count), key=rank.__getitem__)[:keep])


@pytest.mark.parametrize("coordinates", [0.05, 0.2])
def test_coordinates_seeds_and_what_is_like_the_question(coordinates: float, build: Any) -> None:
    decoder = build(FAMILIES["llava"], "eager").get_submodule(FAMILIES["llava"].decoder)

    def naive(seen: Arrived) -> list[int]:
        places = torch.arange(len(seen.hidden))[None]
        cos, sin = (one[0].mean(1) for one in decoder.rotary_emb(seen.hidden[None], places))
        kept = naive_choice(
            cos[seen.places].tolist(), sin[seen.places].tolist(), seen.values[seen.places], seen.values[seen.text],
            seen.keep, coordinates,
        )  # fmt: skip
        return [seen.places[i] for i in kept]

    (cut,) = check_in_model("ivc_prune", naive, build, keep=0.4, coordinates=coordinates)
    assert cut.layer == 2


def test_made_up_tokens() -> None:
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


def test_the_first_two_tokens_of_text_rate_nothing() -> None:
    """5b: in each other's place they change nothing, in the place of one that rates they do."""
    method = tokenprune.method("ivc_prune", coordinates=0.0)

    def kept(order: list[int]) -> list[int]:
        tokens = view([40], [10], method.needs, seed=3)
        tokens.text.value_heads[0] = 3 * tokens.text.value_heads[0, order]
        return rows(method.select(tokens).keep)[0]

    assert kept([0, 1, 2, 3, 4]) == kept([1, 0, 2, 3, 4]) != kept([2, 1, 0, 3, 4])


def test_text_of_two_tokens_rates_all_the_same() -> None:
    tokens = view([40], [10], ("value_heads", "rotation"), seed=3)
    tokens.text.mask[0, 2:] = False
    want = naive_choice(*([0.0] * 40,) * 2, tokens.value_heads[0], tokens.text.value_heads[0, :2], 10, coordinates=0)
    assert rows(tokenprune.method("ivc_prune", coordinates=0).select(tokens).keep) == [want]


def test_coordinates_depend_on_places_alone() -> None:
    one = view([40], [10], ("value_heads", "rotation"), seed=1)
    other = view([40], [10], ("value_heads", "rotation"), seed=2, rotation=one.rotation)
    method = tokenprune.method("ivc_prune")
    both = set(rows(method.select(one).keep)[0]) & set(rows(method.select(other).keep)[0])
    cos, sin = (x.mean(-1)[0].tolist() for x in one.rotation)
    assert {*best(cos, 2), *best(sin, 2)} <= both


def test_options_are_checked() -> None:
    for options in (dict(layer=0), dict(coordinates=0.6), dict(coordinates=-1), dict(layer=2.5)):
        with pytest.raises(OptionError, match="ivc_prune"):
            tokenprune.method("ivc_prune", **options)
