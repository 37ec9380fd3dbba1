# SPDX-License-Identifier: Apache-2.0
"""`each` runs a test for all values, and leaves out none of those that fail."""

from __future__ import annotations

import inspect

import pytest

from each import each


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
