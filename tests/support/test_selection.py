# SPDX-License-Identifier: Apache-2.0
"""The choice of tests: pairs of values are held, the tables name what there is."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import tokenprune
import zoo
from families import FAMILIES
from selection import (
    FAST_FAMILIES,
    FAST_METHODS,
    FEW_FAMILIES,
    SLOW,
    covering,
    kind_of,
    leave_out_families,
    leave_out_values,
)

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


class Item(SimpleNamespace):
    """What the choice looks at of a test."""

    __hash__ = object.__hash__
    marked = False

    def get_closest_marker(self, name: str) -> bool | None:
        return self.marked or None


def items(test: str, **values: list) -> list[Item]:
    variants = [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]
    return [Item(nodeid=f"{test}[{'-'.join(map(str, one.values()))}]", callspec=Item(params=one)) for one in variants]


SOME = ["llava", "gemma3", "smolvlm"]


def test_one_method_of_each_kind_runs_on_every_family() -> None:
    assert kind_of("random") == kind_of("uniform") == kind_of("divprune") != kind_of("pool")
    every = items("one", method=["uniform", "random", "fastv", "divprune"], family=SOME)
    every += items("other", method=["uniform", "random"], family=SOME) + items("third", method=["uniform", "random"])
    left = list(every)
    gone = {item.nodeid for item in leave_out_families(left)}
    assert gone == {
        f"one[{method}-{family}]" for method in ("uniform", "random") for family in ("gemma3", "smolvlm")
    } | {"other[uniform-gemma3]", "other[uniform-smolvlm]"}
    assert {item.nodeid for item in every} - {item.nodeid for item in left} == gone


def test_the_first_values_run_on_every_family() -> None:
    every = items("one", family=[zoo.FAMILIES[name] for name in SOME], batch=[{"images": 1}, {"images": 2}])
    for item in every:
        item.marked = True
    gone = leave_out_values(every + items("not marked", family=SOME, batch=[1, 2]))
    found = [(item.callspec.params["family"].name, item.callspec.params["batch"]) for item in gone]
    assert sorted(found, key=str) == [("gemma3", {"images": 2}), ("smolvlm", {"images": 2})]


def test_tables_name_what_there_is() -> None:
    assert FAST_FAMILIES.keys() <= FAMILIES.keys()
    assert FEW_FAMILIES.keys() <= zoo.FAMILIES.keys()
    assert FAST_METHODS.keys() <= set(tokenprune.available_methods())
    for place in SLOW:
        path, _, name = place.partition("::")
        assert f"def {name}" in (TESTS / path).read_text(), place
