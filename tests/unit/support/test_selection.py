# SPDX-License-Identifier: Apache-2.0
"""Test the choice of test variants: pairs of values are covered, and tables name existing tests."""

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
    every = [dict(zip("abc", values, strict=True)) for values in product(range(4), range(5), range(3))]
    refused = [variant for variant in every if (variant["a"], variant["b"]) != (1, 2)]
    for variants in (every, refused):
        covered = [variants[index] for index in covering(variants)]
        assert set().union(*map(pairs, covered)) == set().union(*map(pairs, variants))
        assert len(covered) < len(variants) / 2


def test_covering_keeps_variants_without_pairs() -> None:
    assert covering([{"a": 1}, {"a": 2}]) == [0, 1]
    assert covering([{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 1}]) == [0, 1, 2]


def test_a_fast_test_holds_each_value_once() -> None:
    tests = [*items("one", a=list(range(4)), b=list(range(5)), family=["llava", "smolvlm"]), Item(nodeid="two")]
    fast = [item.callspec.params for item in fast_of(tests) if item.nodeid != "two"]
    assert len(fast) == 5 and len(fast_of(tests)) == 6
    assert {params["a"] for params in fast} == set(range(4)) and {params["b"] for params in fast} == set(range(5))
    assert {params["family"] for params in fast} == {"llava"}


class Item(SimpleNamespace):
    """The attributes of a test that the selection reads."""

    __hash__ = object.__hash__
    marked = False

    def get_closest_marker(self, name: str) -> bool | None:
        return self.marked or None


def items(test: str, **values: list) -> list[Item]:
    variants = [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]
    return [
        Item(nodeid=f"{test}[{'-'.join(map(str, params.values()))}]", callspec=Item(params=params))
        for params in variants
    ]


SOME = ["llava", "qwen2_5_vl", "gemma3", "smolvlm"]


def left_of(*tests: list[Item]) -> dict[str, set[str]]:
    """Return the families that remain for each method of each test, keyed by "test method"."""
    every = [item for test in tests for item in test]
    kept = list(every)
    removed = leave_out_families(kept)
    assert len(removed) == len(set(removed)) == len(every) - len(kept) and not {*removed} & {*kept}
    families = defaultdict(set)
    for item in kept:
        test, params = item.nodeid.partition("[")[0], item.callspec.params
        families[f"{test} {params['method']}"].add(params.get("family", "none"))
    return families


def test_one_method_of_each_site_runs_on_every_family() -> None:
    families = left_of(items("one", method=["uniform", "random", "divprune", "pool", "dart", "fastv"], family=SOME))
    assert families["one divprune"] == families["one dart"] == set(SOME)
    assert kind_of("random") == kind_of("uniform") == kind_of("divprune") != kind_of("pool")
    assert all(len(families[f"one {name}"]) == 1 for name in ("uniform", "random", "pool", "fastv"))


def test_in_tests_marked_each_kind_the_first_method_of_each_kind_runs_on_three_families() -> None:
    tests = items("one", method=["uniform", "random", "divprune", "pool"], family=SOME)
    for item in tests:
        item.marked = True
    families = left_of(tests)
    assert families["one divprune"] == set(SOME)
    assert families["one pool"] == {"llava", "qwen2_5_vl"}
    assert all(len(families[f"one {name}"]) == 1 for name in ("uniform", "random"))


def test_without_fast_methods_the_first_method_runs_on_every_family() -> None:
    methods = ["uniform", "random"]
    families = left_of(items("one", method=methods, family=SOME), items("other", method=methods))
    assert families["one random"] == set(SOME) and len(families["one uniform"]) == 1
    assert families["other random"] == families["other uniform"] == {"none"}


def test_a_reduced_method_runs_on_other_families_in_other_tests() -> None:
    families = left_of(*(items(f"test{n}", method=["divprune", "uniform"], family=SOME) for n in range(20)))
    assert set().union(*(families[f"test{n} uniform"] for n in range(20))) == {"llava", "qwen2_5_vl"}
    assert families == left_of(*(items(f"test{n}", method=["divprune", "uniform"], family=SOME) for n in range(20)))


def test_a_method_that_is_not_the_first_of_its_kind_runs_one_variant() -> None:
    """Values differ between tests. Methods that run on every family run all variants."""
    tests = [items(f"test{n}", method=["divprune", "uniform"], family=SOME, batch=[1, 2, 3]) for n in range(20)]
    kept = [item for test in tests for item in test]
    leave_out_families(kept)
    reduced = [item.callspec.params for item in kept if item.callspec.params["method"] == "uniform"]
    assert len(reduced) == 20 and len(kept) == 20 * (len(SOME) * 3 + 1)
    assert {(params["family"], params["batch"]) for params in reduced} == set(
        product(["llava", "qwen2_5_vl"], [1, 2, 3])
    )


def test_a_video_method_runs_on_families_with_videos() -> None:
    families = left_of(
        items("one", method=["evs", "frames", "stc", "kitoke", "vidcom2"], family=["llava", "qwen2_5_vl"])
    )
    # The first method, evs, runs on all families.
    assert all("llava" not in run_on for name, run_on in families.items() if name != "one evs")


def test_thorough_tests_are_left_out() -> None:
    quick, thorough = items("one", a=[1, 2])
    thorough.marked = True
    kept = [quick, thorough]
    assert leave_out_thorough(kept) == [thorough] and kept == [quick]


def test_the_first_values_run_on_every_family() -> None:
    tests = items("one", family=[zoo.FAMILIES[name] for name in SOME], batch=[{"images": 1}, {"images": 2}])
    for item in tests:
        item.marked = True
    removed = leave_out_values(tests + items("not marked", family=SOME, batch=[1, 2]))
    variants = [(item.callspec.params["family"].name, item.callspec.params["batch"]) for item in removed]
    assert sorted(variants, key=str) == [("gemma3", {"images": 2}), ("smolvlm", {"images": 2})]


def test_tables_name_existing_entries() -> None:
    assert FAST_FAMILIES.keys() <= FAMILIES.keys()
    assert FEW_FAMILIES.keys() <= zoo.FAMILIES.keys()
    assert FAST_METHODS.keys() <= set(tokenprune.available_methods())
    for entry in SLOW:
        path, _, name = entry.partition("::")
        assert f"def {name}" in (TESTS / path).read_text(), entry


def test_all_values_that_fail_are_named() -> None:
    calls = []

    @each("number", range(6))
    @each(("word", "length"), [("ab", 2), ("a", 3)])
    def check(fixture: str, number: int, word: str, length: int) -> None:
        calls.append((fixture, number, word))
        if number == 4:
            pytest.skip("no fours")
        if number == 5:
            with pytest.raises(ValueError):
                pass
        assert len(word) == length or number < 2, "too long"

    assert list(inspect.signature(check).parameters) == ["fixture"]
    with pytest.raises(pytest.fail.Exception) as caught:
        check(fixture="x")
    assert calls == [("x", number, word) for number in range(6) for word in ("ab", "a")]
    message = str(caught.value)
    assert "3 of 6 values fail" in message and "number=5" in message and "DID NOT RAISE" in message
    assert message.count("word='a', length=3") == 3 and "number=1" not in message


def test_a_test_whose_values_all_skip_is_skipped() -> None:
    @each("number", range(2))
    def check(number: int) -> None:
        pytest.skip(f"no {number}")

    with pytest.raises(pytest.skip.Exception, match="no 0"):
        check()
