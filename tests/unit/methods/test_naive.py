# SPDX-License-Identifier: Apache-2.0
"""Methods in the table of tests/unit/methods/naive against their naive loops, and properties of all methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tokenprune
from each import each
from method_rows import CHANGES, Options
from tests.unit.methods.naive import TABLE
from tokenprune import OptionError

COMPARED = [
    pytest.param(name, check, id=f"{name}: {case}") for name, row in TABLE.items() for case, check in row.cases()
]
LARGE = [
    pytest.param(name, check, id=f"{name}: {case}") for name, row in TABLE.items() for case, check in row.large_cases()
]
REFUSED = [(name, wrong) for name, row in TABLE.items() for wrong in row.refused]
UNCHANGED = [(name, change) for name, row in TABLE.items() for change in row.unchanged]
VIEWED = [name for name, row in TABLE.items() if row.view() is not None]


@pytest.mark.parametrize(("name", "check"), COMPARED)
def test_equals_naive_loop(name: str, check: Callable[[str, Any], None], build: Any) -> None:
    check(name, build)


@pytest.mark.parametrize(("name", "check"), LARGE)
def test_equals_naive_loop_at_large_sizes(name: str, check: Callable[[str, Any], None], build: Any) -> None:
    check(name, build)


@each(("name", "wrong"), REFUSED)
def test_invalid_option_raises(name: str, wrong: Options) -> None:
    with pytest.raises(OptionError, match=f"{name}.*{next(iter(wrong))}"):
        tokenprune.method(name, **wrong)


@each(("name", "change"), UNCHANGED)
def test_choice_is_invariant(name: str, change: str) -> None:
    row, method = TABLE[name], tokenprune.method(name)
    for keep in (3, 12):
        tokens = row.view(keep)
        want, got = method.select(tokens), method.select(row.view(keep, **CHANGES[change](tokens)))
        assert torch.equal(got.keep, want.keep)
        if want.assign is not None:
            assert torch.equal(got.assign, want.assign)


@each("name", VIEWED)
def test_full_budget_keeps_all_tokens_unmerged(name: str) -> None:
    tokens = TABLE[name].view()
    selection = tokenprune.method(name).select(tokens)
    assert torch.equal(selection.keep, tokens.mask)
    assert selection.assign is None or selection.assign[0].tolist() == list(range(tokens.counts[0]))
