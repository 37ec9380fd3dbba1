# SPDX-License-Identifier: Apache-2.0
"""The choice of tests: pairs of values are held, the tables name what there is."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import tokenprune
from families import FAMILIES
from selection import FAST_FAMILIES, FAST_METHODS, SLOW, covering

TESTS = Path(__file__).parents[1]


def pairs(variant: dict) -> set:
    return set(combinations(sorted(variant.items()), 2))


def test_covering_holds_every_pair_that_any_variant_holds() -> None:
    whole = [dict(zip("abc", values, strict=True)) for values in product(range(4), range(5), range(3))]
    refused = [variant for variant in whole if (variant["a"], variant["b"]) != (1, 2)]
    for variants in (whole, refused):
        held = [variants[index] for index in covering(variants)]
        assert set().union(*map(pairs, held)) == set().union(*map(pairs, variants))
        assert len(held) < len(variants) / 2


def test_covering_keeps_what_has_nothing_to_pair() -> None:
    assert covering([{"a": 1}, {"a": 2}]) == [0, 1]
    assert covering([{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 1}]) == [0, 1, 2]


def test_tables_name_what_there_is() -> None:
    assert FAST_FAMILIES.keys() <= FAMILIES.keys()
    assert FAST_METHODS.keys() <= set(tokenprune.available_methods())
    for place in SLOW:
        path, _, name = place.partition("::")
        assert f"def {name}" in (TESTS / path).read_text(), place
