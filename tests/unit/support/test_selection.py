# SPDX-License-Identifier: Apache-2.0
"""The choice of tests: pairs of values are held, the tables name what there is."""

from __future__ import annotations

import inspect
from collections import defaultdict
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import pytest

import tokenprune
import zoo
from each import each
from families import FAMILIES
from selection import (
    FAST_FAMILIES,
    FAST_METHODS,
    FEW_FAMILIES,
    SLOW,
    covering,
    fast_of,
    kind_of,
    leave_out_families,
    leave_out_thorough,
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


def test_a_fast_test_holds_each_value_once() -> None:
    whole = [*items("one", a=list(range(4)), b=list(range(5)), family=["llava", "smolvlm"]), Item(nodeid="two")]
    fast = [item.callspec.params for item in fast_of(whole) if item.nodeid != "two"]
    assert len(fast) == 5 and len(fast_of(whole)) == 6
    assert {one["a"] for one in fast} == set(range(4)) and {one["b"] for one in fast} == set(range(5))
    assert {one["family"] for one in fast} == {"llava"}


class Item(SimpleNamespace):
    """What the choice looks at of a test."""

    __hash__ = object.__hash__
    marked = False

    def get_closest_marker(self, name: str) -> bool | None:
        return self.marked or None


def items(test: str, **values: list) -> list[Item]:
    variants = [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]
    return [Item(nodeid=f"{test}[{'-'.join(map(str, one.values()))}]", callspec=Item(params=one)) for one in variants]


SOME = ["llava", "qwen2_5_vl", "gemma3", "smolvlm"]


def left_of(*tests: list[Item]) -> dict[str, set[str]]:
    """The families that each test is run on for each method, as "test method"."""
    every = [item for test in tests for item in test]
    left = list(every)
    gone = leave_out_families(left)
    assert len(gone) == len(set(gone)) == len(every) - len(left) and not {*gone} & {*left}
    found = defaultdict(set)
    for item in left:
        test, params = item.nodeid.partition("[")[0], item.callspec.params
        found[f"{test} {params['method']}"].add(params.get("family", "none"))
    return found


def test_one_method_of_each_site_runs_on_every_family() -> None:
    found = left_of(items("one", method=["uniform", "random", "divprune", "pool", "dart", "fastv"], family=SOME))
    assert found["one divprune"] == found["one dart"] == set(SOME)
    assert kind_of("random") == kind_of("uniform") == kind_of("divprune") != kind_of("pool")
    assert all(len(found[f"one {name}"]) == 1 for name in ("uniform", "random", "pool", "fastv"))


def test_of_a_test_by_kind_the_first_of_each_runs_on_three_families() -> None:
    whole = items("one", method=["uniform", "random", "divprune", "pool"], family=SOME)
    for item in whole:
        item.marked = True
    found = left_of(whole)
    assert found["one divprune"] == set(SOME)
    assert found["one pool"] == {"llava", "qwen2_5_vl"}
    assert all(len(found[f"one {name}"]) == 1 for name in ("uniform", "random"))


def test_without_these_the_first_runs_on_every_family() -> None:
    methods = ["uniform", "random"]
    found = left_of(items("one", method=methods, family=SOME), items("other", method=methods))
    assert found["one random"] == set(SOME) and len(found["one uniform"]) == 1
    assert found["other random"] == found["other uniform"] == {"none"}


def test_a_method_changes_families_from_test_to_test() -> None:
    found = left_of(*(items(f"test{n}", method=["divprune", "uniform"], family=SOME) for n in range(20)))
    assert set().union(*(found[f"test{n} uniform"] for n in range(20))) == {"llava", "qwen2_5_vl"}
    assert found == left_of(*(items(f"test{n}", method=["divprune", "uniform"], family=SOME) for n in range(20)))


def test_a_method_that_is_not_the_first_of_its_kind_runs_one_variant() -> None:
    """Other values in another test; the methods of each kind that run on every family run all of them."""
    tests = [items(f"test{n}", method=["divprune", "uniform"], family=SOME, batch=[1, 2, 3]) for n in range(20)]
    left = [item for test in tests for item in test]
    leave_out_families(left)
    lone = [item.callspec.params for item in left if item.callspec.params["method"] == "uniform"]
    assert len(lone) == 20 and len(left) == 20 * (len(SOME) * 3 + 1)
    assert {(one["family"], one["batch"]) for one in lone} == set(product(["llava", "qwen2_5_vl"], [1, 2, 3]))


def test_a_method_of_videos_runs_where_there_are_some() -> None:
    found = left_of(items("one", method=["evs", "frames", "stc", "kitoke", "vidcom2"], family=["llava", "qwen2_5_vl"]))
    assert all("llava" not in on for name, on in found.items() if name != "one evs")  # the first stays on all


def test_what_is_thorough_is_left_out() -> None:
    one, other = items("one", a=[1, 2])
    other.marked = True
    left = [one, other]
    assert leave_out_thorough(left) == [other] and left == [one]


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


def test_all_values_that_fail_are_named() -> None:
    seen = []

    @each("number", range(6))
    @each(("word", "length"), [("ab", 2), ("a", 3)])
    def check(fixture: str, number: int, word: str, length: int) -> None:
        seen.append((fixture, number, word))
        if number == 4:
            pytest.skip("no fours")
        if number == 5:
            with pytest.raises(ValueError):
                pass
        assert len(word) == length or number < 2, "too long"

    assert list(inspect.signature(check).parameters) == ["fixture"]
    with pytest.raises(pytest.fail.Exception) as caught:
        check(fixture="x")
    assert seen == [("x", number, word) for number in range(6) for word in ("ab", "a")]
    said = str(caught.value)
    assert "3 of 6 values fail" in said and "number=5" in said and "DID NOT RAISE" in said
    assert said.count("word='a', length=3") == 3 and "number=1" not in said


def test_a_test_of_no_values_that_run_is_skipped() -> None:
    @each("number", range(2))
    def check(number: int) -> None:
        pytest.skip(f"no {number}")

    with pytest.raises(pytest.skip.Exception, match="no 0"):
        check()
